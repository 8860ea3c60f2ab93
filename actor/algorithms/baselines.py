"""Baselines of the critic-free algorithms, which compare each response with the other responses to the same prompt."""

import torch
from torch import Tensor

from rlhf_triton.actor.algorithms.advantages import is_rounding, require_same_shape
from rlhf_triton.errors import RlhfError

GROUP_EPSILON = 1e-6


def leave_one_out(rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
    """Subtract from each score the mean score of the other responses to the same prompt.

        A_i = R_i - 1 / (n - 1) * sum_{j != i} R_j        over the n counted responses of a group; 0 where n <= 1

    The baseline does not depend on response i, so the gradient stays unbiased. Scores that are equal up to float32
    rounding give advantages of 0.

    Args:
        rewards: `[B]`; rows that are not counted may hold any value.
        groups: `[B]`, integer, equal for responses to the same prompt.
        counted: bool `[B]`; an uncounted row has advantage 0 and is excluded from every baseline.

    Returns: `[B]` in the dtype of `rewards`.
    Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free"; Ahmadian et al. 2024
        (arXiv 2402.14740), section 2.2. NeMo-Aligner's baseline differs: it is biased if a response is unfinished.
    """
    scores, index, count, total = _group_sums(rewards, groups, counted)
    others = (count - 1)[index]
    baseline = (total[index] - scores) / others.clamp(min=1)
    differs = ~is_rounding((scores - baseline).abs(), baseline)
    return torch.where(counted & (others > 0) & differs, scores - baseline, 0.0).to(rewards.dtype)


def group_standardise(rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
    """Standardise each score within its group: subtract the mean, divide by the standard deviation.

        A_i = (R_i - mean) / (std + 1e-6)        std divides by n - 1 for n counted scores in the group; 0 where n <= 1

    The group's mean includes response i itself. Scores that are equal up to float32 rounding give advantages of 0, so
    the prompt contributes no gradient.

    Args, Returns: as `leave_one_out`.
    Source: Shao et al. 2024 (arXiv 2402.03300), section 4.1.2; n - 1 as in TRL and verl, epsilon as in verl.
    """
    scores, index, count, total = _group_sums(rewards, groups, counted)
    mean = total / count.clamp(min=1)
    centred = torch.where(counted, scores - mean[index], 0.0)
    squares = torch.zeros_like(total).index_add(0, index, centred.square())
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    standardised = centred / (std[index] + GROUP_EPSILON)
    return torch.where(is_rounding(std, mean)[index], 0.0, standardised).to(rewards.dtype)


def subtract_mean(rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
    """Subtract the mean score of its group, including itself, from each score.

    Scores that are equal up to float32 rounding give advantages of 0. Args, Returns: as `leave_one_out`.
    Source: Liu et al. 2025 (arXiv 2503.20783), section 3.2 (Dr. GRPO).
    """
    scores, index, count, total = _group_sums(rewards, groups, counted)
    mean = (total / count.clamp(min=1))[index]
    centred = torch.where(counted & ~is_rounding((scores - mean).abs(), mean), scores - mean, 0.0)
    return centred.to(rewards.dtype)


def divide_by_mean(rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
    """Subtract the group's mean from each score, which must be >= 0, and divide the difference by that mean.

    The rarer a correct response, the larger its advantage: with scores of 0 and 1, the gradient is an expansion of the
    gradient of the likelihood of a correct response, to an order that the group size limits. A mean of 0 gives 0.

    Args, Returns: as `leave_one_out`.
    Raises: RlhfError if a score is negative.
    Source: MaxRL (arXiv 2602.02710).
    """
    scores, index, count, total = _group_sums(rewards, groups, counted)
    if bool((scores < 0).any()):
        raise RlhfError(
            f"actor.algorithm.name: maxrl divides by the mean score of a prompt's responses, but a score is "
            f"{float(scores.min()):g}; use rewards of 0 and 1, or choose another algorithm"
        )
    mean = (total / count.clamp(min=1))[index]
    centred = subtract_mean(rewards, groups, counted).double()
    return torch.where(mean > 0, centred / mean.where(mean > 0, 1.0), 0.0).to(rewards.dtype)


def process_supervision(step_rewards: Tensor, ends: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
    """Standardise step rewards within each group; each token's advantage sums its own step and all later ones.

        A_{i,t} = sum over steps j of response i that end at t or later of (r_{i,j} - mean) / (std + 1e-6)

    mean and std (n - 1) are over all steps of the counted responses of a group. Rewards that are equal up to float32
    rounding give advantages of 0.

    Args:
        step_rewards: `[B, S-1]`, the reward of the step that ends at this position.
        ends: bool `[B, S-1]`, where a step ends.
        groups: `[B]`, integer, equal for responses to the same prompt.
        counted: bool `[B]`; an uncounted row has advantages of 0 and is excluded from the statistics.

    Returns: `[B, S-1]` in the dtype of `step_rewards`, not masked: positions before a response have values as well.
    Raises: ValueError if shapes differ.
    Source: Shao et al. 2024 (arXiv 2402.03300), section 4.1.3; n - 1 and epsilon as in `group_standardise`.
    """
    require_same_shape(step_rewards=step_rewards, ends=ends)
    is_step = ends & counted[:, None]
    step_groups = groups[:, None].expand_as(ends)[is_step]
    steps = group_standardise(step_rewards[is_step], step_groups, torch.ones_like(step_groups, dtype=torch.bool))
    standardised = torch.zeros_like(step_rewards)
    standardised[is_step] = steps.to(step_rewards.dtype)
    return standardised.flip(1).cumsum(1).flip(1)


def _group_sums(rewards: Tensor, groups: Tensor, counted: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (rewards, 0 if not counted; group index of each row; count per group; sum per group), in float64."""
    names, index = groups.unique(return_inverse=True)
    rewards = rewards.double().masked_fill(~counted, 0.0)
    zeros = rewards.new_zeros(len(names))
    count = zeros.index_add(0, index, counted.to(rewards.dtype))
    return rewards, index, count, zeros.index_add(0, index, rewards)
