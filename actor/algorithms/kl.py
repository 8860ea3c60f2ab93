"""KL divergence from the reference: estimators per token, the KL as a loss term, and the controller of `kl_coef`.

The estimators take d = logprobs - ref_logprobs, `[B, S-1]`, of tokens that the policy sampled, and return nats per
token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_triton.actor.algorithms.advantages import masked_sum, require_same_shape
from rlhf_triton.config.algorithms import KL_ESTIMATORS
from rlhf_triton.user_code import import_function

K3_RANGE = (-11.0, 2.61)  # range of the log-ratio; k3 is 10 at both ends, the bound of verl's `low_var_kl`
HORIZON = 10_000  # time constant of the controller, in responses
MAX_ERROR = 0.2  # from the paper: bounds the change of the coefficient per rollout


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
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        self.coef *= 1 + error * min(samples / HORIZON, 1.0)
