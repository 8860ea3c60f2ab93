"""The inputs of advantage functions and policy losses, both built-in ones and a user's own.

`B`: number of responses. `S`: tokens of the longest prompt + response. Position t of a tensor `[B, S-1]` belongs to
token t+1. An advantage function sees a conversation with an environment as one response: the positions of its rows
follow each other in the order of the turns.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_triton.actor.algorithms.advantages import masked_sum, require_same_shape, token_rewards

MAX_LOG_RATIO = 20.0  # nats; if exp overflowed, even a clipped loss would have a non-finite gradient


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """The scored responses of a rollout, which the stages shape before an advantage function receives them."""

    rewards: Tensor  # float32 [B], scores; with process rewards, the part of the score that no step has
    penalty: Tensor  # float32 [B, S-1], KL penalty per token, times kl_coef; 0 if the penalty is in the loss
    values: Tensor  # float32 [B, S-1]; 0 outside the mask and without a critic
    mask: Tensor  # float32 [B, S-1], response tokens of scored rows
    groups: Tensor  # int64 [B], equal for responses to the same prompt
    scored: Tensor  # bool [B], rows with a valid reward
    ended: Tensor  # bool [B], responses that ended within the maximum length
    counted: Tensor  # bool [B], rows that the policy learns from; the critic learns from all scored rows
    gamma: float = 1.0  # discount
    lam: float = 1.0  # GAE's lambda
    lam_values: float | None = None  # lambda of the returns that the critic learns; None: lam
    lam_length: float | None = None  # alpha in the policy's lambda, 1 - 1 / (alpha * length); None: lam
    process_rewards: Tensor | None = None  # float32 [B, S-1], rewards of steps; None without a process reward
    process_ends: Tensor | None = None  # bool [B, S-1], where a process reward is given
    components: Tensor | None = None  # float32 [B, C], terms of the score, NaN where one does not apply; None: only one
    component_weights: Tensor | None = None  # float32 [C], weights of the components in the score

    @property
    def remainder(self) -> Tensor:
        """Each response's total reward minus its process rewards, `[B]`."""
        return self.rewards - (self.penalty * self.mask).sum(-1)

    @property
    def totals(self) -> Tensor:
        """Total reward of each response, `[B]`: its score and process rewards minus its summed KL penalty."""
        return (
            self.remainder
            if self.process_rewards is None
            else self.remainder + (self.process_rewards * self.mask).sum(-1)
        )

    @property
    def token_rewards(self) -> Tensor:
        """Reward of each token, `[B, S-1]`: process rewards minus the penalty, plus the score at the last token."""
        sampled = torch.where(self.mask > 0, torch.arange(self.mask.shape[1], device=self.mask.device), -1).amax(-1)
        rewards = token_rewards(self.rewards, self.penalty, sampled + 2)
        return rewards if self.process_rewards is None else rewards + self.process_rewards

    def spread(self, advantages: Tensor) -> Tensor:
        """Copy the advantage of each response to all of its tokens: `[B]` -> `[B, S-1]`, 0 outside the mask."""
        return advantages[:, None] * self.mask


@dataclass(frozen=True)
class ClipRange:
    """Clip range of the probability ratio, [1 - low, 1 + high]; for `dppo`, of the difference, [-low, high]."""

    low: float = 0.2
    high: float = 0.2


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """A micro-batch, which is a part of a minibatch. Log-probs are 0 where the weight is 0.

    Raises: ValueError if shapes differ.
    """

    logprobs: Tensor  # float32 [B, S-1], under the policy in training; the only tensor with a gradient
    old_logprobs: Tensor  # float32 [B, S-1], under the policy that sampled the response
    advantages: Tensor  # float32 [B, S-1], times the importance weight, if there is one
    weights: Tensor  # float32 [B, S-1], weight in the mean; 0 outside the mask and in excluded responses
    total: float  # sum of the weights of the whole minibatch, over all micro-batches and ranks
    clip: ClipRange  # from `actor.algorithm.clip_ratio` and its siblings
    mask: Tensor  # float32 [B, S-1], 1 where position t scores a response token
    groups: Tensor  # int64 [B], equal for responses to the same prompt, which may be in different micro-batches
    versions: Tensor  # int64 [B], version of the critic that scored the response; -1 without a critic
    ref_logprobs: Tensor | None = None  # float32 [B, S-1], under the reference; None if they are not computed

    def __post_init__(self) -> None:
        named = {name: getattr(self, name) for name in ("logprobs", "old_logprobs", "advantages", "weights")}
        require_same_shape(**named)
        # Filled before any arithmetic: -inf - -inf, or -inf * 0, would put NaN into the model's gradients.
        outside = self.weights == 0
        for name in ("logprobs", "old_logprobs", "ref_logprobs"):
            if (logprobs := getattr(self, name)) is not None:
                object.__setattr__(self, name, logprobs.masked_fill(outside, 0.0))

    @property
    def log_ratio(self) -> Tensor:
        """Log-ratio of the policy to the policy that sampled, `[B, S-1]`, clamped to +-`MAX_LOG_RATIO`."""
        return (self.logprobs - self.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def mean(self, token_losses: Tensor) -> Tensor:
        """Return this micro-batch's share of the minibatch's weighted mean of `token_losses` `[B, S-1]`, a scalar.

        The shares and gradients of all micro-batches add up to the mean, whatever the split.
        """
        return masked_sum(token_losses, self.weights) / (self.total or 1)

    def sum(self, values: Tensor) -> Tensor:
        """Return the weighted sum of `values` `[B, S-1]`, detached, for a metric; the caller divides it by `total`."""
        return masked_sum(values.detach().to(self.logprobs.dtype), self.weights)

    def statistics(self) -> dict[str, Tensor]:
        """Return the metrics that every loss has; `approx_kl` is k3 of KL(old || new)."""
        log_ratio = self.log_ratio.detach()
        ratio = self.sum(log_ratio.exp())
        return {
            "clip_fraction": torch.zeros_like(ratio),
            "approx_kl": self.sum(torch.expm1(log_ratio) - log_ratio),
            "ppo_ratio": ratio,
            "ppo_ratio_clamped": ratio,
        }


AdvantagesAndReturns = tuple[Tensor, Tensor]  # each [B, S-1]
Advantage = Callable[[AdvantageInputs], AdvantagesAndReturns]
LossAndMetrics = tuple[Tensor, dict[str, Tensor]]  # a scalar from `LossInputs.mean`, scalars from `LossInputs.sum`
Loss = Callable[[LossInputs], LossAndMetrics]


def per_response(inputs: AdvantageInputs, advantages: Tensor) -> AdvantagesAndReturns:
    """Return advantages and returns of an algorithm with one advantage for each response, `[B]`: returns are totals."""
    return inputs.spread(advantages), inputs.spread(inputs.totals)
