"""One training step of a policy, for tests of what it leaves behind."""

from __future__ import annotations

import torch

from actor.policy import Policy
from actor.rollout import Rollout


def train(policy: Policy, rollout: Rollout) -> None:
    """A step towards what the rollout holds."""
    everywhere = torch.ones_like(rollout.tokens[:, 1:])
    logprobs, _ = policy.token_logprobs(policy.model, rollout.tokens, rollout.lengths, everywhere)
    (-logprobs.clamp(min=-50).mean()).backward()
    policy.optimizer.step()
    policy.optimizer.zero_grad()
    policy.optimizer_step += 1
