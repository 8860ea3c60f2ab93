"""Reward shaping: normalisation, then clipping, then penalties for a missing EOS and for overlong responses.

Penalties come last, so they are in units of normalised scores and are never clipped away.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actor.algorithms.advantages import is_rounding
from actor.data.rollout import Rollout, Scores, ShapedRewards
from python_backend.config import RewardsSection

EPSILON = 1e-8


class RunningMoments:
    """Running mean and variance of all values seen so far.

    Source: Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    def __init__(self, count: float = 0.0, mean: float = 0.0, squares: float = 0.0) -> None:
        self.count, self.mean, self.squares = count, mean, squares

    def update(self, values: Tensor) -> None:
        """Add finite values `[n]`; n may be 0."""
        if not values.numel():
            return
        count, mean = values.numel(), float(values.double().mean())
        delta, total = mean - self.mean, self.count + count
        self.squares += float((values.double() - mean).square().sum()) + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    @property
    def std(self) -> float:
        """Population standard deviation (divides by n); 1 until two values have been seen."""
        return math.sqrt(self.squares / self.count) if self.count > 1 else 1.0

    def state(self) -> list[float]:
        """Return the constructor arguments that reproduce this object, for checkpoints."""
        return [self.count, self.mean, self.squares]


class RewardShaper:
    """Turns the server's scores of each rollout into rewards; keeps running statistics across rollouts."""

    def __init__(self, settings: RewardsSection, *, max_new_tokens: int) -> None:
        self._settings = settings
        self._max_new_tokens = max_new_tokens
        self.moments = RunningMoments()

    def shape_scores(self, scores: Scores, rollout: Rollout) -> ShapedRewards:
        """Return the shaped rewards of a rollout.

        A process reward is normalised and clipped step by step: each step counts once in the statistics. What the score
        has beyond it, the other terms of a weighted sum, is neither normalised nor clipped. Penalties are given at the
        end of the response.
        """
        if scores.process is None:
            return ShapedRewards(self.shape(scores.rewards, scores.scored, rollout))
        process = scores.process
        counted = process.ends & scores.scored[:, None]
        found = process.rewards[counted]
        steps = torch.zeros_like(process.rewards)
        steps[counted] = self._in_units(found, torch.ones_like(found, dtype=torch.bool))
        return ShapedRewards(torch.where(scores.scored, self._penalised(process.outcome, rollout), 0.0), steps)

    def shape(self, rewards: Tensor, scored: Tensor, rollout: Rollout) -> Tensor:
        """Return shaped scores, float32 `[B]`; 0 where not scored.

        With `running` normalisation the statistics include this rollout, so that even the first one can be normalised.

        Args:
            rewards: float32 `[B]`.
            scored: bool `[B]`; rows where it is False are excluded from all statistics.
        """
        return torch.where(scored, self._penalised(self._in_units(rewards, scored), rollout), 0.0)

    def _in_units(self, rewards: Tensor, scored: Tensor) -> Tensor:
        """Return the rewards normalised and clipped."""
        s = self._settings
        shaped = rewards.clone() if s.normalization == "none" else self._normalised(rewards, scored)
        return shaped if s.clip is None else shaped.clamp(-s.clip, s.clip)

    def _penalised(self, rewards: Tensor, rollout: Rollout) -> Tensor:
        """Return the rewards `[B]` minus the penalties."""
        s = self._settings
        shaped = rewards - s.missing_eos_penalty * (~rollout.is_end)
        if s.overlong_tokens:
            lengths = (rollout.lengths - rollout.prompt_lengths).float()
            share = (lengths - (self._max_new_tokens - s.overlong_tokens)) / s.overlong_tokens
            shaped = shaped - s.overlong_penalty * share.clamp(0.0, 1.0)
        return shaped

    def _normalised(self, rewards: Tensor, scored: Tensor) -> Tensor:
        """Return (reward - mean) / std; 0 if the scores seen so far differ only by rounding."""
        s = self._settings
        if s.normalization == "static":
            return (rewards - s.mean) / (s.std + EPSILON)
        moments = self.moments if s.normalization == "running" else RunningMoments()
        moments.update(rewards[scored])
        mean, std = (torch.tensor(value, dtype=torch.float64) for value in (moments.mean, moments.std))
        if is_rounding(std, mean):
            return torch.zeros_like(rewards)
        return ((rewards.double() - mean) / (std + EPSILON)).to(rewards.dtype)
