"""A critic of each family trains on a card with each setting that docs/scaling.md recommends."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import VOCAB, save_tiny

from rlhf_triton.python_backend.models.modeling import load_critic, save_critic
from rlhf_triton.trainer.critic_update import CriticUpdate
from rlhf_triton.trainer.trained_critic import build_critic
from rlhf_triton.wire.training_payload import TrainPayload
from tests.support.settings import trainer_section

LAST_CARD = f"cuda:{torch.cuda.device_count() - 1}"


def payload(seed: int = 0, lengths: Sequence[int] = (5, 9, 3, 12)) -> TrainPayload:
    rng, num = np.random.default_rng(seed), sum(lengths) - len(lengths)
    returns, prev_values = rng.normal(size=(2, num)).astype(np.float32)
    return TrainPayload(
        rng.integers(1, VOCAB, sum(lengths)), np.array(lengths), returns, prev_values, np.ones(num, np.float32)
    )


def updates_of(folder: Path, family: str, num: int = 1, **settings: Any) -> list[CriticUpdate]:
    """Updates of as many critics with the same weights."""
    save_tiny(folder / "critic", family, "critic")
    (folder / "version").mkdir()
    save_critic(load_critic(folder / "critic", device="cpu"), folder / "version")
    section = trainer_section(warmup_steps=0, **settings)
    return [CriticUpdate(build_critic(folder / "version", section, seed=0), section) for _ in range(num)]


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
def test_a_critic_trains_on_any_card(family: str, settings: dict[str, Any], tmp_path: Path):
    (update,) = updates_of(tmp_path, family, device=LAST_CARD, **settings)
    assert np.isfinite(update.train(payload(), lambda _: None).loss_mean)
    assert {parameter.device for parameter in update.critic.model.parameters()} == {torch.device(LAST_CARD)}
