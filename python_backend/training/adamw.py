"""The AdamW optimizer of policy and critic, and its state as named tensors for checkpoints.

`adamw_8bit` is that of bitsandbytes, whose state consists of plain tensors; torchao's are of its own tensor classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer


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
