"""The leaner forward of Llama and Qwen2: equal to transformers' own, used only where it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_checkpoints import POSITIONS, VOCAB, save_tiny

from python_backend.models.lean_decoder import LeanDecoder, lean_decoder
from python_backend.models.modeling import load_critic, load_reward

TOLERANCE = 1e-5


def rows(*lengths: int) -> list[np.ndarray]:
    generator = np.random.default_rng(sum(lengths))
    return [generator.integers(1, VOCAB, length, dtype=np.int64) for length in lengths]


@pytest.mark.parametrize("lengths", [(1,), (5,), (7, 7), (1, 9, 4), (POSITIONS, 2, POSITIONS - 1)])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": False}),
        ("qwen2", {}),
        ("llama", {"head_dim": 16}),
    ],
)
def test_every_token_and_the_last_one_are_those_of_transformers(
    tmp_path: Path, family: str, settings: dict[str, object], lengths: tuple[int, ...]
) -> None:
    save_tiny(tmp_path / "reward", family, "reward", **settings)
    save_tiny(tmp_path / "critic", family, "critic", **settings)
    reward, critic = load_reward(tmp_path / "reward"), load_critic(tmp_path / "critic")
    assert reward._outputs is not None
    assert reward._outputs.lean is not None
    assert critic._token_head.lean is not None
    lean_scores, lean_values = reward.score(rows(*lengths)), critic.values(rows(*lengths))
    reward.use_own_forward()
    critic._token_head.lean = None
    np.testing.assert_allclose(lean_scores, reward.score(rows(*lengths)), atol=TOLERANCE)
    for lean, own in zip(lean_values, critic.values(rows(*lengths)), strict=True):
        np.testing.assert_allclose(lean, own, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gpt2", {}),
        ("bert", {}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    ],
)
def test_other_architectures_keep_transformers_forward(
    tmp_path: Path, family: str, settings: dict[str, object]
) -> None:
    assert lean_decoder(save_tiny(tmp_path, family, "critic", **settings)) is None


def test_a_forward_that_differs_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny(tmp_path, "llama", "critic")
    assert lean_decoder(model) is not None
    whole = LeanDecoder.hidden
    monkeypatch.setattr(LeanDecoder, "hidden", lambda self, ids: whole(self, ids) * 1.001)
    assert lean_decoder(model) is None


def test_training_runs_transformers_forward(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", "critic")
    critic = load_critic(tmp_path)
    critic._token_head.lean.hidden = None  # type: ignore[assignment, union-attr]
    ids = torch.from_numpy(rows(6)[0])[None]
    critic.forward(ids, torch.ones_like(ids)).sum().backward()
    assert all(parameter.grad is not None for parameter in critic.model.base_model.parameters())
