"""The optimizer of policy and critic: AdamW, its step, and its state in checkpoints."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from rlhf_triton.learning.ranks import AnyRanks
from rlhf_triton.learning.sharding import read_tensors, stored_shapes
from rlhf_triton.python_backend.models.adapters import check_trained
from rlhf_triton.python_backend.models.sharded_tensors import whole

# The AdamW optimizer of policy and critic, and its state as named tensors for checkpoints.
#
# `adamw_8bit` is that of bitsandbytes, whose state consists of plain tensors; torchao's are of its own tensor classes.


def make_adamw(
    parameters: Mapping[str, nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    kind: str = "adamw",
    fused: bool | None = None,
) -> Optimizer:
    """Create AdamW over the parameters that require a gradient.

    Args:
        kind: `adamw`, or `adamw_8bit` with moments of 8 bits, on CUDA only.
        fused: whether torch updates all weights in one kernel; only for `adamw`.

    Weight decay applies only to parameters with two or more dimensions, not to biases and norms.
    """
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    if kind == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit  # not a dependency

        return AdamW8bit(groups, lr=lr, betas=betas)
    return AdamW(groups, lr=lr, betas=betas, fused=fused)


def named_state(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the optimizer's state as `<key>/<parameter name>` tensors, sharded as the parameters are."""
    return {
        f"{key}/{name}": torch.as_tensor(value).detach()  # bitsandbytes counts steps in an int
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def state_tensors(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the optimizer's state as `<key>/<parameter name>` tensors on the CPU."""
    return {name: tensor.cpu().contiguous() for name, tensor in named_state(optimizer, parameters).items()}


def empty_state(parameters: Mapping[str, nn.Parameter], names: Iterable[str]) -> dict[str, Tensor]:
    """Return a tensor to read into for each of `names` that `named_state` gave, sharded as the parameters are."""
    parts = {full_name: full_name.partition("/") for full_name in names}
    return {
        full_name: torch.zeros(()) if key == "step" else torch.zeros_like(parameters[name].detach())
        for full_name, (key, _, name) in parts.items()
        if name in parameters
    }


def load_state(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Replace the optimizer's state with `tensors`, as returned by `state_tensors`."""
    optimizer.state.clear()
    for full_name, tensor in tensors.items():
        key, _, name = full_name.partition("/")
        state, device = optimizer.state[parameters[name]], parameters[name].device
        if key != "step":
            state[key] = tensor.to(device)
        elif isinstance(optimizer, AdamW):
            state[key] = tensor.to(device if optimizer.defaults["fused"] else "cpu")
        else:
            state[key] = int(tensor)


def take_step(optimizer: Optimizer, parameters: Iterable[nn.Parameter], *, lr: float, grad_clip: float) -> float | None:
    """Clip the gradients, take an optimizer step and drop the gradients; collective if the parameters are sharded.

    Args:
        lr: the learning rate of this step.
        grad_clip: largest norm of all gradients together.

    Returns:
        The norm before clipping; None if it is not finite, in which case the weights are unchanged.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    total = whole(torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None]))
    torch.nn.utils.clip_grads_with_norm_(trained, grad_clip, total)
    norm = float(total)
    is_finite = math.isfinite(norm)
    if is_finite:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm if is_finite else None


# Trained weights and optimizer state of policy and critic, sliced: any number of ranks reads them bit-identically.


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
