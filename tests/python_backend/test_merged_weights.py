"""Merged weights: those of peft's own merge, written one tensor at a time in the bytes of the safetensors library."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_tiny

from actor.policy.policy import Policy
from python_backend.checkpoints.tensor_file import write_tensors
from python_backend.models.adapters import MergedWeights
from python_backend.models.modeling import load_critic, save_critic
from tests.python_backend.test_precision import make_policy, save_policy


def test_a_file_has_the_bytes_of_the_library(tmp_path: Path):
    torch.manual_seed(0)
    tensors = {
        "b": torch.randn(3, 5),
        "a": torch.arange(3),
        "half.x": torch.randn(7).bfloat16(),
        "ä": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "bool": torch.tensor([True, False, True]),
    }
    save_file(tensors, tmp_path / "whole", metadata={"format": "pt"})
    write_tensors(tmp_path / "streamed", {n: (t.dtype, t.shape) for n, t in tensors.items()}, tensors.__getitem__)
    assert (tmp_path / "streamed").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_model_keeps_the_weights_of_the_file_that_it_is_saved_over(tmp_path: Path):
    """They are mapped: without the file's pages behind them, reading them would end the process."""
    save_tiny(tmp_path, "llama", "critic")
    critic = load_critic(tmp_path)
    before = {name: tensor.clone() for name, tensor in critic.model.state_dict().items()}
    save_critic(critic, tmp_path, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} > {torch.bfloat16}
    assert all(torch.equal(tensor, before[name]) for name, tensor in critic.model.state_dict().items())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_saved_policy_is_peft_s_own_merge(tmp_path: Path, family: str, precision: str):
    """GPT-2's layers are transposed and its output layer is tied; Mixtral's experts are stored under other names."""
    policy = make_policy(save_policy(tmp_path / "start", family), lora_rank=2, precision=precision)
    disturb(policy)
    policy.save(tmp_path / "streamed")
    copy.deepcopy(policy.model).float().merge_and_unload().save_pretrained(tmp_path / "copied")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("streamed", "copied"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    names = {path.name for path in (tmp_path / "copied").iterdir()}
    assert names <= {path.name for path in (tmp_path / "streamed").iterdir()}
    assert "merged.safetensors" not in {path.name for path in (tmp_path / "streamed").iterdir()}
    for name in names - {"model.safetensors"}:
        assert (tmp_path / "streamed" / name).read_text() == (tmp_path / "copied" / name).read_text()


def test_merging_needs_the_memory_of_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No tensor is alive when the next one is merged."""
    policy = make_policy(save_policy(tmp_path / "start"), lora_rank=2)
    alive: list[int] = []
    monkeypatch.setattr(MergedWeights, "__getitem__", watched(MergedWeights.__getitem__, alive))
    policy.save(tmp_path / "saved")
    assert len(alive) > 10
    assert max(alive) == 0


def watched(original: Any, alive: list[int]) -> Any:
    """Count, at each call, how many of the tensors returned before still exist."""
    returned: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def counting(weights: MergedWeights, name: str) -> torch.Tensor:
        alive.append(len(returned))
        tensor = original(weights, name)
        if name in weights.adapted:
            returned.add(tensor)
        return tensor

    return counting


def disturb(policy: Policy) -> None:
    """Give the adapters an effect: new ones add 0."""
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
