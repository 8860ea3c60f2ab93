"""A served model split over two cards: the memory of a swap."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import simcuda
import torch
from safetensors.torch import load_file
from tiny_checkpoints import save_tiny

from python_backend.checkpoints.inspection import WEIGHTS_FILE
from python_backend.models.modeling import load_critic, save_critic
from python_backend.serving.ranks.controller import ServingRanks
from tests.support.ranks import serving_ranks

FIRST_CARD = 4
SWAP = 2.1  # times the weights: the served version, the next one, and one tensor of its file
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 6, "num_attention_heads": 4}
ROWS = [np.arange(3, 3 + length) for length in (2, 9, 30)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[ServingRanks]:
    """Two ranks, each with a card; this process is rank 0."""
    with serving_ranks(f"cuda:{FIRST_CARD}") as ranks:
        yield ranks


@pytest.fixture
def versions(tmp_path: Path) -> list[Path]:
    """Two critics of one architecture, in float32 files."""
    folders = []
    for seed in (1, 2):
        save_tiny(tmp_path / f"checkpoint-{seed}", "llama", "critic", seed=seed, **SIZES)
        (folder := tmp_path / f"version-{seed}").mkdir()
        save_critic(load_critic(tmp_path / f"checkpoint-{seed}"), folder)
        assert {tensor.dtype for tensor in load_file(folder / WEIGHTS_FILE).values()} == {torch.float32}
        folders.append(folder)
    return folders


def test_a_swap_holds_two_versions_in_the_served_precision(ranks: ServingRanks, versions: list[Path]):
    before = simcuda.allocated(FIRST_CARD)
    served = ranks.load("load_critic", versions[0], None, {"dtype": "bfloat16"})
    weights = simcuda.allocated(FIRST_CARD) - before
    assert weights < 0.6 * 2 * sum(p.numel() for p in load_critic(versions[0]).model.parameters())  # bytes of half
    simcuda.reset_peak(FIRST_CARD)
    following = ranks.load("load_critic", versions[1], served, {"dtype": "bfloat16"})
    assert simcuda.peak(FIRST_CARD) - before <= SWAP * weights
    for model, folder in ((served, versions[0]), (following, versions[1])):
        with ranks.forward(model, ROWS, 30):
            found = model.values(ROWS, 30)
        exact = load_critic(folder, dtype="bfloat16").values(ROWS, 30)
        assert {parameter.device.index for parameter in model.model.parameters()} == {FIRST_CARD}
        for ours, expected in zip(found, exact, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=0, atol=0.1 * np.abs(expected).max())
