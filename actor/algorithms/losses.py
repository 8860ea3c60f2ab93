"""Policy losses. Each is a share of the minibatch's mean, so the split into micro-batches never changes the gradient,
and proportional to the advantages, which importance weights multiply.
"""

import torch
from torch import Tensor

from rlhf_triton.actor.algorithms.advantages import masked_sum, require_same_shape
from rlhf_triton.actor.algorithms.inputs import MOST_LOG_RATIO, LossInputs
from rlhf_triton.config.algorithms import KL_ESTIMATORS
from rlhf_triton.rewards.function import import_function


def clipped(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped surrogate loss.

        rho_t = exp(clamp(logprobs_t - old_logprobs_t, -20, 20))
        l_t = max(-A_t * rho_t, -A_t * clamp(rho_t, 1 - low, 1 + high))
        loss = sum_t w_t * l_t / total

    Returns: (loss, metrics): `clip_fraction` counts the tokens whose gradient was removed by a clip.
    Source: Schulman et al. 2017 (arXiv 1707.06347), equation 7; clip-higher: Yu et al. 2025 (arXiv 2503.14476).
    """
    return _surrogate(inputs, inputs.log_ratio.exp())


def gspo(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute GSPO's loss: PPO's, with one ratio for a response, the geometric mean of its tokens' ratios.

        s = exp(sum_t m_t * (logprobs_t - old_logprobs_t) / sum_t m_t)

    The gradient of s reaches the tokens by GSPO-token's form s_t = sg(s) * exp(logprobs_t - sg(logprobs_t)), which
    equals it if all tokens of a response have the same advantage, and otherwise weighs each token by its own.

    Source: Zheng et al. 2025 (arXiv 2507.18071), equations 5 to 7 and 13 to 14.
    """
    log_ratio = of_level(inputs.log_ratio.detach(), inputs.mask, "geometric")
    return _surrogate(inputs, (log_ratio + inputs.logprobs - inputs.logprobs.detach()).exp())


def _surrogate(inputs: LossInputs, ratio: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    clamped = ratio.clamp(1 - inputs.clip.low, 1 + inputs.clip.high)
    free = -inputs.advantages * ratio
    bounded = -inputs.advantages * clamped
    return inputs.mean(torch.maximum(free, bounded)), {
        "clip_fraction": inputs.sum(bounded > free),
        "ppo_ratio_clamped": inputs.sum(clamped),
    }


def cispo(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute CISPO's loss: REINFORCE, each token weighted by its clipped ratio, so that every token keeps a gradient.

        l_t = -sg(clamp(rho_t, 1 - low, 1 + high)) * A_t * logprobs_t

    Source: MiniMax 2025 (arXiv 2506.13585), equations 4 and 5.
    """
    return _weighted(inputs, _within(inputs, "clip"))


def dis(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute SAO's loss (direct double-sided importance sampling): tokens with a ratio out of the range are left out.

        l_t = -sg(rho_t) * A_t * logprobs_t where 1 - low <= rho_t <= 1 + high, otherwise 0

    Source: arXiv 2607.07508, section 3.1. Meant for old log-probs of the sampler (`old_logprobs: sampler`).
    """
    return _weighted(inputs, _within(inputs, "mask"))


def dppo(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute DPPO's loss: tokens whose probability has already moved far in the advantage's direction are left out.

        p_t = exp(logprobs_t), q_t = exp(old_logprobs_t)
        l_t = -sg(min(rho_t, 20)) * A_t * logprobs_t where p_t - q_t <= high if A_t > 0, otherwise p_t - q_t >= -low

    The difference is the total variation of the two policies over this token and all others together.

    Source: arXiv 2602.04879, the binary mask of section 5 and its truncation.
    """
    moved = inputs.logprobs.detach().exp() - inputs.old_logprobs.exp()
    kept = torch.where(inputs.advantages > 0, moved <= inputs.clip.high, moved >= -inputs.clip.low)
    return _weighted(inputs, inputs.log_ratio.detach().exp().clamp(max=MOST_DPPO_RATIO) * kept)


def _within(inputs: LossInputs, mode: str) -> Tensor:
    log_ratio, clip = inputs.log_ratio.detach(), inputs.clip
    return importance_factors(log_ratio, inputs.mask, level="token", mode=mode, low=1 - clip.low, high=1 + clip.high)


def _weighted(inputs: LossInputs, factors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    changed = factors != inputs.log_ratio.detach().exp()
    loss = inputs.mean(-factors * inputs.advantages * inputs.logprobs)
    return loss, {"clip_fraction": inputs.sum(changed), "ppo_ratio_clamped": inputs.sum(factors)}


def reinforce(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the REINFORCE loss, -sum_t w_t * A_t * logprobs_t / total.

    Its gradient equals that of the clipped loss at ratio 1, so it is meant for on-policy samples.

    Source: Williams 1992, "Simple statistical gradient-following algorithms", equation 11.
    """
    return inputs.mean(-inputs.advantages * inputs.logprobs), {}


# Importance correction: factors from ratios of log-probs, on three levels, clipped or masked to a range.


def of_level(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Return log-ratios `[B, S-1]`: of each token, or of the whole response at each of its tokens.

    Args:
        log_ratio: `[B, S-1]`, of tokens; ignored outside the mask.
        mask: `[B, S-1]`, 1 where position t scores a response token.
        level: `token`; `sequence`, their sum over the response; `geometric`, their mean.

    Returns: `[B, S-1]` within +-`MOST_LOG_RATIO`.
    """
    if level != "token":
        total = (log_ratio.masked_fill(mask == 0, 0.0) * mask).sum(-1, keepdim=True)
        log_ratio = (total if level == "sequence" else total / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(mask)
    return log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)


def importance_factors(log_ratio: Tensor, mask: Tensor, *, level: str, mode: str, low: float, high: float) -> Tensor:
    """Return importance factors of tokens that another policy or engine sampled; 1 outside the mask.

        rho = exp(log_ratio) at `level`
        clip: clamp(rho, low, high); mask: rho where low <= rho <= high, otherwise 0

    Args:
        log_ratio: `[B, S-1]`, log-prob of token t+1 under the policy minus that under the sampler.
        mask: `[B, S-1]`, 1 where position t scores a response token.
        level: `token`, `sequence` or `geometric`, see `of_level`.
        mode: `clip` or `mask`.
        low, high: range of the ratio.

    Returns: `[B, S-1]`.
    Source: truncation: https://fengyao.notion.site/off-policy-rl; mask: IcePop (arXiv 2510.18855); by sequence and
        its geometric mean: Liu et al. 2025, "When speed kills stability", and TRL.
    """
    ratio = of_level(log_ratio, mask, level).exp()
    inside = (ratio >= low) & (ratio <= high)
    factors = ratio.clamp(low, high) if mode == "clip" else ratio * inside
    return torch.where(mask > 0, factors, 1.0)


# KL divergence from the reference: estimators per token, the penalty as a loss term, and the control of its
# coefficient.
#
# The estimators take d = logprobs - ref_logprobs, `[B, S-1]`, of tokens that the policy sampled, and return nats per
# token.


K3_RANGE = (-11.0, 2.61)  # of the log-ratio; k3 is 10 at both ends, the bound of verl's `low_var_kl`
MOST_DPPO_RATIO = 20.0  # as in verl
HORIZON = 10_000  # time constant of the controller, in responses
MOST_ERROR = 0.2  # from the paper: bounds the change of the coefficient per rollout


def k1(difference: Tensor) -> Tensor:
    """Return d: unbiased, and may be negative. As a loss its gradient is 0 in expectation."""
    return difference


def absolute(difference: Tensor) -> Tensor:
    """Return |d|, as in NeMo-Aligner: biased. Its gradient does not shrink as the two policies approach each other."""
    return difference.abs()


def k2(difference: Tensor) -> Tensor:
    """Return d^2 / 2: biased. As a loss it has the gradient of the true KL in expectation."""
    return 0.5 * difference.square()


def k3(difference: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d: unbiased, never negative; as a loss (GRPO) it approximates the KL's gradient near 0.

    It is at most 10. Beyond, it keeps the gradient that it has there, so that the token is still pulled towards the
    reference.
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


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor, *, kind: str, total: float) -> Tensor:
    """Return sum_t w_t * kl_t / total, a differentiable scalar; the caller multiplies it by `kl_coef`.

    The gradient is that of the estimate for fixed samples.

    Args:
        kind: one of `KL_ESTIMATORS`.

    Raises: ValueError if the shapes differ.
    Source: Shao et al. 2024 (arXiv 2402.03300), equation 4; Tang and Munos 2025 (arXiv 2506.09477) on the gradients.
    """
    logprobs, ref_logprobs = (x.masked_fill(weights == 0, 0.0) for x in (logprobs, ref_logprobs))
    return masked_sum(kl_estimate(logprobs, ref_logprobs, kind), weights) / (total or 1)


class KLControl:
    """Holds `kl_coef` and adapts it if there is a target.

        error = clip(kl / target - 1, -0.2, 0.2)
        coef <- coef * (1 + error * min(samples / HORIZON, 1))

    Without the minimum, which the paper lacks, the coefficient would become negative from 5 * HORIZON samples on.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.
    """

    def __init__(self, coef: float, *, target: float | None) -> None:
        """
        Args:
            coef: initial coefficient, >= 0.
            target: target KL in nats per sequence; None: the coefficient is fixed.
        """
        self.coef = coef
        self.target = target

    def update(self, kl: float, samples: int) -> None:
        """Adapt the coefficient to the mean KL per sequence (nats, k1) of a rollout with `samples` responses."""
        if self.target is None:
            return
        error = min(max(kl / self.target - 1, -MOST_ERROR), MOST_ERROR)
        self.coef *= 1 + error * min(samples / HORIZON, 1.0)
