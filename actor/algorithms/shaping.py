"""Shapes the server's scores: normalisation, then clipping, then the penalties on length.

Penalties come last, so they are in units of normalised scores and are never clipped away.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actor.algorithms.advantages import is_rounding
from actor.data.rollout import Rollout
from python_backend.config import ActorSection

EPSILON = 1e-8


class RunningMoments:
    """Mean and variance of everything seen so far.

    Source: Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    def __init__(self, count: float = 0.0, mean: float = 0.0, squares: float = 0.0) -> None:
        self.count, self.mean, self.squares = count, mean, squares

    def update(self, values: Tensor) -> None:
        """Take in finite values `[n]`; n may be 0."""
        if not values.numel():
            return
        count, mean = values.numel(), float(values.double().mean())
        delta, total = mean - self.mean, self.count + count
        self.squares += float((values.double() - mean).square().sum()) + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    @property
    def std(self) -> float:
        """Of the population (n); 1 before two values have been seen."""
        return math.sqrt(self.squares / self.count) if self.count > 1 else 1.0

    def state(self) -> list[float]:
        """What a new object is made of."""
        return [self.count, self.mean, self.squares]


class RewardShaper:
    """Shapes the scores of each rollout in turn."""

    def __init__(self, settings: ActorSection) -> None:
        self._settings = settings
        self.moments = RunningMoments()

    def shape(self, rewards: Tensor, scored: Tensor, rollout: Rollout) -> Tensor:
        """Shaped scores float32 `[B]`, 0 where not scored.

        `running` takes the rollout's scores in first, so that the first rollout has statistics of its own.

        Args:
            rewards: float32 `[B]`.
            scored: bool `[B]`; other rows are no part of any statistic.
        """
        s = self._settings
        shaped = rewards.clone() if s.reward_normalization == "none" else self._normalised(rewards, scored)
        if s.reward_clip is not None:
            shaped = shaped.clamp(-s.reward_clip, s.reward_clip)
        shaped = shaped - s.missing_eos_penalty * (~rollout.is_end)
        if s.overlong_tokens:
            lengths = (rollout.lengths - rollout.prompt_lengths).float()
            share = (lengths - (s.max_new_tokens - s.overlong_tokens)) / s.overlong_tokens
            shaped = shaped - s.overlong_penalty * share.clamp(0.0, 1.0)
        return torch.where(scored, shaped, 0.0)

    def _normalised(self, rewards: Tensor, scored: Tensor) -> Tensor:
        """(reward - mean) / std; 0 where the scores measured so far differ by their rounding alone."""
        s = self._settings
        if s.reward_normalization == "static":
            return (rewards - s.reward_mean) / (s.reward_std + EPSILON)
        moments = self.moments if s.reward_normalization == "running" else RunningMoments()
        moments.update(rewards[scored])
        mean, std = (torch.tensor(value, dtype=torch.float64) for value in (moments.mean, moments.std))
        if is_rounding(std, mean):
            return torch.zeros_like(rewards)
        return ((rewards.double() - mean) / (std + EPSILON)).to(rewards.dtype)
