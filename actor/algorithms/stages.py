"""Reward shaping between scoring and advantages: the functions in `STAGES`, with their settings in `actor.rewards`.

Penalties come after normalisation and clipping, so they are in units of normalised scores and are never clipped away.
They are subtracted at the end of the response. With a process reward, the reward of each step is normalised and
clipped, and counts once in the statistics; the other terms of the score are neither normalised nor clipped.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlhf_triton.actor.algorithms.advantages import is_rounding
from rlhf_triton.actor.algorithms.inputs import AdvantageInputs
from rlhf_triton.config.actor import RewardsSection

EPSILON = 1e-8


@dataclass
class RunningMoments:
    """Running mean and variance of all values seen so far.

    Source: Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # sum of the squared differences from the mean

    def update(self, values: Tensor) -> None:
        """Add the finite values `[n]` to the statistics; n may be 0."""
        if not values.numel():
            return
        count = values.numel()
        mean = float(values.double().mean())
        delta = mean - self.mean
        total = self.count + count
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


@dataclass
class RewardShaper:
    """Runs all stages on the scores of each rollout; keeps running statistics across rollouts."""

    settings: RewardsSection
    max_new_tokens: int
    moments: RunningMoments = field(default_factory=RunningMoments)

    def run(self, inputs: AdvantageInputs) -> AdvantageInputs:
        """Return the inputs after all stages; unscored rows have rewards of 0."""
        if inputs.process_rewards is not None and inputs.process_ends is not None:
            valid = inputs.process_ends & inputs.scored[:, None]
            inputs = replace(inputs, process_rewards=torch.where(valid, inputs.process_rewards, 0.0))
        for stage in STAGES:
            inputs = stage(inputs, self)
        return replace(inputs, rewards=torch.where(inputs.scored, inputs.rewards, 0.0))


def _with_scores(inputs: AdvantageInputs, function: Callable[[Tensor], Tensor]) -> AdvantageInputs:
    """Apply `function` to all valid scores `[n]`, or with a process reward to the rewards of all steps `[n]`."""
    name = "rewards"
    valid = inputs.scored
    if inputs.process_ends is not None:
        name = "process_rewards"
        valid = inputs.process_ends & inputs.scored[:, None]
    changed = getattr(inputs, name).clone()
    changed[valid] = function(changed[valid])
    return replace(inputs, **{name: changed})


def normalise(inputs: AdvantageInputs, shaper: RewardShaper) -> AdvantageInputs:
    """Normalise the scores as `normalization` selects; they become 0 if the statistics vary only by rounding.

    Running statistics include the current rollout, so that the first one can be normalised.
    """
    s = shaper.settings

    def normalised(scores: Tensor) -> Tensor:
        moments = shaper.moments if s.normalization == "running" else RunningMoments()
        moments.update(scores)
        mean, std = (torch.tensor(value, dtype=torch.float64) for value in (moments.mean, moments.std))
        if is_rounding(std, mean):
            return torch.zeros_like(scores)
        return ((scores.double() - mean) / (std + EPSILON)).to(scores.dtype)

    return inputs if s.normalization == "none" else _with_scores(inputs, normalised)


def clip(inputs: AdvantageInputs, shaper: RewardShaper) -> AdvantageInputs:
    """Clip the scores to [-`clip`, `clip`], if it is set."""
    limit = shaper.settings.clip
    return inputs if limit is None else _with_scores(inputs, lambda scores: scores.clamp(-limit, limit))


def penalise_missing_eos(inputs: AdvantageInputs, shaper: RewardShaper) -> AdvantageInputs:
    """Subtract `missing_eos_penalty` from the rewards of responses that did not end."""
    return replace(inputs, rewards=inputs.rewards - shaper.settings.missing_eos_penalty * (~inputs.ended))


def overlong_penalties(lengths: Tensor, settings: RewardsSection, max_new_tokens: int) -> Tensor:
    """Return the penalty of each response, `[B]`.

    It grows linearly from 0 to `overlong_penalty` over the last `overlong_tokens` of the `max_new_tokens` tokens.

    Args:
        lengths: float32 `[B]`, number of sampled tokens.
        settings: `overlong_tokens` must be above 0.
    """
    share = (lengths - (max_new_tokens - settings.overlong_tokens)) / settings.overlong_tokens
    return settings.overlong_penalty * share.clamp(0.0, 1.0)


def penalise_overlong(inputs: AdvantageInputs, shaper: RewardShaper) -> AdvantageInputs:
    """Subtract `overlong_penalties` from the rewards, if `overlong_tokens` is set."""
    if not shaper.settings.overlong_tokens:
        return inputs
    penalties = overlong_penalties(inputs.mask.sum(-1), shaper.settings, shaper.max_new_tokens)
    return replace(inputs, rewards=inputs.rewards - penalties)


# A stage changes `rewards` or `process_rewards`, or excludes rows from the policy's update through `counted`.
STAGES: tuple[Callable[[AdvantageInputs, RewardShaper], AdvantageInputs], ...] = (
    normalise,
    clip,
    penalise_missing_eos,
    penalise_overlong,
)
