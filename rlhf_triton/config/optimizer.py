"""The configuration of AdamW and its learning-rate schedule."""

import math
from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from rlhf_triton.config.fields import Count, CountOrZero, Section


class OptimizerSection(Section):
    """AdamW and its learning-rate schedule."""

    length: ClassVar[str] = "the run's optimizer steps"
    """Name of the schedule's length in error messages."""

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit`: moments take 2 instead of 8 bytes per weight; needs CUDA and bitsandbytes."""
    lr: PositiveFloat = 9e-7
    """Peak learning rate."""
    min_lr: NonNegativeFloat | None = None
    """Learning rate at the end of the cosine; default: `lr`, which makes it constant after the warm-up."""
    warmup_steps: CountOrZero = 0
    """Optimizer steps of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.1
    """AdamW's weight decay, on matrices only."""
    grad_clip: PositiveFloat = 1.0
    """Maximum gradient norm."""

    def learning_rate(self, step: int, *, total_steps: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0.

        Linear warm-up to `lr` over `warmup_steps`, then cosine decay to `min_lr`, which is reached at `total_steps`,
        then constant. If `min_lr` equals `lr`, the rate after the warm-up is exactly `lr`, without rounding.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        min_lr = self.lr if self.min_lr is None else self.min_lr
        decay_steps = max(1, total_steps - self.warmup_steps)
        share = min(1.0, (step - self.warmup_steps) / decay_steps)
        return min_lr + (self.lr - min_lr) * 0.5 * (1 + math.cos(math.pi * share))


class CriticOptimizerSection(OptimizerSection):
    """AdamW and the learning-rate schedule of the critic: a linear warm-up, then a cosine from `lr` to `min_lr`."""

    length: ClassVar[str] = "trainer.optimizer.max_steps"

    lr: PositiveFloat = 9e-6
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 9e-7
    """Learning rate at the end of the cosine."""
    warmup_steps: CountOrZero = 10
    """Optimizer steps of linear warm-up."""
    max_steps: Count = 9_000
    """Optimizer steps until the cosine reaches `min_lr`, where the rate stays."""
