"""Maps the ends of steps, which the server gives in characters of a text, to the policy's tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

BLOCK = 32  # tokens decoded at once


def tokens_covering(ends: Sequence[int], tokenizer: Any, ids: Sequence[int]) -> list[int | None]:
    """Return, for each number of characters, how many of the tokens `ids` it takes to reach it; None if it takes all.

    Each block of tokens is decoded together with the block before it, because a token's text depends on its neighbours.
    """

    def characters(block: int, last: int) -> int:
        return len(tokenizer.decode(ids[max(0, block - 1) * BLOCK : last], skip_special_tokens=False))

    def least(end: int) -> int:
        block = max(0, bisect_left(reached, end) - 1)
        span = range(min((block + 1) * BLOCK, len(ids)))
        return bisect_left(span, end, lo=block * BLOCK, key=lambda n: before[block] + characters(block, n))

    # characters before each block's context, and before each block
    before = [0]
    reached = [0]
    for block in range(-(-len(ids) // BLOCK)):
        stop = min((block + 1) * BLOCK, len(ids))
        reached.append(before[block] + characters(block, stop))
        before.append(reached[-1] - characters(block + 1, stop))
    return [None if end >= reached[-1] else least(end) for end in ends]
