"""REINFORCE++: returns without a critic, whitened over the rollout."""

from rlhf_triton.actor.algorithms.advantages import returns_to_go
from rlhf_triton.actor.algorithms.inputs import AdvantageInputs, AdvantagesAndReturns


def advantage(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """Return the discounted sum of token rewards from each token on, as advantages and returns; `lam` is unused."""
    returns = returns_to_go(inputs.token_rewards, inputs.mask, gamma=inputs.gamma)
    return returns, returns
