"""`actor.scoring.agreement`: whatever versions a live reward model serves meanwhile, no group of rows mixes two."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from actor.data.rollout import ProcessRewards, Prompt, Rollout, Scores
from actor.scoring.agreement import ROUNDS, with_one_version

GROUP = 2


def rollout(count: int) -> Rollout:
    prompts = [Prompt(str(i // GROUP), "", np.asarray([i])) for i in range(count)]
    tokens = torch.arange(count)[:, None].expand(-1, 3).contiguous()
    return Rollout(prompts, tokens, torch.full((count,), 3), torch.ones(count).long(), torch.ones(count).bool())


class Server:
    """Scores row i of version v as 100 v + i; each request is answered by the next of `versions`, None fails."""

    def __init__(self, versions: Sequence[int | None]) -> None:
        self.versions = list(versions)
        self.asked: list[list[int]] = []

    def scores(self, rows: Rollout, versions: Sequence[int | None]) -> Scores:
        index = rows.tokens[:, 0].float()
        known = torch.tensor([-1 if version is None else version for version in versions])
        scored = known >= 0
        rewards = torch.where(scored, 100 * known + index, 0.0)
        return Scores(
            rewards,
            torch.full((len(index), 3), 7.0),
            torch.full((len(index),), 5),
            scored,
            [] if scored.all() else ["503"],
            {"model": rewards.clone()},
            known,
            ProcessRewards(rewards[:, None] * torch.eye(3)[2], torch.eye(3).bool()[2].repeat(len(index), 1), rewards),
        )

    async def __call__(self, rows: Rollout, group_size: int) -> Scores:
        assert group_size == GROUP
        self.asked.append(rows.tokens[:, 0].tolist())
        version = self.versions.pop(0)
        return self.scores(rows, [version] * len(rows.prompts))


def agreed(first: Sequence[int | None], later: Sequence[int | None]) -> tuple[Server, Scores]:
    server, rows = Server(later), rollout(len(first))
    scores = asyncio.run(with_one_version(server, rows, server.scores(rows, first), group_size=GROUP))
    assert scores.reward_versions is not None
    for group in range(0, len(first), GROUP):
        versions = {int(scores.reward_versions[i]) for i in range(group, group + GROUP) if scores.scored[i]}
        assert len(versions) <= 1, "a group mixes versions"
    index = torch.arange(len(first))
    expected = torch.where(scores.scored, 100 * scores.reward_versions + index, 0.0)
    assert torch.equal(scores.rewards, expected), "a reward belongs to its version and row"
    assert torch.equal(scores.components["model"][scores.scored], scores.rewards[scores.scored])
    assert scores.process is not None
    for of_process in (scores.process.rewards.sum(1), scores.process.outcome):
        assert torch.equal(of_process[scores.scored], scores.rewards[scores.scored]), "token rewards of another version"
    assert (scores.values == 7).all()
    return server, scores


@pytest.mark.parametrize(
    ("first", "later", "asked", "versions"),
    [  # of the rows; of the further requests, and their rows; of the rows in the end: None for a row without a score
        pytest.param([1, 1, 1, 1], [], [], [1, 1, 1, 1], id="one version is left alone"),
        pytest.param([1, 2, 2, 2, 1, 1], [2], [[0, 1, 4, 5]], [2] * 6, id="whole groups of older rows again"),
        pytest.param([1, 2, 2, 2], [3, 3], [[0, 1], [2, 3]], [3] * 4, id="a swap meanwhile is followed"),
        pytest.param([2, 1, 1, 1], [1], [[0, 1, 2, 3]], [1] * 4, id="a version rolled back is no target"),
        pytest.param([1, 2, 2, 2], [None], [[0, 1]], [None, None, 2, 2], id="not scored again: masked"),
        pytest.param([None, 2, 2, 2], [], [], [None, 2, 2, 2], id="an unavailable row does not count"),
    ],
)
def test_rows_of_an_older_version_are_scored_again(first: Any, later: Any, asked: Any, versions: Any):
    server, scores = agreed(first, later)
    assert server.asked == asked
    assert scores.scored.tolist() == [version is not None for version in versions]
    assert scores.reward_versions is not None
    assert scores.reward_versions[scores.scored].tolist() == [version for version in versions if version is not None]
    assert scores.failures == ["503"] * (None in versions)


def test_servers_that_never_agree_end_after_a_few_rounds():
    class Two(Server):
        async def __call__(self, rows: Rollout, group_size: int) -> Scores:
            self.asked.append([])
            return self.scores(rows, [1 + i % 2 for i in range(len(rows.prompts))])

    server, rows = Two([]), rollout(4)
    scores = asyncio.run(with_one_version(server, rows, server.scores(rows, [1, 2, 1, 2]), group_size=GROUP))
    assert len(server.asked) == ROUNDS
    assert scores.scored.tolist() == [False, True, False, True]
    assert "changed more than" in scores.failures[0]


@pytest.mark.parametrize("seed", range(20))
def test_no_history_of_swaps_mixes_a_group(seed: int):
    rng = np.random.default_rng(seed)
    first = [None if rng.random() < 0.1 else int(version) for version in np.sort(rng.integers(1, 4, 8))]
    later = [None if rng.random() < 0.1 else int(rng.integers(1, 6)) for _ in range(ROUNDS)]
    agreed(first, later)


def test_a_step_without_any_reward_has_no_version() -> None:
    assert Server([]).scores(rollout(2), [None, None]).reward_version is None
    assert Server([]).scores(rollout(2), [None, 0]).reward_version == 0
