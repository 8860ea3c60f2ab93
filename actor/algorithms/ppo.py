"""PPO: advantages from a critic."""

from torch import Tensor

from actor.algorithms.advantages import gae
from actor.algorithms.inputs import AdvantageInputs


def advantage(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, by GAE over the critic's values."""
    return gae(inputs.values, inputs.token_rewards, inputs.mask, gamma=inputs.gamma, lam=inputs.lam)
