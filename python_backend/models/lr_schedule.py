"""The learning-rate schedule of policy and critic: linear warm-up, cosine, constant end."""

from __future__ import annotations

import math


def scheduled_lr(
    step: int, *, lr: float, min_lr: float, warmup_steps: int, constant_steps: int, max_steps: int
) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    Rises linearly to `lr` over `warmup_steps`, follows a cosine down to `min_lr` until `constant_steps` before
    `max_steps`, and stays there, after `max_steps` too. With `min_lr` equal to `lr` it is exactly `lr` there.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    decay_steps = max(1, max_steps - warmup_steps - constant_steps)
    share = min(1.0, (step - warmup_steps) / decay_steps)
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * share))
