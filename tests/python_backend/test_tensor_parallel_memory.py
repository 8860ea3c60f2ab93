"""A served model on two ranks is lost with the rank that runs out of memory, and the reason names the setting."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_system import wait_for
from tiny_checkpoints import save_tiny

from python_backend.models.modeling import RewardModel
from python_backend.serving.ranks.controller import ServingRanks
from tests.support.full_card import let_memory_be_short


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_card_is_the_reason_why_a_model_lost_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    save_tiny(tmp_path / "reward", "llama", "reward")
    if rank:
        let_memory_be_short(monkeypatch, tmp_path, "python_backend.models.modeling", "RewardModel", "launch")
    lost: list[str] = []
    ranks = ServingRanks(2, "cpu", 1, lost.append)
    try:
        model: Any = ranks.load("load_reward", tmp_path / "reward", None, {"dtype": "float32"})

        def full(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        if not rank:
            monkeypatch.setattr(RewardModel, "score", full)

        def forward() -> None:
            with ranks.forward(model, [np.arange(3, 20)], 32):
                model.score([np.arange(3, 20)], 32)

        threading.Thread(target=forward, daemon=True).start()  # never returns: its requests are answered elsewhere
        wait_for(lambda: bool(lost), timeout_s=60.0)
    finally:
        ranks.close()
        torch.distributed.destroy_process_group()
    expected = f"rank {rank} has run out of the memory of cpu (CUDA out of memory); lower token_budget"
    assert [reason.endswith(expected) for reason in lost] == [True]
