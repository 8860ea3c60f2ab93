"""Policy losses.

Each loss is a micro-batch's share of the minibatch mean, so the split into micro-batches never changes the gradient.
It is proportional to the advantages, so importance factors multiply the advantages.
"""

from typing import Any

import torch
from torch import Tensor

from rlhf_triton.actor.algorithms.importance import aggregate_log_ratio, importance_factors
from rlhf_triton.actor.algorithms.inputs import LossAndMetrics, LossInputs

MAX_DPPO_RATIO = 20.0  # as in verl


def clipped(inputs: LossInputs) -> LossAndMetrics:
    """Compute PPO's clipped surrogate loss.

        rho_t = exp(clamp(logprobs_t - old_logprobs_t, -20, 20))
        l_t = max(-A_t * rho_t, -A_t * clamp(rho_t, 1 - low, 1 + high))
        loss = sum_t w_t * l_t / total

    Returns: (loss, metrics): `clip_fraction` counts the tokens whose gradient the clip removes.
    Source: Schulman et al. 2017 (arXiv 1707.06347), equation 7; clip-higher: Yu et al. 2025 (arXiv 2503.14476).
    """
    return _surrogate(inputs, inputs.log_ratio.exp())


def gspo(inputs: LossInputs) -> LossAndMetrics:
    """Compute GSPO's loss: PPO's clipped loss with one ratio per response, the geometric mean of its token ratios.

        s = exp(sum_t m_t * (logprobs_t - old_logprobs_t) / sum_t m_t)

    The loss uses GSPO-token's form s_t = sg(s) * exp(logprobs_t - sg(logprobs_t)). It has the gradient of s if all
    tokens of a response have the same advantage; otherwise each token is weighted by its own advantage.

    Source: Zheng et al. 2025 (arXiv 2507.18071), equations 5 to 7 and 13 to 14.
    """
    log_ratio = aggregate_log_ratio(inputs.log_ratio.detach(), inputs.mask, "geometric")
    return _surrogate(inputs, (log_ratio + inputs.logprobs - inputs.logprobs.detach()).exp())


def _surrogate(inputs: LossInputs, ratio: Tensor) -> LossAndMetrics:
    clamped = ratio.clamp(1 - inputs.clip.low, 1 + inputs.clip.high)
    free = -inputs.advantages * ratio
    bounded = -inputs.advantages * clamped
    return inputs.mean(torch.maximum(free, bounded)), {
        "clip_fraction": inputs.sum(bounded > free),
        "ppo_ratio_clamped": inputs.sum(clamped),
    }


def cispo(inputs: LossInputs) -> LossAndMetrics:
    """Compute CISPO's loss: REINFORCE with each token weighted by its clipped ratio, so every token keeps a gradient.

        l_t = -sg(clamp(rho_t, 1 - low, 1 + high)) * A_t * logprobs_t

    Source: MiniMax 2025 (arXiv 2506.13585), equations 4 and 5.
    """
    return _weighted(inputs, _within(inputs, "clip"))


def dis(inputs: LossInputs) -> LossAndMetrics:
    """Compute SAO's loss (direct double-sided importance sampling), which excludes tokens whose ratio is out of range.

        l_t = -sg(rho_t) * A_t * logprobs_t where 1 - low <= rho_t <= 1 + high, otherwise 0

    Source: arXiv 2607.07508, section 3.1. Meant for old log-probs of the sampler (`old_logprobs: sampler`).
    """
    return _weighted(inputs, _within(inputs, "mask"))


def dppo(inputs: LossInputs) -> LossAndMetrics:
    """Compute DPPO's loss, which excludes tokens whose probability has already moved far in the advantage's direction.

        p_t = exp(logprobs_t), q_t = exp(old_logprobs_t)
        l_t = -sg(min(rho_t, 20)) * A_t * logprobs_t where p_t - q_t <= high if A_t > 0, otherwise p_t - q_t >= -low

    |p_t - q_t| is the total variation distance of the two policies if all other tokens count as one.

    Source: arXiv 2602.04879, section 5: the binary mask and its truncation.
    """
    moved = inputs.logprobs.detach().exp() - inputs.old_logprobs.exp()
    included = torch.where(inputs.advantages > 0, moved <= inputs.clip.high, moved >= -inputs.clip.low)
    return _weighted(inputs, inputs.log_ratio.detach().exp().clamp(max=MAX_DPPO_RATIO) * included)


def flash_reinforce(inputs: LossInputs) -> LossAndMetrics:
    """Compute FlashREINFORCE's loss, which excludes responses of too different policies and weights the others.

        l_t = -sg(rho_t) * A_t * logprobs_t where mean_t(binary_kl_t) <= high, otherwise 0

    The ratio is not clipped. Excluded responses count in the mean over responses.

    Source: https://github.com/yifanzhang-pro/FlashREINFORCE, equation 11 of its paper. Meant for old log-probs of the
        sampler (`old_logprobs: sampler`), and for one update with each rollout.
    """
    return _weighted(inputs, _factors(inputs, level="sequence", mode="binary_kl", low=0.0, high=inputs.clip.high))


def _within(inputs: LossInputs, mode: str) -> Tensor:
    clip = inputs.clip
    return _factors(inputs, level="token", mode=mode, low=1 - clip.low, high=1 + clip.high)


def _factors(inputs: LossInputs, **correction: Any) -> Tensor:
    return importance_factors(inputs.logprobs.detach(), inputs.old_logprobs, inputs.mask, **correction)


def _weighted(inputs: LossInputs, factors: Tensor) -> LossAndMetrics:
    changed = factors != inputs.log_ratio.detach().exp()
    loss = inputs.mean(-factors * inputs.advantages * inputs.logprobs)
    return loss, {"clip_fraction": inputs.sum(changed), "ppo_ratio_clamped": inputs.sum(factors)}


def reinforce(inputs: LossInputs) -> LossAndMetrics:
    """Compute the REINFORCE loss, -sum_t w_t * A_t * logprobs_t / total.

    It has the gradient of the clipped loss at ratio 1, so it is meant for on-policy samples.

    Source: Williams 1992, "Simple statistical gradient-following algorithms", equation 11.
    """
    return inputs.mean(-inputs.advantages * inputs.logprobs), {}
