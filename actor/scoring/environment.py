"""Rewards of environments, beside those of the server."""

import dataclasses

import torch

from actor.data.rollout import ProcessRewards, Rollout, Scores

COMPONENT = "environment"  # name among a rollout's rewards


def with_environment(rollout: Rollout, scores: Scores, weight: float) -> Scores:
    """Add the environments' rewards, times `weight`: each at the last token of its turn.

    Conversations whose environment failed count as not scored.
    """
    if rollout.trajectories is None:
        return scores
    rewards, ends = torch.zeros(rollout.tokens.shape), torch.zeros(rollout.tokens.shape, dtype=torch.bool)
    for row, trajectory in enumerate(rollout.trajectories):
        for turn in trajectory.turns:
            rewards[row, turn.end - 1] = weight * turn.reward
            ends[row, turn.end - 1] = True
    process, errors = scores.process, [trajectory.error for trajectory in rollout.trajectories]
    succeeded, total = torch.tensor([not error for error in errors]), rewards.sum(-1)
    if process is not None:
        rewards, ends = rewards + process.rewards, ends | process.ends
    return dataclasses.replace(
        scores,
        rewards=scores.rewards + total * succeeded,
        scored=scores.scored & succeeded,
        failures=sorted({*scores.failures, *filter(None, errors)}),
        components={**scores.components, COMPONENT: torch.where(succeeded, total, torch.nan)},
        process=ProcessRewards(rewards, ends, scores.rewards if process is None else process.outcome),
    )
