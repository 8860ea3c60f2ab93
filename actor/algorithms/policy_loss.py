"""The policy losses behind one signature, and the KL penalty as a part of the loss.

Tensors are `[B, S-1]`; position t scores token t+1, and weights take the place of a mask. Losses are sums over a
micro-batch divided by the weights of the whole minibatch, so no split changes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from actor.algorithms.advantages import kl_estimate, masked_sum, require_same_shape
from actor.algorithms.ppo_loss import MOST_LOG_RATIO, policy_stats, ppo_policy_loss


@dataclass(frozen=True)
class ClipRange:
    """Where probability ratios are clipped: to [1 - low, 1 + high], and `dual` where the advantage is negative."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None


# (logprobs, old_logprobs, advantages, weights, total weight of the minibatch, clip) -> (loss, sums of statistics)
PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, float, ClipRange], tuple[Tensor, dict[str, Tensor]]]


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, total: float, clip: ClipRange
) -> tuple[Tensor, dict[str, Tensor]]:
    """As `ppo_policy_loss`."""
    return ppo_policy_loss(
        logprobs, old_logprobs, advantages, weights, clip_ratio_low=clip.low, clip_ratio_high=clip.high,
        num_tokens=total, dual_clip=clip.dual,
    )  # fmt: skip


def reinforce_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, total: float, clip: ClipRange
) -> tuple[Tensor, dict[str, Tensor]]:
    """loss = -sum_t w_t * A_t * logprobs_t / total: its gradient is that of the clipped loss at ratio 1.

    For samples of the policy itself; `old_logprobs` serve the statistics alone, and `clip` nothing.

    Raises: ValueError if total is 0 but the weights are not, or shapes differ.
    Source: Williams 1992, "Simple statistical gradient-following algorithms", equation 11.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, weights=weights)
    if not total >= 0 or (total == 0 and bool(weights.any())):
        raise ValueError(f"total must be the weight of the minibatch, got {total}")
    # Filled before the product: outside the weights -inf * 0 would put NaN into the gradients of the model.
    inside = weights != 0
    chosen = logprobs.masked_fill(~inside, 0.0)
    loss = masked_sum(-advantages * chosen, weights) / (total or 1)
    log_ratio = (logprobs - old_logprobs).detach().masked_fill(~inside, 0.0).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    return loss, policy_stats(log_ratio, log_ratio.exp(), torch.zeros_like(inside), weights)


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor, *, kind: str, total: float) -> Tensor:
    """sum_t w_t * kl_t / total, a scalar with the gradient of the estimate; the caller weighs it by `kl_coef`.

    The gradient is that of the estimate on given samples: of k2 it is the gradient of the KL itself in expectation, of
    k3 it is an approximation of it near 0 (as GRPO uses it), of k1 it is 0 in expectation, and of abs it has the same
    size however near the two policies are.

    Args:
        kind: as `kl_estimate`.

    Raises: ValueError as `kl_estimate`.
    Source: Shao et al. 2024 (arXiv 2402.03300), equation 4; Tang and Munos 2025 (arXiv 2506.09477) on the gradients.
    """
    inside = weights != 0
    logprobs, ref_logprobs = (x.masked_fill(~inside, 0.0) for x in (logprobs, ref_logprobs))
    return masked_sum(kl_estimate(logprobs, ref_logprobs, kind), weights) / (total or 1)
