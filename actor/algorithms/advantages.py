"""Tensor functions between a rollout and its update: token rewards, GAE, whitening, group baselines.

Per-token tensors are `[B, S-1]`; position t scores token t+1. Values outside a mask, including NaN and infinity, never
affect a result.
"""

import torch
from torch import Tensor

from rlhf_triton.training_engine.explained_variance import ROUNDING

WHITEN_EPSILON = 1e-8


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
        penalty: `[B, S-1]`, coefficient * `kl.kl_estimate`.
        lengths: `[B]`, tokens of prompt + response.

    Returns: `[B, S-1]` in the dtype of `penalty`.
    Source: Ouyang et al. 2022 (arXiv 2203.02155), section 3.5.
    """
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


def returns_to_go(token_rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted sum of token rewards from each masked position on, `[B, S-1]`; arguments as in `gae`."""
    return gae(torch.zeros_like(mask), token_rewards, mask, gamma=gamma, lam=1.0)[1]


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


def _apply_mask(x: Tensor, mask: Tensor) -> Tensor:
    # Multiplying is not enough: 0 * NaN and 0 * inf are NaN.
    return x.masked_fill(mask == 0, 0.0) * mask
