"""Trained weights and optimizer state of policy and critic, sliced: any number of ranks reads the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from python_backend.models.adapters import check_trained
from python_backend.training.adamw import empty_state, load_state
from python_backend.training.ranks import AnyRanks
from python_backend.training.sharding import read_tensors, stored_shapes


def trained_slices(model: Any) -> dict[str, Tensor]:
    """Return this rank's part of the trainable parameters, by name."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def read_trained(model: Any, folder: Path, section: str, ranks: AnyRanks) -> None:
    """Load the trainable parameters from the files in `folder`, sliced or whole; collective.

    Args:
        section: the section of the configuration with the `lora_...` settings, for the error.

    Raises:
        CheckpointError: names or shapes differ from the model's.
    """
    own = trained_slices(model)
    stored = {name: shape for name, shape in stored_shapes(folder).items() if "/" not in name}
    check_trained({name: tensor.shape for name, tensor in own.items()}, stored, folder, section)
    read_tensors(own, folder, no_dist=ranks.size == 1)


def read_optimizer(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], folder: Path, ranks: AnyRanks) -> None:
    """Load what `named_state` gave from the files in `folder`, which may hold weights, too; collective."""
    state = empty_state(parameters, stored_shapes(folder))  # none before the first step
    read_tensors(state, folder, no_dist=ranks.size == 1)
    load_state(optimizer, parameters, state)
