"""PPO, VAPO, SAO: advantages from a critic."""

from rlhf_triton.actor.algorithms.advantages import gae, length_adaptive
from rlhf_triton.actor.algorithms.inputs import AdvantageInputs, AdvantagesAndReturns


def advantage(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """Return (advantages, returns) from GAE over the critic's values.

    With `lam_values` or `lam_length`, the lambda of the returns differs from that of the advantages (decoupled GAE).
    Source: Yue et al. 2025 (arXiv 2504.05118), section 4.1.
    """
    gae_inputs = inputs.values, inputs.token_rewards, inputs.mask
    lam = inputs.lam if inputs.lam_length is None else length_adaptive(inputs.mask, inputs.lam_length)
    advantages, returns = gae(*gae_inputs, gamma=inputs.gamma, lam=lam)
    if inputs.lam_values is not None or inputs.lam_length is not None:
        lam = inputs.lam if inputs.lam_values is None else inputs.lam_values
        returns = gae(*gae_inputs, gamma=inputs.gamma, lam=lam)[1]
    return advantages, returns
