"""PPO's clipped surrogate loss.

Tensors are `[B, S-1]`; position t scores token t+1. The loss is a sum over a micro-batch divided by the tokens of the
whole minibatch, so the split into micro-batches does not change the gradient.
"""

import torch
from torch import Tensor

from actor.algorithms.advantages import masked_sum, require_same_shape

MOST_LOG_RATIO = 20.0  # nats; if exp overflowed, even a clipped loss would have a non-finite gradient


def ppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    num_tokens: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped surrogate loss for a micro-batch, as its share of the minibatch loss.

        rho_t = exp(clamp(logprobs_t - old_logprobs_t, -20, 20))
        l_t = max(-A_t * rho_t, -A_t * clamp(rho_t, 1 - low, 1 + high))
        l_t = min(l_t, -A_t * dual_clip) where A_t < 0, if dual_clip is set
        loss = sum_t mask_t * l_t / num_tokens

    The losses and gradients of all micro-batches add up to the masked mean over the minibatch, whatever the split.
    The dual clip bounds the loss of tokens with a negative advantage that have become much more likely since they
    were sampled. To exclude responses that did not end, pass `mask * is_end[:, None]` and count its ones in num_tokens.

    Args:
        logprobs: `[B, S-1]`, log-prob of token t+1 under the policy in training.
        old_logprobs: `[B, S-1]`, log-prob of token t+1 under the policy that sampled it; without gradient.
        advantages: `[B, S-1]`, of token t+1; without gradient.
        mask: `[B, S-1]`, 1 where position t scores a token to learn from.
        clip_ratio_low, clip_ratio_high: low and high, >= 0.
        num_tokens: number of ones in the mask of the whole minibatch, over all micro-batches and ranks. 0 is allowed
            only with an empty mask, and gives loss 0 with zero gradient.
        dual_clip: upper bound on the ratio for negative advantages, > 1; None: no bound.

    Returns: (loss, stats): a scalar, and detached sums over the mask, which the caller adds up and divides by
        num_tokens: `clip_fraction` (tokens whose gradient was removed by a clip), `approx_kl` (k3 of
        KL(old || new)), `ppo_ratio`, `ppo_ratio_clamped`.
    Raises: ValueError if a clip ratio or num_tokens is negative, num_tokens is 0 but the mask is not, dual_clip is not
        above 1, or shapes differ.
    Source: Schulman et al. 2017 (arXiv 1707.06347), equation 7; clip-higher: Yu et al. 2025 (arXiv 2503.14476);
        dual clip: Ye et al. 2020 (arXiv 1912.09729), equation 5.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    for name, scalar in (("clip_ratio_low", clip_ratio_low), ("clip_ratio_high", clip_ratio_high)):
        if not scalar >= 0:
            raise ValueError(f"{name} must be >= 0, got {scalar}")
    if not num_tokens >= 0 or (num_tokens == 0 and bool(mask.any())):
        raise ValueError(f"num_tokens must be the number of ones in the mask of the minibatch, got {num_tokens}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
    # Fill before exp: outside the mask, -inf - -inf would put NaN into the model's gradients.
    log_ratio = (logprobs - old_logprobs).masked_fill(mask == 0, 0.0)
    log_ratio = log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    ratio = log_ratio.exp()
    clamped = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    free, clipped = -advantages * ratio, -advantages * clamped
    token_loss, is_clipped = torch.maximum(free, clipped), clipped > free
    if dual_clip is not None:
        most = -advantages * dual_clip
        is_clipped = is_clipped | ((advantages < 0) & (token_loss > most))
        token_loss = torch.where(advantages < 0, torch.minimum(token_loss, most), token_loss)
    loss = masked_sum(token_loss, mask) / (num_tokens or 1)
    return loss, policy_stats(log_ratio.detach(), clamped.detach(), is_clipped.detach(), mask)


def policy_stats(log_ratio: Tensor, clamped: Tensor, is_clipped: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the statistics of `ppo_policy_loss` as sums over the mask."""
    return {
        "clip_fraction": masked_sum(is_clipped.to(log_ratio.dtype), mask),
        "approx_kl": masked_sum(torch.expm1(log_ratio) - log_ratio, mask),
        "ppo_ratio": masked_sum(log_ratio.exp(), mask),
        "ppo_ratio_clamped": masked_sum(clamped, mask),
    }
