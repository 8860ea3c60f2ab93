"""Adds the environments' rewards to the server's."""

import itertools
from dataclasses import replace

import numpy as np

from rlhf_triton.actor.data.sample import Conversation, SampledRow

COMPONENT = "environment"  # name among a conversation's rewards
BEYOND = "the environment's rewards, or their sum, are beyond float32; return smaller ones"


def with_environment(conversation: Conversation) -> Conversation:
    """Add the environment's rewards: each at the last token of its turn, and their sum to the reward.

    A conversation whose environment failed, or whose rewards are beyond float32, counts as not scored.
    """
    end = conversation[-1]
    if end.turns is None:
        return conversation
    given = [[turn.reward for turn in row.turns or ()] for row in conversation]
    total = sum(map(sum, given))
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(np.array([*itertools.chain(*given), total], np.float64).astype(np.float32)).all()
    failure = end.error or ("" if is_finite else BEYOND)
    if failure:
        return tuple(
            row.scored(failure=row.score.failure or failure, components={**row.score.components, COMPONENT: np.nan})
            for row in conversation
        )
    rows = [_with_rewards(row, rewards) for row, rewards in zip(conversation, given, strict=True)]
    score = rows[-1].score
    components = {**score.components, COMPONENT: total}
    rows[-1] = replace(rows[-1], score=replace(score, reward=score.reward + total, components=components))
    return tuple(rows)


def _with_rewards(row: SampledRow, rewards: list[float]) -> SampledRow:
    size, score = len(row.tokens), row.score
    steps = np.zeros(size, np.float32) if score.steps is None else score.steps.copy()
    ends = np.zeros(size, np.bool_) if score.ends is None else score.ends.copy()
    for turn, reward in zip(row.turns or (), rewards, strict=True):
        steps[turn.end - 1] += reward
        ends[turn.end - 1] = True
    return row.scored(steps=steps, ends=ends)
