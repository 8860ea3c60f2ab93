"""`python_backend.training.adamw`: the state of both kinds of AdamW is stored as plain tensors and restored."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from python_backend.training.adamw import load_state, make_adamw, state_tensors

RATES: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1}


class StandIn(torch.optim.Optimizer):
    """Keeps its state as bitsandbytes' AdamW8bit does, which needs CUDA: 8-bit moments and the steps in an int."""

    def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"step": 0, "state1": torch.zeros_like(parameter, dtype=torch.uint8)}
                state["step"] += 1
                state["state1"] += (parameter.grad * 10).abs().byte()
                change = state["state1"].float() / state["step"] + group["weight_decay"] * parameter
                parameter -= group["lr"] * change


@pytest.fixture(params=["adamw", "adamw_8bit"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    optim = ModuleType("bitsandbytes.optim")
    optim.AdamW8bit = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", optim)
    return request.param


def train(parameters: dict[str, nn.Parameter], optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        sum(parameter.square().sum() for parameter in parameters.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


def fresh(kind: str) -> tuple[dict[str, nn.Parameter], Any]:
    torch.manual_seed(0)
    parameters = {"weight": nn.Parameter(torch.randn(3, 2)), "bias": nn.Parameter(torch.randn(3))}
    return parameters, make_adamw(parameters, kind=kind, **RATES)


def test_a_restored_optimizer_goes_on_bit_for_bit(tmp_path: Path, kind: str):
    parameters, optimizer = fresh(kind)
    train(parameters, optimizer, 2)
    save_file(state_tensors(optimizer, parameters), tmp_path / "state")
    others, restored = fresh(kind)
    for name, parameter in others.items():
        parameter.data.copy_(parameters[name].data)
    load_state(restored, others, load_file(tmp_path / "state"))
    for each in ((parameters, optimizer), (others, restored)):
        train(*each, steps=2)
    assert all(torch.equal(others[name], parameter) for name, parameter in parameters.items())
    assert isinstance(optimizer, StandIn) == (kind == "adamw_8bit")
    decays = [(group["weight_decay"], [p.ndim for p in group["params"]]) for group in optimizer.param_groups]
    assert decays == [(0.1, [2]), (0.0, [1])]  # matrices only


def test_the_real_one_is_what_the_stand_in_stands_for(tmp_path: Path):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not a dependency")
    if not torch.cuda.is_available():
        pytest.skip("bitsandbytes' AdamW8bit needs CUDA")
    parameters = {"weight": nn.Parameter(torch.randn(128, 128, device="cuda"))}
    optimizer = make_adamw(parameters, kind="adamw_8bit", **RATES)
    assert isinstance(optimizer, bitsandbytes.optim.AdamW8bit)
    train(parameters, optimizer, 2)
    save_file(state_tensors(optimizer, parameters), tmp_path / "state")
    load_state(optimizer, parameters, load_file(tmp_path / "state"))
    train(parameters, optimizer, 1)
