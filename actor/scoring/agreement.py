"""Scores rows again so that one version of a live reward model scores a whole step, and every group at the least."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable

import torch
from torch import Tensor

from actor.data.rollout import Rollout, Scores

logger = logging.getLogger(__name__)
ROUNDS = 3  # each follows a swap that lands while rows are scored, so more than one is rare


async def with_one_version(
    score: Callable[[Rollout, int], Awaitable[Scores]], rollout: Rollout, scores: Scores, *, group_size: int
) -> Scores:
    """Return `scores` in which the same version of the reward model has scored every row.

    The groups of rows that another version has scored are scored again. If the versions still differ after `ROUNDS`,
    because the server swaps all the time or the servers disagree, rows are masked so that at least no group mixes two.

    Args:
        score: scores the rows of a rollout, with the given `group_size`.
        group_size: number of consecutive rows that form an advantage group.
    """
    if scores.reward_versions is None:
        return scores
    target = int(scores.reward_versions.max())
    for _ in range(ROUNDS):
        others = scores.scored & (_versions(scores) != target)
        if not others.any():
            return scores
        rows = _whole_groups(others, group_size).nonzero().flatten()
        logger.info("%d rows are scored again: version %d of the reward model is served now", len(rows), target)
        again = await score(await asyncio.to_thread(rollout.select, rows), group_size)
        scores = await asyncio.to_thread(_replaced, scores, rows, again)
        if again.scored.any():
            target = int(_versions(again)[again.scored].max())
    return _without_mixed_groups(scores, group_size)


def _versions(scores: Scores) -> Tensor:
    assert scores.reward_versions is not None
    return scores.reward_versions


def _whole_groups(rows: Tensor, group_size: int) -> Tensor:
    return rows.view(-1, group_size).any(1).repeat_interleave(group_size)


def _replaced(scores: Scores, rows: Tensor, again: Scores) -> Scores:
    """Return `scores` with the rewards of `again` in these rows, and with their own values."""
    scored = scores.scored.index_copy(0, rows, scores.scored[rows] & again.scored)
    components = {name: old.index_copy(0, rows, again.components[name]) for name, old in scores.components.items()}
    return _masked(
        dataclasses.replace(
            scores,
            rewards=scores.rewards.index_copy(0, rows, again.rewards),
            reward_versions=_versions(scores).index_copy(0, rows, _versions(again)),
            components=components,
            failures=sorted({*scores.failures, *again.failures}),
            process=scores.process and again.process and scores.process.replaced(rows, again.process),
        ),
        scored,
    )


def _without_mixed_groups(scores: Scores, group_size: int) -> Scores:
    """Return `scores` with the rows masked that another version than the newest of their group has scored."""
    versions = torch.where(scores.scored, _versions(scores), -1)
    newest = versions.view(-1, group_size).amax(1).repeat_interleave(group_size)
    older = scores.scored & (versions != newest)
    if not older.any():
        return scores
    failure = f"the reward model's version changed more than {ROUNDS} times while the rows of a group were scored"
    return _masked(dataclasses.replace(scores, failures=sorted({*scores.failures, failure})), scores.scored & ~older)


def _masked(scores: Scores, scored: Tensor) -> Scores:
    return dataclasses.replace(scores, scored=scored, rewards=torch.where(scored, scores.rewards, 0.0))
