"""FlashREINFORCE, which compares each response's reward with the mean reward of the step; one response to a prompt."""

import torch

from rlhf_triton.actor.algorithms.baselines import subtract_mean
from rlhf_triton.actor.algorithms.inputs import AdvantageInputs, AdvantagesAndReturns


def advantage(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """Subtract the mean total reward of all responses from each total; the returns are the total rewards."""
    advantages = subtract_mean(inputs.totals, torch.zeros_like(inputs.groups), inputs.counted)
    return inputs.spread(advantages), inputs.spread(inputs.totals)
