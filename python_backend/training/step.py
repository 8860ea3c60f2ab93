"""The optimizer step of policy and critic."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from python_backend.models.sharded_tensors import whole


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
