"""Policy losses.

Each loss is a micro-batch's share of the minibatch mean, so the split into micro-batches never changes the gradient.
It is proportional to the advantages, so importance factors multiply the advantages.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_triton.actor.algorithms.advantages import masked_sum, require_same_shape
from rlhf_triton.actor.algorithms.inputs import MOST_LOG_RATIO, LossAndMetrics, LossInputs
from rlhf_triton.config.algorithms import GATES, KL_ESTIMATORS
from rlhf_triton.rewards.function import import_function


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
    kept = torch.where(inputs.advantages > 0, moved <= inputs.clip.high, moved >= -inputs.clip.low)
    return _weighted(inputs, inputs.log_ratio.detach().exp().clamp(max=MOST_DPPO_RATIO) * kept)


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


# Importance correction: factors from log-ratios on one of three levels, clipped or masked to a range; or gates, which
# mask tokens or responses by a divergence.


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

    Returns: `[B, S-1]`, clamped to +-`MOST_LOG_RATIO`.
    """
    if level != "token":
        total = (log_ratio.masked_fill(mask == 0, 0.0) * mask).sum(-1, keepdim=True)
        log_ratio = (total if level == "sequence" else total / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(mask)
    return log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)


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
        mode: `clip`, `mask`, or one of `GATES`.
        low, high: range of the ratio; of a gate, `high` is the bound of the divergence.

    Returns: `[B, S-1]`.
    Source: truncation: https://fengyao.notion.site/off-policy-rl; mask: IcePop (arXiv 2510.18855); `sequence` and
        `geometric`: Liu et al. 2025, "When speed kills stability", and TRL; gates: DPPO (arXiv 2602.04879), and
        OpenRLHF's `is_correction_gating`.
    """
    log_ratio = logprobs - sampled_logprobs
    if mode in GATES:
        divergence = import_function(GATES[mode].function)(logprobs, sampled_logprobs)
        bounded = aggregate_log_ratio(divergence, mask, "token" if level == "token" else "geometric") <= high
        ratio = aggregate_log_ratio(log_ratio, mask, "token").exp()
        return torch.where(mask > 0, torch.where(bounded, ratio, 0.0), 1.0)
    ratio = aggregate_log_ratio(log_ratio, mask, level).exp()
    inside = (ratio >= low) & (ratio <= high)
    factors = ratio.clamp(low, high) if mode == "clip" else ratio * inside
    return torch.where(mask > 0, factors, 1.0)


# KL divergence from the reference: estimators per token, the KL as a loss term, and the controller of `kl_coef`.
#
# The estimators take d = logprobs - ref_logprobs, `[B, S-1]`, of tokens that the policy sampled, and return nats per
# token.


K3_RANGE = (-11.0, 2.61)  # range of the log-ratio; k3 is 10 at both ends, the bound of verl's `low_var_kl`
MOST_DPPO_RATIO = 20.0  # as in verl
HORIZON = 10_000  # time constant of the controller, in responses
MOST_ERROR = 0.2  # from the paper: bounds the change of the coefficient per rollout


def k1(difference: Tensor) -> Tensor:
    """Return d: unbiased, possibly negative. As a loss its gradient is 0 in expectation."""
    return difference


def absolute(difference: Tensor) -> Tensor:
    """Return |d|, as in NeMo-Aligner: biased. Its gradient does not shrink as the two policies approach each other."""
    return difference.abs()


def k2(difference: Tensor) -> Tensor:
    """Return d^2 / 2: biased. As a loss it has the gradient of the true KL in expectation."""
    return 0.5 * difference.square()


def k3(difference: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d: unbiased, never negative; as a loss (GRPO) it approximates the KL's gradient near 0.

    The value is capped at 10. Beyond the cap the gradient stays constant instead of becoming 0, so that the token is
    still pulled towards the reference.
    """
    log_ratio = -difference
    log_ratio = log_ratio - (log_ratio - log_ratio.clamp(*K3_RANGE)).detach()
    return torch.expm1(log_ratio) - log_ratio


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) per token, from tokens that the policy sampled.

    Args:
        logprobs: `[B, S-1]`, log-prob of token t+1 under the policy that sampled it.
        ref_logprobs: `[B, S-1]`, log-prob of token t+1 under the reference, the frozen initial policy.
        kind: one of `KL_ESTIMATORS`.

    Returns: `[B, S-1]` in nats, at every position; the caller applies the mask.
    Raises: ValueError if the shapes differ.
    Source: Schulman, "Approximating KL divergence", 2020 (k1, k2, k3); NeMo-Aligner (abs).
    """
    require_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    estimate: Tensor = import_function(KL_ESTIMATORS[kind])(logprobs - ref_logprobs)
    return estimate


def kl_loss(
    logprobs: Tensor, ref_logprobs: Tensor, log_ratio: Tensor, weights: Tensor, *, kind: str, total: float
) -> Tensor:
    """Return sum_t w_t * kl_t / total, a differentiable scalar; the caller multiplies it by `kl_coef`.

    The gradient treats the samples as fixed, except for `unbiased`: exp(log_ratio_t) * k3_t has the gradient of the
    true KL in expectation, because the ratio corrects for the sampler and carries the gradient of the sampling.

    Args:
        log_ratio: `[B, S-1]`, differentiable log-ratio of the policy to the one that sampled, for `unbiased`.
        kind: one of `KL_ESTIMATORS`.

    Raises: ValueError if the shapes differ.
    Source: Shao et al. 2024 (arXiv 2402.03300), equation 4; Tang and Munos 2025 (arXiv 2506.09477) on the gradients;
        `unbiased`: DeepSeek-V3.2 (arXiv 2512.02556).
    """
    logprobs, ref_logprobs, log_ratio = (x.masked_fill(weights == 0, 0.0) for x in (logprobs, ref_logprobs, log_ratio))
    estimate = kl_estimate(logprobs, ref_logprobs, kind)
    if kind == "unbiased":
        estimate = log_ratio.exp() * estimate
    return masked_sum(estimate, weights) / (total or 1)


@dataclass
class KLControl:
    """Holds `kl_coef`, and adapts it to reach a target KL if there is one.

        error = clip(kl / target - 1, -0.2, 0.2)
        coef <- coef * (1 + error * min(samples / HORIZON, 1))

    The paper has no minimum; without it, 5 * HORIZON samples or more could make the coefficient negative.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.
    """

    coef: float
    """The coefficient, >= 0."""
    target: float | None
    """Target KL in nats per sequence; None: the coefficient is fixed."""

    def update(self, kl: float, samples: int) -> None:
        """Adapt the coefficient to the mean KL per sequence (nats, k1) of a rollout with `samples` responses."""
        if self.target is None:
            return
        error = min(max(kl / self.target - 1, -MOST_ERROR), MOST_ERROR)
        self.coef *= 1 + error * min(samples / HORIZON, 1.0)
