"""GRPO and its relatives, which compare a response's reward with the rewards of all responses to the prompt."""

import torch

from rlhf_triton.actor.algorithms.baselines import divide_by_mean, group_standardise, process_supervision, subtract_mean
from rlhf_triton.actor.algorithms.inputs import AdvantageInputs, AdvantagesAndReturns, per_response


def advantage(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """Standardise each response's total reward over all responses to the same prompt.

    With a process reward, standardise the rewards of all steps instead (`process_supervision`); the rest of a
    response's total reward is added to its last step. The returns are the total rewards, or with a process reward the
    sum of rewards from each token on; `gamma` and `lam` are unused.
    """
    if inputs.process_rewards is not None and inputs.process_ends is not None:
        ends = inputs.process_ends & (inputs.mask > 0)
        position = torch.arange(ends.shape[1], device=ends.device)
        last = torch.where(ends, position, -1).amax(1, keepdim=True).clamp(min=0)
        rewards = inputs.process_rewards.scatter_add(1, last, inputs.remainder[:, None]) * ends
        advantages = process_supervision(rewards, ends, inputs.groups, inputs.counted)
        return advantages * inputs.mask, rewards.flip(1).cumsum(1).flip(1) * inputs.mask
    return per_response(inputs, group_standardise(inputs.totals, inputs.groups, inputs.counted))


def decoupled(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """Standardise each component of the reward over all responses to the same prompt, and sum them by weight (GDPO).

        A_i = sum_k w_k * (r_{i,k} - mean_k) / (std_k + 1e-6)

    The algorithm then whitens the sums over the batch. A component that does not apply to a response adds 0 to it, and
    is excluded from the statistics. Without components, the total reward is the only one.

    Source: Liu et al. 2026 (arXiv 2601.05242).
    """
    if inputs.components is None or inputs.component_weights is None:
        return advantage(inputs)
    advantages = torch.zeros_like(inputs.rewards)
    for component, weight in zip(inputs.components.unbind(1), inputs.component_weights, strict=True):
        counted = inputs.counted & component.isfinite()
        advantages = advantages + weight * group_standardise(component, inputs.groups, counted)
    return per_response(inputs, advantages)


def centred(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """Subtract the mean total reward of the prompt's responses from each total (Dr. GRPO, REINFORCE++-baseline)."""
    return per_response(inputs, subtract_mean(inputs.totals, inputs.groups, inputs.counted))


def relative(inputs: AdvantageInputs) -> AdvantagesAndReturns:
    """Subtract the mean total reward of the prompt's responses from each total, and divide by that mean (MaxRL)."""
    return per_response(inputs, divide_by_mean(inputs.totals, inputs.groups, inputs.counted))
