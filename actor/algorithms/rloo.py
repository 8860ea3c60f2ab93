"""RLOO, which compares each response's reward with the mean reward of the other responses to the prompt."""

from rlhf_triton.actor.algorithms.baselines import leave_one_out
from rlhf_triton.actor.algorithms.inputs import AdvantageInputs, AdvantagesAndReturns, per_response
from rlhf_triton.errors import RlhfError


def advantage(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """Subtract from each response's total reward the mean over the other responses to the same prompt.

    The returns are the total rewards; `gamma` and `lam` are unused.

    Raises: RlhfError if there are process rewards.
    """
    if inputs.process_rewards is not None:
        raise RlhfError("the served reward model gives process rewards (reward.process), which rloo cannot use")
    return per_response(inputs, leave_one_out(inputs.totals, inputs.groups, inputs.counted))
