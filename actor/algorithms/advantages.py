"""Tensor functions between a rollout and its update: token rewards, GAE, whitening, group baselines.

Per-token tensors are `[B, S-1]`; position t scores token t+1. Values outside a mask, including NaN and infinity, never
affect a result.
"""

import torch
from torch import Tensor

from rlhf_triton.errors import RlhfError

WHITEN_EPSILON = 1e-8
ROUNDING = 4 * torch.finfo(torch.float32).eps  # relative; the same row scored twice by a server may differ by this much


def require_same_shape(**tensors: Tensor) -> None:
    """Raise ValueError, naming the shapes, unless all tensors have the same shape `[B, S-1]`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 2:
        raise ValueError(f"expected one shape [B, S-1], got {shapes}")


def token_rewards(rewards: Tensor, penalty: Tensor, lengths: Tensor) -> Tensor:
    """Combine scores and KL penalty into token rewards: r_t = rewards * [t == max(length - 2, 0)] - penalty_t.

    The score goes to the position of the last token (position length - 2 belongs to token length - 1). The penalty
    covers every position, including prompt and padding, which `gae` masks. The score of an empty response lies outside
    its mask, so `gae` drops it.

    Args:
        rewards: `[B]`, one score per response.
        penalty: `[B, S-1]`, coefficient * `losses.kl_estimate`.
        lengths: `[B]`, tokens of prompt + response.

    Returns: `[B, S-1]` in the dtype of `penalty`.
    Raises: ValueError if a shape is wrong.
    Source: Ouyang et al. 2022 (arXiv 2203.02155), section 3.5.
    """
    if penalty.ndim != 2 or penalty.shape[1] < 1:
        raise ValueError(f"penalty must be [B, S-1] with S >= 2, got {tuple(penalty.shape)}")
    for name, tensor in (("rewards", rewards), ("lengths", lengths)):
        if tensor.shape != penalty.shape[:1]:
            raise ValueError(f"{name} must be [B] = [{penalty.shape[0]}], got {tuple(tensor.shape)}")
    last_scored = (lengths - 2).clamp(min=0).long()
    return (-penalty).scatter_add(1, last_scored[:, None], rewards[:, None].to(penalty.dtype))


def gae(
    values: Tensor, token_rewards: Tensor, mask: Tensor, *, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimates and returns over the masked positions.

        delta_t = r_t + gamma * V_next - V_t           V_next, A_next: of the next position in the mask,
        A_t = delta_t + gamma * lam * A_next           0 after the last one
        returns_t = A_t + V_t

    The recursion runs over masked positions only and skips gaps in the mask, such as the output of a tool. With
    lam = 1 the returns are the Monte-Carlo returns-to-go of the masked rewards.

    Args:
        values: `[B, S-1]`, V_t given the tokens up to t: the critic's `[B, S]` without the last column.
        token_rewards: `[B, S-1]`, reward for choosing token t+1.
        mask: `[B, S-1]`, 1 where position t scores a response token.
        gamma: discount, in [0, 1].
        lam: GAE lambda, in [0, 1], or one for each response, `[B]`.

    Returns: (advantages, returns), each `[B, S-1]`, 0 outside the mask.
    Raises: ValueError if shapes differ.
    Source: Schulman et al. 2015 (arXiv 1506.02438), equation 16.
    """
    require_same_shape(values=values, token_rewards=token_rewards, mask=mask)
    values = _apply_mask(values, mask)
    token_rewards = _apply_mask(token_rewards, mask)
    advantages = torch.zeros_like(values)
    advantage = next_value = values.new_zeros(values.shape[0])
    inside = mask != 0
    for t in reversed(range(values.shape[1])):
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(inside[:, t], delta + gamma * lam * advantage, advantage)
        next_value = torch.where(inside[:, t], values[:, t], next_value)
        advantages[:, t] = advantage
    advantages = advantages.masked_fill(~inside, 0.0)
    return advantages, advantages + values


