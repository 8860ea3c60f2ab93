"""The algorithms: each is an advantage function over `Episodes` and a policy loss.

The training loop never branches on an algorithm's name, only on whether it needs the critic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from actor.algorithms.advantages import gae, token_rewards
from actor.algorithms.baselines import group_standardise, leave_one_out, process_supervision
from actor.algorithms.policy_loss import ClipRange, PolicyLoss, clipped_loss, reinforce_loss
from python_backend.config import AlgorithmSection, KLSection
from python_backend.errors import RlhfError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Episodes:
    """Scored responses: the input of an advantage function."""

    rewards: Tensor  # float32 [B], shaped scores; with a process reward only what they have beyond its steps
    penalty: Tensor  # float32 [B, S-1], KL penalty per token, times kl_coef; 0 if the penalty is in the loss
    values: Tensor  # float32 [B, S-1]; 0 outside the mask and without a critic
    mask: Tensor  # float32 [B, S-1], response tokens of scored rows
    lengths: Tensor  # int64 [B], prompt + response
    groups: Tensor  # int64 [B], equal for responses to the same prompt
    counted: Tensor  # bool [B], rows that the policy learns from
    steps: Tensor | None = None  # float32 [B, S-1], shaped process rewards; None without any
    ends: Tensor | None = None  # bool [B, S-1], where a process reward is given

    @property
    def totals(self) -> Tensor:
        """Total reward of each response, `[B]`: its score minus its summed KL penalty."""
        return self.rewards - (self.penalty * self.mask).sum(-1)

    def spread(self, advantages: Tensor) -> Tensor:
        """Copy the value of each response to all of its tokens: `[B]` -> `[B, S-1]`."""
        return advantages[:, None] * self.mask


# (episodes, gamma, lam) -> (advantages, returns), each [B, S-1]
Advantages = Callable[[Episodes, float, float], tuple[Tensor, Tensor]]


def with_critic(episodes: Episodes, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """PPO: return advantages and returns, by GAE over the critic's values."""
    return gae(episodes.values, _token_rewards(episodes), episodes.mask, gamma=gamma, lam=lam)


def returns_to_go(episodes: Episodes, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return the discounted sum of token rewards from each token on, as advantages and as returns; `lam` is unused."""
    return gae(torch.zeros_like(episodes.mask), _token_rewards(episodes), episodes.mask, gamma=gamma, lam=1.0)


def against_the_others(episodes: Episodes, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """RLOO: subtract from each response's total reward the mean over the other responses to the same prompt.

    The returns are the total rewards; `gamma` and `lam` are unused. There is no form for process rewards.
    """
    if episodes.steps is not None:
        raise RlhfError("the served reward model gives process rewards (reward.process), which rloo cannot use")
    advantages = leave_one_out(episodes.totals, episodes.groups, episodes.counted)
    return episodes.spread(advantages), episodes.spread(episodes.totals)


def within_the_group(episodes: Episodes, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """GRPO: standardise each response's total reward over all responses to the same prompt.

    With a process reward, standardise the rewards of all steps instead (`process_supervision`); the rest of a
    response's total reward counts as a reward of its last step. The returns are the total rewards, or with a process
    reward the sums from each token on; `gamma` and `lam` are unused.
    """
    if episodes.steps is not None and episodes.ends is not None:
        ends = episodes.ends & (episodes.mask > 0)
        position = torch.arange(ends.shape[1], device=ends.device)
        last = torch.where(ends, position, -1).amax(1, keepdim=True).clamp(min=0)
        rewards = episodes.steps.scatter_add(1, last, episodes.totals[:, None]) * ends
        advantages = process_supervision(rewards, ends, episodes.groups, episodes.counted)
        return advantages * episodes.mask, rewards.flip(1).cumsum(1).flip(1) * episodes.mask
    advantages = group_standardise(episodes.totals, episodes.groups, episodes.counted)
    return episodes.spread(advantages), episodes.spread(episodes.totals)


@dataclass(frozen=True)
class Algorithm:
    """An advantage function, a policy loss, and the published defaults of settings left at `auto` or unset."""

    advantages: Advantages
    loss: PolicyLoss
    whitens: bool = False
    kl_in: str = "reward"
    loss_mean: str = "token"


ALGORITHMS = {
    "ppo": Algorithm(with_critic, clipped_loss, whitens=True),
    "reinforce++": Algorithm(returns_to_go, clipped_loss, whitens=True),
    "rloo": Algorithm(against_the_others, reinforce_loss),
    "grpo": Algorithm(within_the_group, clipped_loss, kl_in="loss", loss_mean="sequence"),
}


@dataclass(frozen=True)
class Method:
    """An algorithm with its settings resolved from the configuration."""

    algorithm: Algorithm
    gamma: float
    lam: float
    whitens: bool
    kl_estimator: str
    kl_in_loss: bool
    sequence_mean: bool
    mask_unfinished: bool
    clip: ClipRange
    entropy_bonus: float

    @classmethod
    def of(cls, settings: AlgorithmSection, kl: KLSection) -> Method:
        """Build the method that the settings select; `auto` and unset values take the algorithm's defaults."""
        algorithm = ALGORITHMS[settings.name]
        kl_in = algorithm.kl_in if kl.penalty_in == "auto" else kl.penalty_in
        kl_estimator = kl.estimator
        if kl_estimator == "auto":
            kl_estimator = "k3" if kl_in == "loss" else "abs"
        if (kl_in, kl_estimator) == ("loss", "k1"):
            logger.warning(
                "actor.kl.estimator: k1 in the loss has an expected gradient of 0 and penalises nothing; use k2 or k3, "
                "or actor.kl.penalty_in: reward"
            )
        loss_mean = algorithm.loss_mean if settings.loss_mean == "auto" else settings.loss_mean
        whitens = algorithm.whitens if settings.whiten_advantages is None else settings.whiten_advantages
        high = settings.clip_ratio if settings.clip_ratio_high is None else settings.clip_ratio_high
        return cls(
            algorithm,
            settings.gamma,
            settings.lam,
            whitens,
            kl_estimator,
            kl_in == "loss",
            loss_mean == "sequence",
            settings.mask_unfinished,
            ClipRange(settings.clip_ratio, high, settings.dual_clip),
            settings.entropy_bonus,
        )


def _token_rewards(episodes: Episodes) -> Tensor:
    rewards = token_rewards(episodes.rewards, episodes.penalty, episodes.lengths, kl_coef=1.0)
    return rewards if episodes.steps is None else rewards + episodes.steps
