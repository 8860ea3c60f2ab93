"""Baselines of the critic-free algorithms: each response is compared with the other responses to the same prompt."""

import torch
from torch import Tensor

from actor.algorithms.advantages import is_rounding, require_same_shape

GROUP_EPSILON = 1e-6


def leave_one_out(rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
    """Subtract from each score the mean score of the other responses to the same prompt.

        A_i = R_i - 1 / (n - 1) * sum_{j != i} R_j        over the n counted responses of a group; 0 where n <= 1

    The baseline does not depend on response i, so the gradient stays unbiased.

    Args:
        rewards: `[B]`; rows that are not counted may hold any value.
        groups: `[B]`, integer, equal for responses to the same prompt.
        counted: bool `[B]`; a row that is not counted has advantage 0 and is excluded from every baseline.

    Returns: `[B]` in the dtype of `rewards`.
    Raises: ValueError if shapes differ.
    Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free"; Ahmadian et al. 2024
        (arXiv 2402.14740), section 2.2. NeMo-Aligner's baseline differs: it is biased if a response is unfinished.
    """
    scores, index, count, total = _group_sums(rewards, groups, counted)
    others = (count - 1)[index]
    baseline = (total[index] - scores) / others.clamp(min=1)
    return torch.where(counted & (others > 0), scores - baseline, 0.0).to(rewards.dtype)


def group_standardise(rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
    """Standardise each score within its group: subtract the mean, divide by the standard deviation.

        A_i = (R_i - mean) / (std + 1e-6)        std with n - 1; 0 where n <= 1

    The group's mean includes response i itself. Scores that are equal up to float32 rounding give advantages of 0, so
    the prompt contributes no gradient.

    Args, Returns, Raises: as `leave_one_out`.
    Source: Shao et al. 2024 (arXiv 2402.03300), section 4.1.2; n - 1 as in TRL and verl, epsilon as in verl.
    """
    scores, index, count, total = _group_sums(rewards, groups, counted)
    mean = total / count.clamp(min=1)
    centred = torch.where(counted, scores - mean[index], 0.0)
    squares = torch.zeros_like(total).index_add(0, index, centred.square())
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    standardised = centred / (std[index] + GROUP_EPSILON)
    return torch.where(is_rounding(std, mean)[index], 0.0, standardised).to(rewards.dtype)


def process_supervision(step_rewards: Tensor, ends: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
    """Standardise the rewards of all steps within each group, and sum for each token those from its step on.

        A_{i,t} = sum over steps j of response i that end at t or later of (r_{i,j} - mean) / (std + 1e-6)

    mean and std (n - 1) are over all steps of the counted responses of a group. Rewards that are equal up to float32
    rounding give advantages of 0.

    Args:
        step_rewards: `[B, S-1]`, the reward of the step that ends at this position.
        ends: bool `[B, S-1]`, where a step ends.
        groups: `[B]`, integer, equal for responses to the same prompt.
        counted: bool `[B]`; a row that is not counted has advantages 0 and is excluded from the statistics.

    Returns: `[B, S-1]` in the dtype of `step_rewards`, also outside of the responses.
    Raises: ValueError if shapes differ.
    Source: Shao et al. 2024 (arXiv 2402.03300), section 4.1.3; n - 1 and epsilon as in `group_standardise`.
    """
    require_same_shape(step_rewards=step_rewards, ends=ends)
    if groups.shape != step_rewards.shape[:1]:
        raise ValueError(f"groups must be [B] = [{step_rewards.shape[0]}], got {tuple(groups.shape)}")
    is_step = ends & counted[:, None]
    of_step = groups[:, None].expand_as(ends)[is_step]
    steps = group_standardise(step_rewards[is_step], of_step, torch.ones_like(of_step, dtype=torch.bool))
    standardised = torch.zeros_like(step_rewards)
    standardised[is_step] = steps.to(step_rewards.dtype)
    return standardised.flip(1).cumsum(1).flip(1)


def _group_sums(rewards: Tensor, groups: Tensor, counted: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the rewards (0 if not counted), each row's group index, and the count and sum per group, in float64."""
    if not rewards.shape == groups.shape == counted.shape or rewards.ndim != 1:
        shapes = [tuple(tensor.shape) for tensor in (rewards, groups, counted)]
        raise ValueError(f"rewards, groups and counted must all be [B], got {shapes}")
    names, index = groups.unique(return_inverse=True)
    rewards = rewards.double().masked_fill(~counted, 0.0)
    zeros = rewards.new_zeros(len(names))
    count = zeros.index_add(0, index, counted.to(rewards.dtype))
    return rewards, index, count, zeros.index_add(0, index, rewards)
