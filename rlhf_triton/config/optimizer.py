"""The configuration of AdamW and its learning-rate schedule."""

import math
from typing import Annotated, Literal

from pydantic import Field

from rlhf_triton.config.fields import Beta, Count, CountOrZero, Section

# The learning-rate schedule of policy and critic: linear warm-up, cosine decay, constant tail.


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


class OptimizerSection(Section):
    """AdamW and its learning-rate schedule."""

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit`: moments take 2 instead of 8 bytes a weight; needs CUDA and bitsandbytes."""
    lr: Annotated[float, Field(gt=0)] = 9e-7
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0)] | None = None
    """Learning rate at the end of the cosine; default: `lr`, which makes it constant after the warm-up."""
    warmup_steps: CountOrZero = 0
    """Optimizer steps of linear warm-up."""
    constant_steps: CountOrZero = 0
    """Optimizer steps at `min_lr` after the cosine."""
    max_steps: Count | None = None
    """Optimizer steps of the whole schedule; default: the run's optimizer steps."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """AdamW's betas."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """AdamW's weight decay, on matrices only."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Maximum gradient norm."""

    def learning_rate(self, step: int, *, total_steps: int = 0) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0.

        Args:
            total_steps: length of the schedule if `max_steps` is None.
        """
        return scheduled_lr(
            step,
            lr=self.lr,
            min_lr=self.lr if self.min_lr is None else self.min_lr,
            warmup_steps=self.warmup_steps,
            constant_steps=self.constant_steps,
            max_steps=self.max_steps or total_steps,
        )


class CriticOptimizerSection(OptimizerSection):
    """AdamW and the learning-rate schedule of the critic."""

    lr: Annotated[float, Field(gt=0)] = 9e-6
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0)] = 9e-7
    """Learning rate at the end of the cosine."""
    warmup_steps: CountOrZero = 10
    """Optimizer steps of linear warm-up."""
    constant_steps: CountOrZero = 1000
    """Optimizer steps at `min_lr` after the cosine."""
    max_steps: Count = 10_000
    """Optimizer steps of the whole schedule."""


def check_optimizer(key: str, optimizer: OptimizerSection, *, total_steps: int = 0) -> None:
    """Raise ValueError if the schedule of the section `key` contradicts itself.

    Args:
        total_steps: length of the schedule if `max_steps` is None.
    """
    lr, min_lr, longest = optimizer.lr, optimizer.min_lr, optimizer.max_steps or total_steps
    warmup, constant = optimizer.warmup_steps, optimizer.constant_steps
    if min_lr is not None and min_lr > lr:
        raise ValueError(f"{key}.min_lr ({min_lr:g}) is above {key}.lr ({lr:g}); lower it, or remove it")
    if warmup + constant > longest:
        raise ValueError(
            f"{key}.warmup_steps ({warmup}) + {key}.constant_steps ({constant}) is more than {key}.max_steps "
            f"({longest}{'' if optimizer.max_steps else ', the whole run'})"
        )
