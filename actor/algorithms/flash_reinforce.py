"""FlashREINFORCE, which compares each response's reward with the mean reward of the step; one response to a prompt."""

import torch

from rlhf_triton.actor.algorithms.baselines import subtract_mean
from rlhf_triton.actor.algorithms.inputs import AdvantageInputs, AdvantagesAndReturns, per_response


def advantage(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """Subtract the mean total reward of all responses from each total; the returns are the total rewards."""
    return per_response(inputs, subtract_mean(inputs.totals, torch.zeros_like(inputs.groups), inputs.counted))
