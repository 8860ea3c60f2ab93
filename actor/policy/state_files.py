"""The files of a policy's checkpoint: trained weights and optimizer state, whole or as the slices of several ranks.

Any number of ranks reads the files that any number has written, with the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from python_backend.models.adapters import check_trained, load_trained, trained_tensors
from python_backend.training.adamw import empty_state, load_state, named_state, state_tensors
from python_backend.training.sharding import read_tensors, stored_shapes, write_slices

if TYPE_CHECKING:
    from actor.policy.policy import Policy

ADAPTERS, WEIGHTS, OPTIMIZER = "adapters", "weights", "optimizer"  # names of files, or of folders of slices
ADAPTERS_FILE, OPTIMIZER_FILE = f"{ADAPTERS}.safetensors", f"{OPTIMIZER}.safetensors"


def write_state(policy: Policy, folder: Path) -> None:
    """Write the trained weights, under LoRA only the adapters, and the optimizer's state."""
    if policy.settings.lora_rank:
        save_file(trained_tensors(policy.model), folder / ADAPTERS_FILE)
    else:
        policy.save(folder)
    parameters = dict(policy.model.named_parameters())
    save_file(state_tensors(policy.optimizer, parameters), folder / OPTIMIZER_FILE)


def write_sharded_state(policy: Policy, folder: Path) -> None:
    """Write this rank's slices of the trained weights and of the optimizer's state; collective. Raises OSError."""
    write_slices(_trained(policy), folder / (ADAPTERS if policy.settings.lora_rank else WEIGHTS))
    write_slices(named_state(policy.optimizer, dict(policy.model.named_parameters())), folder / OPTIMIZER)


def read_state(policy: Policy, folder: Path) -> None:
    """Load what either function wrote; collective on several ranks. Raises CheckpointError."""
    read_weights(policy, folder)
    is_sliced, on_ranks = (folder / OPTIMIZER).is_dir(), policy.world_size > 1
    parameters = dict(policy.model.named_parameters())
    if not is_sliced and not on_ranks:
        load_state(policy.optimizer, parameters, load_file(folder / OPTIMIZER_FILE))
        return
    source = folder / OPTIMIZER if is_sliced else folder
    state = empty_state(parameters, stored_shapes(source))  # other files in the folder hold weights
    read_tensors(state, source, no_dist=not dist.is_initialized())
    load_state(policy.optimizer, parameters, state)


def read_weights(policy: Policy, folder: Path) -> None:
    """Load the trained weights of what either function wrote; collective on several ranks. Raises CheckpointError."""
    is_sliced = (folder / OPTIMIZER).is_dir()
    if is_sliced or (policy.world_size > 1 and policy.settings.lora_rank):
        _read_trained(policy, folder, is_sliced=is_sliced)
    elif policy.settings.lora_rank:
        load_trained(policy.model, load_file(folder / ADAPTERS_FILE), folder / ADAPTERS_FILE, "actor.policy")
    else:
        policy.load(folder)


def _read_trained(policy: Policy, folder: Path, *, is_sliced: bool) -> None:
    own = _trained(policy)
    name = ADAPTERS if policy.settings.lora_rank else WEIGHTS
    source = folder / name if is_sliced else folder
    check_trained(
        {name: tensor.shape for name, tensor in own.items()},
        {name: shape for name, shape in stored_shapes(source).items() if "/" not in name},
        source,
        "actor.policy",
    )
    read_tensors(own, source, no_dist=not dist.is_initialized())


def _trained(policy: Policy) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in policy.model.named_parameters() if p.requires_grad}