def length_adaptive(mask: Tensor, alpha: float) -> Tensor:
    """Return the GAE lambda of each response, `[B]`: 1 - 1 / max(1, alpha * length), where length sums its mask.

    Source: Yue et al. 2025 (arXiv 2504.05118), section 4.1: the TD errors of long responses would otherwise decay
        before they reach the first tokens.
    """
    return 1 - 1 / (alpha * mask.sum(-1)).clamp(min=1)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Return sum(mask * x), a scalar, for x and a mask (or weights) `[B, S-1]`. Raises ValueError if shapes differ."""
    require_same_shape(x=x, mask=mask)
    return _apply_mask(x, mask).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return sum(mask * x) / sum(mask), a scalar, for x and a mask (or weights) `[B, S-1]`.

    An empty mask gives 0, not NaN, because a micro-batch may consist of padding only.
    Raises: ValueError if shapes differ.
    """
    total = mask.sum()
    return masked_sum(x, mask) / (total + (total == 0))


def is_rounding(std: Tensor, mean: Tensor) -> Tensor:
    """Return whether a standard deviation `std` of float32 numbers with mean `mean` is only rounding error.

    If so, callers treat it as 0 and never divide by it. Compute both arguments in float64: in float32 the mean of equal
    numbers may differ from the numbers, which makes their standard deviation positive.
    """
    return std <= ROUNDING * mean.abs()


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Return (x - mean) * rsqrt(var + 1e-8), with mean and population variance over the mask; 0 if x does not vary.

    Args:
        x: `[B, S-1]`, the whole rollout; the statistics of a micro-batch would depend on the split.
        mask: `[B, S-1]`, 0 or 1.

    Returns: `[B, S-1]` in the dtype of `x`, 0 outside the mask.
    Raises: ValueError if shapes differ.
    """
    mean = masked_mean(x.double(), mask.double())
    centred = x.double() - mean
    variance = masked_mean(centred.square(), mask.double())
    whitened = _apply_mask(centred * torch.rsqrt(variance + WHITEN_EPSILON), mask)
    return torch.where(is_rounding(variance.sqrt(), mean), 0.0, whitened).to(x.dtype)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return 1 - Var(returns - values) / Var(returns) over the mask, a scalar.

    1: the values predict the returns up to a constant; 0: no better than a constant; below 0: worse. It is 0, not
    NaN, if the returns do not vary or the mask is empty. Pass Monte-Carlo returns, `gae(..., lam=1)[1]`: with
    a smaller lam the returns contain the values that they are compared with, and the result is too high.

    Args:
        values: `[B, S-1]`, V_t given the tokens up to t.
        returns: `[B, S-1]`, from `gae`.
        mask: `[B, S-1]`, 0 or 1.

    Raises: ValueError if shapes differ.
    """
    require_same_shape(values=values, returns=returns, mask=mask)
    values = values.double()
    returns = returns.double()
    mask = mask.double()
    total = _masked_variance(returns, mask)
    explained = 1 - _masked_variance(returns - values, mask) / total
    return torch.where(is_rounding(total.sqrt(), masked_mean(returns, mask)), 0.0, explained)


def _masked_variance(x: Tensor, mask: Tensor) -> Tensor:
    return masked_mean((x - masked_mean(x, mask)).square(), mask)


def _apply_mask(x: Tensor, mask: Tensor) -> Tensor:
    # Multiplying is not enough: 0 * NaN and 0 * inf are NaN.
    return x.masked_fill(mask == 0, 0.0) * mask


# Baselines of the critic-free algorithms, which compare each response with the other responses to the same prompt.


GROUP_EPSILON = 1e-6


def leave_one_out(rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
    """Subtract from each score the mean score of the other responses to the same prompt.

        A_i = R_i - 1 / (n - 1) * sum_{j != i} R_j        over the n counted responses of a group; 0 where n <= 1

    The baseline does not depend on response i, so the gradient stays unbiased.

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
    return torch.where(counted & (others > 0), scores - baseline, 0.0).to(rewards.dtype)


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
