"""Importance correction: factors from log-ratios on one of three levels, clipped or masked to a range; or gates, which
mask tokens or responses by a divergence.
"""

import torch
from torch import Tensor

from rlhf_triton.actor.algorithms.inputs import MAX_LOG_RATIO
from rlhf_triton.config.algorithms import DIVERGENCES
from rlhf_triton.user_code import import_function

PROBABILITY_RANGE = (1e-6, 1 - 1e-6)  # as in FlashREINFORCE's reference; at 0 or 1 the KL would be infinite


def binary_kl(logprobs: Tensor, sampled_logprobs: Tensor) -> Tensor:
    """Return KL(sampler || policy) of each token if all other tokens count as one, in nats, `[B, S-1]`.

        p = exp(sampled_logprobs_t), q = exp(logprobs_t): p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))

    Source: DPPO (arXiv 2602.04879), equation 14.
    """
    p, q = (x.exp().clamp(*PROBABILITY_RANGE) for x in (sampled_logprobs, logprobs))
    return p * (p.log() - q.log()) + (1 - p) * (torch.log1p(-p) - torch.log1p(-q))


def binary_tv(logprobs: Tensor, sampled_logprobs: Tensor) -> Tensor:
    """Return the total variation distance of each token if all other tokens count as one, `[B, S-1]`, at most 1.

    Source: DPPO (arXiv 2602.04879), equation 13.
    """
    return (logprobs.exp() - sampled_logprobs.exp()).abs()


def aggregate_log_ratio(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Aggregate token log-ratios to `level`; each position of a response gets the aggregate.

    Args:
        log_ratio: `[B, S-1]`, log-ratio of each token; ignored outside the mask.
        mask: `[B, S-1]`, 1 where position t scores a response token.
        level: `token`, no aggregation; `sequence`, the sum over the response; `geometric`, the mean.

    Returns: `[B, S-1]`, clamped to +-`MAX_LOG_RATIO`.
    """
    if level != "token":
        total = (log_ratio.masked_fill(mask == 0, 0.0) * mask).sum(-1, keepdim=True)
        log_ratio = (total if level == "sequence" else total / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(mask)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_factors(
    logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor, *, level: str, mode: str, low: float, high: float
) -> Tensor:
    """Return the importance factor of each token that another policy or engine sampled; 1 outside the mask.

        rho = exp(logprobs - sampled_logprobs) at `level`
        clip: clamp(rho, low, high); mask: rho where low <= rho <= high, otherwise 0
        a gate: the token's own rho where the token's divergence, or the response's mean, is <= high, otherwise 0

    Args:
        logprobs: `[B, S-1]`, log-prob of token t+1 under the policy.
        sampled_logprobs: `[B, S-1]`, log-prob of token t+1 when it was sampled.
        mask: `[B, S-1]`, 1 where position t scores a response token.
        level: `token`, `sequence` or `geometric`, see `aggregate_log_ratio`; of a gate, one of the first two.
        mode: `clip`, `mask`, or one of `DIVERGENCES`.
        low, high: range of the ratio; of a gate, `high` is the bound of the divergence.

    Returns: `[B, S-1]`.
    Source: truncation: https://fengyao.notion.site/off-policy-rl; mask: IcePop (arXiv 2510.18855); `sequence` and
        `geometric`: Liu et al. 2025, "When speed kills stability", and TRL; gates: DPPO (arXiv 2602.04879), and
        OpenRLHF's `is_correction_gating`.
    """
    log_ratio = logprobs - sampled_logprobs
    if mode in DIVERGENCES:
        divergence = import_function(DIVERGENCES[mode].function)(logprobs, sampled_logprobs)
        bounded = aggregate_log_ratio(divergence, mask, "token" if level == "token" else "geometric") <= high
        ratio = aggregate_log_ratio(log_ratio, mask, "token").exp()
        return torch.where(mask > 0, torch.where(bounded, ratio, 0.0), 1.0)
    ratio = aggregate_log_ratio(log_ratio, mask, level).exp()
    inside = (ratio >= low) & (ratio <= high)
    factors = ratio.clamp(low, high) if mode == "clip" else ratio * inside
    return torch.where(mask > 0, factors, 1.0)
