"""`RowStream`: which rows share a request, and that a row is never held back for others."""

from __future__ import annotations

import asyncio

import numpy as np
import torch

from actor.data.rollout import Prompt, Rollout
from actor.scoring.stream import RowStream

PATIENCE_S = 30.0


def one_row(index: int) -> Rollout:
    tokens, length = torch.full((1, index + 2), index), torch.tensor([index + 2])
    return Rollout(
        [Prompt(str(index), "", np.asarray([index]))], tokens, length, torch.tensor([1]), torch.tensor([True])
    )


class Asked:
    """Answers with the first tokens of the rows, and counts them by request."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.first = asyncio.Event()

    async def __call__(self, rows: Rollout) -> list[int]:
        self.sizes.append(len(rows.prompts))
        self.first.set()
        return rows.tokens[:, 0].tolist()


def answers_of(order: list[int], *, rows_per_request: int) -> tuple[list[int], list[int]]:
    """Sizes of the requests for rows that end at once, in `order`; and their answers by prompt."""

    async def play() -> tuple[list[int], list[int]]:
        asked = Asked()
        stream = RowStream(asked, rows_per_request=rows_per_request)
        for index in order:
            stream.take(index, one_row(index))
        await asyncio.wait_for(asked.first.wait(), PATIENCE_S)
        parts, by_prompt = await stream.answers()
        return asked.sizes, torch.tensor([answer for part in parts for answer in part])[by_prompt].tolist()

    return asyncio.run(play())


def test_rows_that_end_together_share_requests():
    assert answers_of([3, 0, 4, 1, 2], rows_per_request=8) == ([5], [0, 1, 2, 3, 4])
    assert answers_of([3, 0, 4, 1, 2], rows_per_request=2) == ([2, 2, 1], [0, 1, 2, 3, 4])
    assert answers_of([1, 0], rows_per_request=1) == ([1, 1], [0, 1])


def test_a_row_that_ends_alone_waits_for_no_other():
    async def play() -> None:
        asked = Asked()
        stream = RowStream(asked, rows_per_request=8)
        stream.take(0, one_row(0))
        await asyncio.wait_for(asked.first.wait(), PATIENCE_S)  # though another is written still
        stream.take(1, one_row(1))
        await asyncio.sleep(0)  # the loop takes it in
        assert (await stream.answers())[0] == [[0], [1]]

    asyncio.run(play())
