"""The AdamW optimizer of policy and critic, and its state as named tensors for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import AdamW


def make_adamw(
    parameters: Mapping[str, nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    fused: bool | None = None,
) -> AdamW:
    """Create AdamW over the parameters that require a gradient.

    Weight decay applies only to parameters with two or more dimensions, not to biases and norms.
    """
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, betas=betas, fused=fused)


def state_tensors(optimizer: AdamW, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the optimizer's state as `<key>/<parameter name>` tensors on the CPU."""
    return {
        f"{key}/{name}": value.detach().cpu().contiguous()
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_state(optimizer: AdamW, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Replace the optimizer's state with `tensors`, as returned by `state_tensors`."""
    optimizer.state.clear()
    for full_name, tensor in tensors.items():
        key, _, name = full_name.partition("/")
        on_cpu = key == "step" and not optimizer.defaults["fused"]  # torch keeps `step` on the device only if fused
        optimizer.state[parameters[name]][key] = tensor.to("cpu" if on_cpu else parameters[name].device)
