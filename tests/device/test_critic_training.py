"""A critic of each family trains on a card with each setting that docs/scaling.md recommends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import VOCAB, save_tiny

from python_backend.models.modeling import load_critic, save_critic
from python_backend.wire.training_payload import TrainPayload
from tests.support.settings import trainer_section
from trainer.critic_update import CriticUpdate
from trainer.trained_critic import build_critic

LAST_CARD = f"cuda:{torch.cuda.device_count() - 1}"


def payload() -> TrainPayload:
    rng, lengths = np.random.default_rng(0), np.array([5, 9, 3, 12])
    n = (lengths - 1).sum()
    return TrainPayload(
        tokens=rng.integers(1, VOCAB, lengths.sum()),
        lengths=lengths,
        returns=rng.normal(size=n).astype(np.float32),
        prev_values=np.zeros(n, np.float32),
        mask=np.ones(n, np.float32),
    )


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"precision": "bfloat16"}),
        ("llama", {"gradient_checkpointing": True}),
        ("qwen2", {}),
        ("gpt2", {"lora_rank": 2}),
        ("bert", {"precision": "bfloat16", "lora_rank": 2}),
    ],
)
def test_a_critic_trains_on_any_card(family: str, settings: dict[str, Any], tmp_path):
    save_tiny(tmp_path / "critic", family, "critic")
    (tmp_path / "version").mkdir()
    save_critic(load_critic(tmp_path / "critic", device="cpu"), tmp_path / "version")
    section = trainer_section(device=LAST_CARD, warmup_steps=0, **settings)
    update = CriticUpdate(build_critic(tmp_path / "version", section, seed=0), section)
    assert np.isfinite(update.train(payload(), lambda _: None).loss_mean)
    assert {parameter.device for parameter in update.critic.model.parameters()} == {torch.device(LAST_CARD)}
