"""Process rewards as the server replies with them, placed on the policy's tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from actor.data.rollout import ProcessRewards, joined
from python_backend.wire.contract import STEP_ENDS, STEP_REWARDS

BLOCK = 32  # tokens decoded at once


def ends_on_tokens(
    answer: Mapping[str, np.ndarray],
    tokenizer: Any,
    rows: Sequence[np.ndarray],
    starts: Sequence[int],
    firsts: Sequence[int],
) -> dict[str, np.ndarray]:
    """Return the response to sentences with `step_ends` as indices of the tokens that contain them.

    Args:
        rows: token rows int64 `[length_i]` that the sentences were decoded from.
        starts: index of the first token of each sentence in its row.
        firsts: index of the first response token of each row.
    """
    ends = answer[STEP_ENDS].copy()
    for i, (row, start, first) in enumerate(zip(rows, starts, firsts, strict=True)):
        counts = tokens_with(ends[i].clip(0).tolist(), tokenizer, row[start:].tolist())
        # At the end of the response, the tokens that are no text belong to the step.
        last = [row.size - 1 if count is None else max(first, start + count - 1) for count in counts]
        ends[i] = np.where(ends[i] >= 0, last, ends[i])
    return {**answer, STEP_ENDS: ends}


def tokens_with(ends: Sequence[int], tokenizer: Any, ids: Sequence[int]) -> list[int | None]:
    """Return for each number of characters the smallest number of tokens with at least as many; None if it takes all.

    Decodes each block of tokens after the block before it, as the text of a token depends on those beside it.
    """

    def characters(block: int, last: int) -> int:
        return len(tokenizer.decode(ids[max(0, block - 1) * BLOCK : last], skip_special_tokens=True))

    def least(end: int) -> int:
        block = max(0, bisect_left(reached, end) - 1)
        span = range(min((block + 1) * BLOCK, len(ids)))
        return bisect_left(span, end, lo=block * BLOCK, key=lambda n: before[block] + characters(block, n))

    before, reached = [0], [0]  # characters before each block's context, and before each block
    for block in range(-(-len(ids) // BLOCK)):
        stop = min((block + 1) * BLOCK, len(ids))
        reached.append(before[block] + characters(block, stop))
        before.append(reached[-1] - characters(block + 1, stop))
    return [None if end >= reached[-1] else least(end) for end in ends]


def empty(rows: int, width: int) -> ProcessRewards:
    """Return rewards of `rows` responses of `width` tokens, all without steps."""
    return ProcessRewards(torch.zeros(rows, width), torch.zeros(rows, width, dtype=torch.bool), torch.zeros(rows))


def place(rewards: ProcessRewards, chunk: slice, answer: Mapping[str, np.ndarray], weight: float) -> None:
    """Write the process rewards of a response's rows to the rows `chunk` of `rewards`, times `weight`."""
    found, ends = torch.tensor(answer[STEP_REWARDS]), torch.tensor(answer[STEP_ENDS])
    row, step = (ends >= 0).nonzero(as_tuple=True)
    index = (row + chunk.start, ends[row, step])
    rewards.rewards.index_put_(index, weight * found[row, step], accumulate=True)  # a token may end two steps
    rewards.ends[index] = True


def join(parts: Sequence[ProcessRewards], width: int) -> ProcessRewards:
    """Concatenate rewards of several rollouts, padded to `width` tokens."""
    return ProcessRewards(
        joined([part.rewards for part in parts], width),
        joined([part.ends for part in parts], width),
        torch.cat([part.outcome for part in parts]),
    )
