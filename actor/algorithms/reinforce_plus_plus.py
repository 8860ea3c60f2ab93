"""REINFORCE++: returns without a critic, whitened over the rollout."""

import torch

from rlhf_triton.actor.algorithms.advantages import gae
from rlhf_triton.actor.algorithms.inputs import AdvantageInputs, AdvantagesAndReturns


def advantage(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """Return the discounted sum of token rewards from each token on, as advantages and returns; `lam` is unused."""
    return gae(torch.zeros_like(inputs.mask), inputs.token_rewards, inputs.mask, gamma=inputs.gamma, lam=1.0)
