"""Stages between scoring and advantages: each is a function in `STAGES`, with its settings in `actor.rewards`.

Penalties come after normalisation and clipping, so they are in units of normalised scores and are never clipped away.
A process reward is normalised and clipped step by step: each step counts once in the statistics. What the score has
beyond it, the other terms of a weighted sum, is neither normalised nor clipped. Penalties are given at the end of the
response.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class StageInputs:
    """What a stage knows beside the rewards."""

    rollout: Rollout
    scores: Scores  # rows that are not scored have invalid rewards, which no stage may use
    groups: Tensor  # int64 [B], equal for responses to the same prompt
    settings: RewardsSection
    max_new_tokens: int
    moments: RunningMoments  # of all scores of the run, part of checkpoints

    def change(self, rewards: ShapedRewards, function: Callable[[Tensor], Tensor]) -> ShapedRewards:
        """Return the rewards with `function` applied to all valid scores `[n]`; of a process reward, to its steps."""
        scored, process = self.scores.scored, self.scores.process
        name, valid = ("outcome", scored) if process is None else ("steps", process.ends & scored[:, None])
        changed = getattr(rewards, name).clone()
        changed[valid] = function(changed[valid])
        return dataclasses.replace(rewards, **{name: changed})


def normalise(rewards: ShapedRewards, inputs: StageInputs) -> ShapedRewards:
    """Normalise the scores, by `normalization`; to 0 if the scores seen so far differ only by rounding.

    Running statistics include this rollout, so that even the first one can be normalised.
    """
    s = inputs.settings

    def normalised(scores: Tensor) -> Tensor:
        if s.normalization == "static":
            return (scores - s.mean) / (s.std + EPSILON)
        moments = inputs.moments if s.normalization == "running" else RunningMoments()
        moments.update(scores)
        mean, std = (torch.tensor(value, dtype=torch.float64) for value in (moments.mean, moments.std))
        if is_rounding(std, mean):
            return torch.zeros_like(scores)
        return ((scores.double() - mean) / (std + EPSILON)).to(scores.dtype)

    return rewards if s.normalization == "none" else inputs.change(rewards, normalised)


def clip(rewards: ShapedRewards, inputs: StageInputs) -> ShapedRewards:
    """Clip the scores to `clip` in absolute value."""
    most = inputs.settings.clip
    return rewards if most is None else inputs.change(rewards, lambda scores: scores.clamp(-most, most))


def penalise_missing_eos(rewards: ShapedRewards, inputs: StageInputs) -> ShapedRewards:
    """Subtract `missing_eos_penalty` from responses that did not end."""
    penalty = inputs.settings.missing_eos_penalty * (~inputs.rollout.is_end)
    return dataclasses.replace(rewards, outcome=rewards.outcome - penalty)


def penalise_overlong(rewards: ShapedRewards, inputs: StageInputs) -> ShapedRewards:
    """Subtract up to `overlong_penalty`, linearly over the last `overlong_tokens` of the maximum length."""
    s = inputs.settings
    if not s.overlong_tokens:
        return rewards
    lengths = (inputs.rollout.lengths - inputs.rollout.prompt_lengths).float()
    share = (lengths - (inputs.max_new_tokens - s.overlong_tokens)) / s.overlong_tokens
    return dataclasses.replace(rewards, outcome=rewards.outcome - s.overlong_penalty * share.clamp(0.0, 1.0))


# A stage changes the rewards, or leaves rows out of the policy's update by `learned`.
STAGES = (normalise, clip, penalise_missing_eos, penalise_overlong)


class RewardShaper:
    """Takes the server's scores of each rollout through all stages; keeps running statistics across rollouts."""

    def __init__(self, settings: RewardsSection, *, max_new_tokens: int, responses_per_prompt: int = 1) -> None:
        self._settings, self._max_new_tokens, self._group_size = settings, max_new_tokens, responses_per_prompt
        self.moments = RunningMoments()

    def shape(self, scores: Scores, rollout: Rollout) -> ShapedRewards:
        """Return the rewards of a rollout; 0 in rows that are not scored."""
        groups = torch.arange(len(scores.scored)) // self._group_size
        inputs = StageInputs(rollout, scores, groups, self._settings, self._max_new_tokens, self.moments)
        process, valid = scores.process, scores.scored
        rewards = ShapedRewards(scores.rewards)
        if process is not None:
            steps = torch.where(process.ends & valid[:, None], process.rewards, 0.0)
            rewards = ShapedRewards(process.outcome, steps)
        for stage in STAGES:
            rewards = stage(rewards, inputs)
        return dataclasses.replace(rewards, outcome=torch.where(valid, rewards.outcome, 0.0))
