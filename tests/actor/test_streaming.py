"""`RowStream`: which rows share a request, and that a row is never held back for others."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from actor.data.prompts import PromptError
from actor.data.rollout import Prompt, Rollout, join_rollouts
from actor.scoring.metadata import check_prompts, row_metadata
from actor.scoring.scorer import Scorer
from actor.scoring.stream import RowStream
from python_backend.client.errors import RequestRefused
from python_backend.client.served import ServedModel

PATIENCE_S = 120.0


def one_row(index: int) -> Rollout:
    tokens, length = torch.full((1, index + 2), index), torch.tensor([index + 2])
    return Rollout(
        [Prompt(str(index), "", np.asarray([index]))], tokens, length, torch.tensor([1]), torch.tensor([True])
    )


class Asked:
    """Answers with the first tokens of the rows, and counts them by request."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.rows: list[list[int]] = []
        self.first = asyncio.Event()

    async def __call__(self, rows: Rollout) -> list[int]:
        self.sizes.append(len(rows.prompts))
        self.rows.append(rows.tokens[:, 0].tolist())
        self.first.set()
        return rows.tokens[:, 0].tolist()


def answers_of(order: list[int], *, rows_per_request: int, group_size: int = 1) -> tuple[list[int], list[int]]:
    """Sizes of the requests for rows that end at once, in `order`; and their answers by prompt."""

    async def play() -> tuple[list[int], list[int]]:
        asked = Asked()
        stream = RowStream(asked, rows_per_request=rows_per_request, group_size=group_size)
        for index in order:
            stream.take(index, one_row(index))
        await asyncio.wait_for(asked.first.wait(), PATIENCE_S)
        parts, by_prompt = await stream.answers()
        return asked.sizes, torch.tensor([answer for part in parts for answer in part])[by_prompt].tolist()

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("order", "rows_per_request", "group_size", "sizes"),
    [
        ([3, 0, 4, 1, 2], 8, 1, [5]),
        ([3, 0, 4, 1, 2], 2, 1, [2, 2, 1]),
        ([1, 0], 1, 1, [1, 1]),
        ([3, 0, 5, 2, 1, 4], 4, 2, [4, 2]),
        ([3, 0, 5, 2, 1, 4], 3, 2, [2, 2, 2]),
        ([3, 0, 5, 2, 1, 4], 1, 3, [3, 3]),
    ],
)
def test_rows_that_end_together_share_requests_and_a_group_is_in_one(
    order: list[int], rows_per_request: int, group_size: int, sizes: list[int]
):
    found = answers_of(order, rows_per_request=rows_per_request, group_size=group_size)
    assert found == (sizes, sorted(order))


async def test_a_row_that_ends_alone_waits_for_no_other():
    asked = Asked()
    stream = RowStream(asked, rows_per_request=8)
    stream.take(0, one_row(0))
    await asyncio.wait_for(asked.first.wait(), PATIENCE_S)  # though another is written still
    stream.take(1, one_row(1))
    await asyncio.sleep(0)  # the loop takes it in
    assert (await stream.answers())[0] == [[0], [1]]


async def test_a_row_waits_for_its_own_group_alone():
    asked = Asked()
    stream = RowStream(asked, rows_per_request=8, group_size=2)
    for index in (2, 1, 3):  # 0 is written still
        stream.take(index, one_row(index))
    await asyncio.wait_for(asked.first.wait(), PATIENCE_S)
    assert asked.rows == [[2, 3]]
    stream.take(0, one_row(0))
    await asyncio.sleep(0)
    assert (await stream.answers())[1].tolist() == [2, 3, 0, 1]
    assert asked.rows == [[2, 3], [0, 1]]


class Client:
    """Answers with zeros, and notes the group of each row by request."""

    def __init__(self) -> None:
        self.groups: list[list[int | None]] = []

    async def rewards(self, rows: list[np.ndarray], outputs: Any, metadata: list[dict[str, Any]]) -> Any:
        self.groups.append([each.get("group") for each in metadata])
        zeros = np.zeros((len(rows), 1), np.float32)
        return {"rewards": zeros, "reward_components": zeros, "reward_errors": np.full((len(rows), 1), b"", object)}


class Words:
    """A tokenizer that decodes."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return " ".join(map(str, tokens))


@pytest.mark.parametrize(
    ("groupwise", "group_size", "groups"),
    [(True, 2, [[0, 0], [1, 1], [2, 2]]), (True, 1, [[0, 1, 2], [3, 4, 5]]), (False, 2, [[None] * 3] * 2)],
)
def test_the_scorer_sends_the_group_of_each_row_and_splits_none(groupwise: bool, group_size: int, groups: Any):
    client = Client()
    scorer = Scorer(client, Words(), rows_per_request=3, with_critic=False)  # type: ignore[arg-type]
    scorer.reward = ServedModel(components=("a",), groupwise=groupwise)
    scores = asyncio.run(scorer.score(join_rollouts([one_row(i) for i in range(6)], pad_id=0), group_size))
    assert sorted(client.groups) == groups  # the requests' rows are prepared in threads
    assert scores.scored.all()


@pytest.mark.parametrize(
    ("groupwise", "group_size", "refused"), [(False, 1, [3]), (True, 2, [2, 3])], ids=["rows", "groups"]
)
def test_a_row_that_the_server_refuses_costs_only_itself_or_its_group(
    groupwise: bool, group_size: int, refused: list[int]
):
    class Picky(Client):
        async def rewards(self, rows: list[np.ndarray], outputs: Any, metadata: list[dict[str, Any]]) -> Any:
            if any(row[0] == 3 for row in rows):
                raise RequestRefused("refused", "sentences[3]: 200 tokens, must be at most 128")
            return await super().rewards(rows, outputs, metadata)

    scorer = Scorer(Picky(), Words(), rows_per_request=8, with_critic=False)  # type: ignore[arg-type]
    scorer.reward = ServedModel(components=("a",), groupwise=groupwise)
    scores = asyncio.run(scorer.score(join_rollouts([one_row(i) for i in range(8)], pad_id=0), group_size))
    assert (~scores.scored).nonzero()[:, 0].tolist() == refused
    assert scores.failures == ["refused"]


def test_a_column_named_group_is_refused_only_where_it_would_be_replaced():
    prompt = Prompt("1", "a", np.asarray([1]), {"group": "mine"})
    check_prompts(ServedModel(components=("a",)), [prompt])
    assert row_metadata(ServedModel(components=("a",)), prompt, "b", 3)["group"] == "mine"
    with pytest.raises(PromptError, match="prompt 1 has a column 'group'"):
        check_prompts(ServedModel(components=("a",), groupwise=True), [prompt])
