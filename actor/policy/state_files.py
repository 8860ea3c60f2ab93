"""The files of a policy's checkpoint: trained weights and optimizer state, whole or as the slices of several ranks.

Any number of ranks reads the files that any number has written, with the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

from python_backend.models.adapters import load_trained, trained_tensors
from python_backend.training.adamw import load_state, named_state, state_tensors
from python_backend.training.ranks import Ranks
from python_backend.training.sharding import write_slices
from python_backend.training.state import read_optimizer, read_trained, trained_slices

if TYPE_CHECKING:
    from actor.policy.policy import Policy

ADAPTERS, WEIGHTS, OPTIMIZER = "adapters", "weights", "optimizer"  # names of files, or of folders of slices
ADAPTERS_FILE, OPTIMIZER_FILE = f"{ADAPTERS}.safetensors", f"{OPTIMIZER}.safetensors"


def write_state(policy: Policy, folder: Path) -> None:
    """Write the trained weights, under LoRA only the adapters, and the optimizer's state; on several ranks as slices.

    Raises OSError.
    """
    parameters = dict(policy.model.named_parameters())
    if isinstance(policy.ranks, Ranks):
        write_slices(trained_slices(policy.model), folder / (ADAPTERS if policy.settings.lora_rank else WEIGHTS))
        write_slices(named_state(policy.optimizer, parameters), folder / OPTIMIZER)
        return
    if policy.settings.lora_rank:
        save_file(trained_tensors(policy.model), folder / ADAPTERS_FILE)
    else:
        policy.save(folder)
    save_file(state_tensors(policy.optimizer, parameters), folder / OPTIMIZER_FILE)


def read_state(policy: Policy, folder: Path) -> None:
    """Load what `write_state` wrote on any number of ranks; collective. Raises CheckpointError."""
    read_weights(policy, folder)
    is_sliced, on_ranks = (folder / OPTIMIZER).is_dir(), policy.ranks.size > 1
    parameters = dict(policy.model.named_parameters())
    if not is_sliced and not on_ranks:
        load_state(policy.optimizer, parameters, load_file(folder / OPTIMIZER_FILE))
        return
    read_optimizer(policy.optimizer, parameters, folder / OPTIMIZER if is_sliced else folder, policy.ranks)


def read_weights(policy: Policy, folder: Path) -> None:
    """Load the trained weights of what `write_state` wrote; collective. Raises CheckpointError."""
    is_sliced = (folder / OPTIMIZER).is_dir()
    if is_sliced or (policy.ranks.size > 1 and policy.settings.lora_rank):
        name = ADAPTERS if policy.settings.lora_rank else WEIGHTS
        read_trained(policy.model, folder / name if is_sliced else folder, "actor.policy", policy.ranks)
    elif policy.settings.lora_rank:
        load_trained(policy.model, load_file(folder / ADAPTERS_FILE), folder / ADAPTERS_FILE, "actor.policy")
    else:
        policy.load(folder)
