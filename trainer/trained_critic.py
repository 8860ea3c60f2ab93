"""The critic in training, as built by the settings of `trainer`; its optimizer is created afterwards.

It may differ from the served critic: LoRA adapters instead of new weights, frozen matrices in bfloat16, another
attention implementation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from python_backend.checkpoints.inspection import ADAPTERS_KEY, CONFIG_FILE, WEIGHTS_FILE, Constants, StoredAdapters
from python_backend.config import TrainerSection
from python_backend.models.adapters import Lora, describe_adapters, trained_tensors, with_adapters
from python_backend.models.modeling import CriticModel, load_critic, write_config
from python_backend.models.precision import in_float32, use_bfloat16
from python_backend.models.token_head import head_of
from python_backend.store.durable import disk_errors
from python_backend.training.attention import use_attention
from python_backend.training.gradient_checkpointing import checkpoint_gradients

BASE_VERSION = 0  # which training starts from; never pruned


class TrainedCritic(CriticModel):
    """A critic in training that is not stored the way it is served."""

    def __init__(self, model: Any, plain: CriticModel, *, adapters: StoredAdapters | None = None) -> None:
        """
        Args:
            model: the model in training.
            plain: the critic that training started from, as it is served: the template of its versions.
            adapters: description of its versions if they hold adapters only; None: they hold all weights.
        """
        super().__init__(model, constants=Constants(plain.mean, plain.std), note=plain.note, like=plain)
        self._plain, self.adapters = plain, adapters
        self._token_head.lean = None  # it reads the weights themselves, without their adapters

    def values(self, rows: Sequence[np.ndarray], width: int | None = None) -> list[np.ndarray]:
        """Return values as `CriticModel.values` does, computed in float32."""
        with in_float32(self.model):
            return super().values(rows, width)

    def write(self, folder: Path) -> Mapping[str, str] | None:
        if self.adapters is None:
            return super().write(folder)
        write_adapters(self, trained_tensors(self.model), self.adapters, folder)
        return None

    def with_weights(self, folder: Path) -> CriticModel:
        return self._plain.with_weights(folder)


def write_adapters(critic: CriticModel, trained: dict[str, Tensor], adapters: StoredAdapters, folder: Path) -> None:
    """Write a version that holds only the `trained` tensors of the critic. Raises OSError."""
    with disk_errors(folder / WEIGHTS_FILE):
        save_file(trained, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = json.loads(write_config(critic, folder).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps({**config, ADAPTERS_KEY: asdict(adapters)}, indent=2))


def build_critic(folder: Path, settings: TrainerSection, *, seed: int) -> CriticModel:
    """Load the critic to train from version 0 in `folder`.

    Args:
        seed: seed of the adapters' initial weights.

    Raises:
        CheckpointError: the model does not support one of the settings.
    """
    stored_as = torch.bfloat16 if settings.publish.dtype == "bfloat16" else None
    if not settings.changes_the_model:
        critic = load_critic(folder, device=settings.device)
        critic.stored_as = stored_as
        return critic
    plain = load_critic(folder)  # stays mapped from the file, on the CPU
    torch.manual_seed(seed)
    model = prepare_for_training(plain.with_weights(folder).model, settings)
    adapters = describe_adapters(model, base=BASE_VERSION) if settings.publish.format == "adapter" else None
    critic = TrainedCritic(model.to(settings.device), plain, adapters=adapters)
    critic.stored_as = stored_as
    return critic


def prepare_for_training(model: Any, settings: TrainerSection) -> Any:
    """Return the critic's model with the adapters, precision and attention of `settings`. Raises CheckpointError."""
    head = head_of(model)
    if settings.lora_rank:
        lora = Lora("trainer", settings.lora_rank, settings.lora_alpha, settings.lora_targets)
        model = with_adapters(model, lora, head).get_base_model()
        head.requires_grad_(True)
    if settings.precision == "bfloat16":
        use_bfloat16(model, head)  # on the CPU, so that the device holds frozen matrices in bfloat16 only
    use_attention(model, settings.attention, "trainer.attention")
    if settings.gradient_checkpointing:
        checkpoint_gradients(model, "trainer.gradient_checkpointing")
    return model
