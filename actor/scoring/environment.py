"""Adds the rewards of environments to the rewards from the server."""

import numpy as np

from rlhf_triton.actor.data.rollout_rows import Conversation, RolloutRow, failure_of, fit_float32

COMPONENT = "environment"  # name of the environment's reward in `Score.components`
TOO_LARGE = "the environment's rewards, or their sum with the served ones, exceed float32; return smaller ones"


def add_environment_rewards(conversation: Conversation) -> Conversation:
    """Add the environment's rewards: each one at the last token of its turn, and their sum to the total reward.

    A conversation whose environment failed, that could not be sampled, or whose rewards exceed float32 in any sum,
    counts as unscored.
    """
    end = conversation[-1]
    if end.turns is None:
        return (end.with_score(failure=end.error),) if end.error else conversation
    turn_rewards = [[turn.reward for turn in row.turns or ()] for row in conversation]
    total = sum(map(sum, turn_rewards))
    rows = [_with_rewards(row, rewards) for row, rewards in zip(conversation, turn_rewards, strict=True)]
    score = rows[-1].score
    components = {**score.components, COMPONENT: total}
    weights = {**score.weights, COMPONENT: 1.0}
    rows[-1] = rows[-1].with_score(reward=score.reward + total, components=components, weights=weights)
    is_finite = failure_of(conversation) or fit_float32([row.score for row in rows])
    failure = end.error or ("" if is_finite else TOO_LARGE)
    if failure:
        return tuple(
            row.with_score(failure=row.score.failure or failure, components={**row.score.components, COMPONENT: np.nan})
            for row in conversation
        )
    return tuple(rows)


def _with_rewards(row: RolloutRow, rewards: list[float]) -> RolloutRow:
    size = len(row.tokens)
    score = row.score
    steps = np.zeros(size, np.float32) if score.steps is None else score.steps.copy()
    ends = np.zeros(size, np.bool_) if score.ends is None else score.ends.copy()
    with np.errstate(over="ignore"):
        for turn, reward in zip(row.turns or (), rewards, strict=True):
            steps[turn.end - 1] += reward
            ends[turn.end - 1] = True
    return row.with_score(steps=steps, ends=ends)
