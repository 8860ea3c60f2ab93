"""`rlhf_triton.learning.step` and `lr_schedule`: the optimizer's state, stored and restored, and its rate."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rlhf_triton.config import ActorSection
from rlhf_triton.config.optimizer import scheduled_lr
from rlhf_triton.learning.step import load_state, make_adamw, state_tensors
from tests.support.settings import actor_section

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


# ---- the learning rate ----


def test_warm_up_cosine_and_constant_end():
    schedule = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 4, "constant_steps": 10, "max_steps": 34}
    assert [scheduled_lr(step, **schedule) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert scheduled_lr(14, **schedule) == pytest.approx(0.55)  # half of the cosine
    assert scheduled_lr(24, **schedule) == pytest.approx(0.1)
    assert scheduled_lr(1_000_000, **schedule) == pytest.approx(0.1)


def rate_of(actor: ActorSection, step: int) -> float:
    return actor.optimizer.learning_rate(step, total_steps=actor.optimizer_steps)


def test_without_settings_the_policy_keeps_its_learning_rate():
    actor = actor_section(lr=9e-7, steps=3)
    assert {rate_of(actor, step) for step in range(100)} == {9e-7}  # to the last bit


def test_the_policy_s_cosine_ends_with_the_run():
    """Two passes over 3 minibatches (the last one smaller) in each of 10 steps; the first 2 train the critic alone."""
    schedule = {"lr": 1.0, "min_lr": 0.0, "warmup_steps": 4, "constant_steps": 4}
    sizes = {"steps": 10, "critic_warmup_steps": 2, "rollout_size": 20, "minibatch_size": 8, "update_epochs": 2}
    actor = actor_section(**sizes, **schedule)
    assert [rate_of(actor, step) for step in (0, 3, 4, 24, 44, 48, 99)] == pytest.approx([0.25, 1, 1, 0.5, 0, 0, 0])
    longer = actor_section(**sizes, **schedule, max_steps=88)
    assert rate_of(longer, 44) == pytest.approx(0.5)
