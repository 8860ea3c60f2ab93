"""The learning-rate schedule of policy and critic: linear warm-up, cosine decay, constant tail."""

from __future__ import annotations

import math


def scheduled_lr(
    step: int, *, lr: float, min_lr: float, warmup_steps: int, constant_steps: int, max_steps: int
) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    Linear warm-up to `lr` over `warmup_steps`, then cosine decay to `min_lr`, which is reached `constant_steps`
    before `max_steps`, then constant, even beyond `max_steps`. If `min_lr` equals `lr`, the rate after the warm-up is
    exactly `lr`, without rounding.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    decay_steps = max(1, max_steps - warmup_steps - constant_steps)
    share = min(1.0, (step - warmup_steps) / decay_steps)
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * share))
