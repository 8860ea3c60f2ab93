"""`modeling` against plain transformers: the same numbers row by row, whatever shares the forward."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import CONFIGS, POSITIONS, VOCAB, save_tiny

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.models import modeling
from python_backend.models.collation import collate
from python_backend.models.modeling import CriticModel, save_critic
from tests.support.loaders import load_critic, load_reward

TOLERANCE = 1e-5
families = pytest.mark.parametrize("family", CONFIGS)


@pytest.fixture(autouse=True, scope="module")
def quiet():
    modeling.quiet_transformers()


def rows(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, VOCAB, length) for length in lengths]


MIXED = rows(1, 7, POSITIONS, 3, 12, 2)


@torch.no_grad()
def directly(model: Any, row: np.ndarray) -> np.ndarray:
    """One row, no padding: `[1]` for a reward model, `[length]` for a critic."""
    return model(input_ids=torch.from_numpy(row)[None].to(model.device)).logits[0, ..., 0].reshape(-1).cpu().numpy()


def assert_values_equal(critic: CriticModel, model: Any) -> None:
    values = critic.values(MIXED)
    for row, found in zip(MIXED, values, strict=True):
        assert found.shape == row.shape
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, directly(model, row), atol=TOLERANCE)


@families
def test_a_swap_serves_the_new_weights_and_leaves_the_old(tmp_path: Path, family: str):
    old_model = save_tiny(tmp_path / "0", family, "critic", seed=0)
    new_model = save_tiny(tmp_path / "1", family, "critic", seed=1)
    old = load_critic(tmp_path / "0")
    (tmp_path / "2").mkdir()
    save_critic(load_critic(tmp_path / "1"), tmp_path / "2")
    new = old.with_weights(tmp_path / "2")
    assert not any(parameter.is_meta for parameter in new.model.state_dict().values())
    assert_values_equal(new, new_model)
    assert_values_equal(old, old_model)
    assert_values_equal(new.with_weights(tmp_path / "0"), old_model)  # from a swapped one, too


@pytest.mark.parametrize("rope", ["dynamic", "linear", "yarn"])
def test_rotary_scalings_survive_a_swap(tmp_path: Path, rope: str):
    settings = {"rope_parameters": {"rope_type": rope, "factor": 2.0, "rope_theta": 10000.0}}
    model = save_tiny(tmp_path / "1", "llama", "critic", seed=1, **settings)
    save_tiny(tmp_path / "0", "llama", "critic", **settings)
    assert_values_equal(load_critic(tmp_path / "0").with_weights(tmp_path / "1"), model)


def test_values_are_of_the_state_after_their_token(tmp_path: Path):
    """A causal critic's value at t changes with token t, and not with token t+1."""
    save_tiny(tmp_path, "llama", "critic")
    critic = load_critic(tmp_path)
    row = rows(6)[0]
    changed = row.copy()
    changed[3] = (row[3] + 1) % VOCAB
    difference = np.abs(critic.values([row])[0] - critic.values([changed])[0])
    assert (difference[:3] < 1e-6).all()
    assert difference[3] > 1e-3


# ---- a critic's first weights ----


@families
def test_a_body_without_a_head_gets_one_that_answers_0(tmp_path: Path, family: str):
    save_tiny(tmp_path, family, "body")
    critic = load_critic(tmp_path)
    assert all((values == 0).all() for values in critic.values(MIXED))
    loss = critic.forward(*collate(MIXED, critic.model.device)[:2]).sum()
    loss.backward()
    gradients = [p.grad for p in critic.model.parameters() if p.grad is not None]
    assert any((gradient != 0).any() for gradient in gradients)  # it can learn


def test_two_starts_from_one_body_are_the_same_bits(tmp_path: Path):
    save_tiny(tmp_path, "gpt2", "body")
    one, other = (load_critic(tmp_path).model.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


@families
def test_a_critic_from_a_reward_has_its_body(tmp_path: Path, family: str):
    reward = save_tiny(tmp_path, family, "reward").base_model.state_dict()
    critic = load_critic(tmp_path).model.base_model.state_dict()
    shared = set(reward) & set(critic)
    assert len(shared) >= len(critic) - 2
    assert all(torch.equal(reward[name], critic[name].cpu()) for name in shared)


# ---- what is no checkpoint ----


def refused(*parts: object):
    return pytest.raises(CheckpointError, match=".*".join(re.escape(str(part)) for part in parts))


@pytest.mark.parametrize("load", [load_reward, load_critic])
def test_what_is_no_checkpoint_is_named(tmp_path: Path, load: Callable[[Path], Any]):
    with refused(tmp_path / "none", "does not exist or is not a folder"):
        load(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with refused(tmp_path / "file", "does not exist or is not a folder"):
        load(tmp_path / "file")
    with refused(tmp_path, "is not a Hugging Face checkpoint: it has no config.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with refused(tmp_path, "has no model.safetensors: it contains no weights"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with refused(tmp_path, "only pickled weights (pytorch_model.bin)", "save the model again"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with refused(tmp_path, "cannot be loaded"):
        load(tmp_path)


def test_a_body_that_lacks_weights_is_no_critic(tmp_path: Path):
    save_tiny(tmp_path, "llama", "critic")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with refused(tmp_path, "the weights lack model.norm.weight"):
        load_critic(tmp_path)


# ---- what cannot be swapped in ----


MISFITS: dict[str, dict[str, Any]] = {
    "another family": {"family": "qwen2"},
    "other shapes": {"hidden_size": 32},
    "more layers": {"num_hidden_layers": 3},
    "fewer layers": {"num_hidden_layers": 1},
    "truncated": {},
    "no model.safetensors": {},
    "no config.json": {},
}


@pytest.mark.parametrize("what", MISFITS)
def test_what_does_not_fit_is_not_swapped_in(tmp_path: Path, what: str):
    model = save_tiny(tmp_path / "0", "llama", "critic")
    critic = load_critic(tmp_path / "0")
    save_tiny(tmp_path / "1", **{"family": "llama", "head": "critic", **MISFITS[what]})
    if what == "truncated":
        file = tmp_path / "1" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    elif what.startswith("no "):
        (tmp_path / "1" / what.removeprefix("no ")).unlink()
    with refused(tmp_path / "1"):
        critic.with_weights(tmp_path / "1")
    assert_values_equal(critic, model)  # the old one serves on


def test_collate_pads_on_the_right():
    ids, attention, lengths = collate([np.array([5, 6, 7]), np.array([8])], "cpu")
    assert ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert attention.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert lengths.tolist() == [3, 1]
