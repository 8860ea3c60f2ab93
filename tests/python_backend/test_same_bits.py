"""A version's values have the same bits however it came into service, and whatever was scored before it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from live_system import random_rows
from transformers import LlamaConfig, LlamaForTokenClassification

from python_backend.models.modeling import CriticModel, load_critic, save_critic

ROWS = random_rows([1, 2, 3, 7, 16, 31, 50, 77, 120], seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version, wide enough for sums whose order shows in the last bits."""
    root = tmp_path_factory.mktemp("versions")
    (root / "0").mkdir()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        num_labels=1,
        initializer_range=0.1,
    )
    save_critic(CriticModel(LlamaForTokenClassification(config)), root / "0")
    return root / "0"


def values(critic: CriticModel, rows: list[np.ndarray]) -> list[np.ndarray]:
    """Each row in a forward of its own, as `run.deterministic` has it."""
    return [critic.values([row])[0] for row in rows]


def assert_same_bits(ones: list[np.ndarray], others: list[np.ndarray]) -> None:
    assert [one.tobytes() for one in ones] == [other.tobytes() for other in others]


def test_a_swapped_version_and_a_fresh_process_agree(folder: Path) -> None:
    fresh = load_critic(folder)
    assert_same_bits(values(fresh.with_weights(folder), ROWS), values(fresh, ROWS))


def test_the_order_of_arrival_does_not_show(folder: Path) -> None:
    critic = load_critic(folder)
    assert_same_bits(values(critic, ROWS[::-1])[::-1], values(critic, ROWS))


def test_rows_that_share_a_forward_differ(folder: Path) -> None:
    """Why `run.deterministic` gives each row a forward of its own."""
    critic = load_critic(folder)
    together = critic.values(ROWS)
    assert any(a.tobytes() != b.tobytes() for a, b in zip(together, values(critic, ROWS), strict=True))
