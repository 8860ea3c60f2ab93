"""Rewards of environments, beside those of the server."""

import dataclasses

import torch

from rlhf_triton.actor.data.rollout import ProcessRewards, Rollout, Scores

COMPONENT = "environment"  # name among a rollout's rewards
BEYOND = "the environment's rewards, or their sum, are beyond float32; return smaller ones, or lower environment.weight"


def with_environment(rollout: Rollout, scores: Scores, weight: float) -> Scores:
    """Add the environments' rewards, times `weight`: each at the last token of its turn.

    Conversations whose environment failed, or whose rewards are beyond float32, count as not scored.
    """
    if rollout.trajectories is None:
        return scores
    exact = torch.zeros(rollout.tokens.shape, dtype=torch.float64)
    ends = torch.zeros(rollout.tokens.shape, dtype=torch.bool)
    for row, trajectory in enumerate(rollout.trajectories):
        for turn in trajectory.turns:
            exact[row, turn.end - 1] = weight * turn.reward
            ends[row, turn.end - 1] = True
        if trajectory.turns:
            exact[row, trajectory.turns[-1].end - 1] += weight * trajectory.later
    is_finite = torch.cat([exact, exact.sum(-1, keepdim=True)], -1).float().isfinite().all(-1)
    rewards = exact.where(is_finite[:, None], 0.0).float()
    process, errors = (
        scores.process,
        [
            trajectory.error or ("" if finite else BEYOND)
            for trajectory, finite in zip(rollout.trajectories, is_finite.tolist(), strict=True)
        ],
    )
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


def scores_of_others(rollout: Rollout, main: Scores, values: Scores | None, weight: float) -> tuple[Scores, Scores]:
    """Return the scores of conversations with the rewards of their other rows, and the scores of these.

    Another row has the served rewards of its conversation, and at its last turn what came after it.

    Args:
        rollout: the other rows.
        main: of the conversations, without the rewards in the other rows.
        values: of the other rows; None: there is no critic.
    """
    assert rollout.owners is not None
    assert rollout.trajectories is not None
    owners, count = rollout.owners, len(rollout.prompts)
    known = values or Scores(
        torch.zeros(count),
        torch.zeros(rollout.tokens.shape),
        torch.full((count,), -1),
        torch.ones(count, dtype=torch.bool),
        [],
    )
    served = dataclasses.replace(
        known,
        rewards=(main.rewards - main.components[COMPONENT].nan_to_num())[owners],
        scored=known.scored & main.scored[owners],
        components={name: each[owners] for name, each in main.components.items() if name != COMPONENT},
        reward_versions=None if main.reward_versions is None else main.reward_versions[owners],
        process=None,
    )
    own = torch.tensor([sum(turn.reward for turn in trajectory.turns) for trajectory in rollout.trajectories])
    more = torch.zeros_like(main.rewards).index_add(0, owners, weight * own) * main.scored
    components = {**main.components, COMPONENT: main.components[COMPONENT] + more}
    found = dataclasses.replace(main, rewards=main.rewards + more, components=components)
    return found, with_environment(rollout, served, weight)
