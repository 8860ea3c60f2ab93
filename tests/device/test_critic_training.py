"""A critic of each family trains on a GPU with each setting that docs/scaling.md recommends."""

import numpy as np
import pytest
import torch
from critic_training import small_payload
from settings import trainer_section
from tiny_checkpoints import save_tiny

from rlhf_triton.models.modeling import load_critic
from rlhf_triton.trainer.critic_update import CriticUpdate
from rlhf_triton.trainer.trained_critic import build_critic

LAST_GPU = f"cuda:{torch.cuda.device_count() - 1}"


def update_of(folder, family, **settings):
    save_tiny(folder / "critic", family, "critic")
    (folder / "version").mkdir()
    load_critic(folder / "critic", device="cpu").write(folder / "version")
    section = trainer_section(warmup_steps=0, **settings)
    return CriticUpdate(build_critic(folder / "version", section, seed=0), section)


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
def test_critic_trains_on_the_configured_gpu(family, settings, tmp_path):
    update = update_of(tmp_path, family, device=LAST_GPU, **settings)
    assert np.isfinite(update.train(small_payload(), lambda _: None).loss_mean)
    assert {parameter.device for parameter in update.critic.model.parameters()} == {torch.device(LAST_GPU)}
