"""Policy losses with one signature, and the KL penalty as a loss term.

Tensors are `[B, S-1]`; position t scores token t+1. Weights per token take the place of a mask. Each loss is a sum over
a micro-batch divided by the total weight of the minibatch, so the split into micro-batches never changes the gradient;
and it is proportional to the advantages, which importance weights multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from actor.algorithms.advantages import kl_estimate, masked_sum, require_same_shape
from actor.algorithms.losses import MOST_LOG_RATIO, policy_stats, ppo_policy_loss


@dataclass(frozen=True)
class ClipRange:
    """Clip range of the probability ratio: [1 - low, 1 + high], and at most `dual` for negative advantages."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None


# (logprobs, old_logprobs, advantages, weights, total weight of the minibatch, clip) -> (loss, sums of statistics)
PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, float, ClipRange], tuple[Tensor, dict[str, Tensor]]]


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, total: float, clip: ClipRange
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped loss; see `ppo_policy_loss`."""
    return ppo_policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        weights,
        clip_ratio_low=clip.low,
        clip_ratio_high=clip.high,
        num_tokens=total,
        dual_clip=clip.dual,
    )


def reinforce_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, total: float, clip: ClipRange
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the REINFORCE loss, -sum_t w_t * A_t * logprobs_t / total.

    Its gradient equals that of the clipped loss at ratio 1, so it is meant for on-policy samples. `old_logprobs` are
    used for statistics only; `clip` is ignored.

    Raises: ValueError if total is 0 but the weights are not, or shapes differ.
    Source: Williams 1992, "Simple statistical gradient-following algorithms", equation 11.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, weights=weights)
    if not total >= 0 or (total == 0 and bool(weights.any())):
        raise ValueError(f"total must be the total weight of the minibatch, got {total}")
    # Fill before multiplying: where the weight is 0, -inf * 0 would put NaN into the model's gradients.
    inside = weights != 0
    chosen = logprobs.masked_fill(~inside, 0.0)
    loss = masked_sum(-advantages * chosen, weights) / (total or 1)
    log_ratio = (logprobs - old_logprobs).detach().masked_fill(~inside, 0.0).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    return loss, policy_stats(log_ratio, log_ratio.exp(), torch.zeros_like(inside), weights)


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor, *, kind: str, total: float) -> Tensor:
    """Return sum_t w_t * kl_t / total, a differentiable scalar; the caller multiplies it by `kl_coef`.

    The gradient is that of the estimate for fixed samples. In expectation, k2 has the gradient of the true KL, k3
    (used by GRPO) approximates it near 0, and k1 has gradient 0. The gradient of abs does not shrink as the two
    policies approach each other.

    Args:
        kind: one of `KL_KINDS`.

    Raises: ValueError if the kind is unknown or the shapes differ.
    Source: Shao et al. 2024 (arXiv 2402.03300), equation 4; Tang and Munos 2025 (arXiv 2506.09477) on the gradients.
    """
    logprobs, ref_logprobs = (x.masked_fill(weights == 0, 0.0) for x in (logprobs, ref_logprobs))
    return masked_sum(kl_estimate(logprobs, ref_logprobs, kind), weights) / (total or 1)
