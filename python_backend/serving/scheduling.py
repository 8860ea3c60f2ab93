"""Chooses the rows of the next forward: the oldest row, and rows of similar length that are cheaper to run with it.

Pure bookkeeping: no torch, no Triton, no threads.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)
# Threads that run forwards hand the interpreter on this often (Python's own: 5 ms, in which the others stand still).
SWITCH_INTERVAL_S = 0.0005
PRESSING_FORWARDS = 4
LONG_REQUEST_SHARE = 4  # while others wait, one request gets at most one forward token in so many


@dataclass(frozen=True, order=True)
class _Row(Generic[Owner]):
    length: int
    number: int  # unique: no two rows compare equal
    owner: Owner = field(compare=False)
    index: int = field(compare=False)
    turn: int = field(compare=False)


class RowPool(Generic[Owner]):
    """Rows that wait for a forward.

    Order is first come, first served, in tokens: a row's turn is the number of tokens served when its request came,
    plus `LONG_REQUEST_SHARE` times those of the request's earlier rows. So requests of a few rows are served in order
    of arrival, none starves, and one of a thousand rows lets those that come after it pass between its forwards.
    """

    def __init__(self, *, token_budget: int, max_rows: int, overhead_tokens: int) -> None:
        """
        Args:
            token_budget: most tokens of one forward, padding included; a longer row is alone.
            max_rows: most rows of one forward.
            overhead_tokens: what a forward costs beyond its tokens, in tokens. A row joins a forward while the padding
                that this brings costs less than a forward of its own.
        """
        self._token_budget = token_budget
        self._max_rows = max_rows
        self._overhead_tokens = overhead_tokens
        self._by_length: list[_Row[Owner]] = []
        self._by_turn: list[tuple[int, int, _Row[Owner]]] = []
        self._taken: set[int] = set()
        self._numbers = count()
        self._served_tokens = 0
        self._of_owner: dict[Owner, int] = {}
        self.tokens = 0
        """Tokens that wait."""
        self.pressing_tokens = 0
        """Of these, no more than `PRESSING_FORWARDS` forwards' worth of each request: the rest lets others pass."""

    def __len__(self) -> int:
        return len(self._by_length)

    def add(self, owner: Owner, lengths: Sequence[int]) -> None:
        """Append a request's rows, given their lengths in tokens."""
        earlier = 0
        for index, length in enumerate(lengths):
            turn = self._served_tokens + LONG_REQUEST_SHARE * earlier
            row = _Row(length, next(self._numbers), owner, index, turn)
            insort(self._by_length, row)
            heapq.heappush(self._by_turn, (turn, row.number, row))
            earlier += length
        self._count(owner, earlier)

    def oldest(self) -> Owner | None:
        """The request whose row is next; None when nothing waits."""
        while self._by_turn and self._by_turn[0][1] in self._taken:
            self._taken.discard(heapq.heappop(self._by_turn)[1])
        return self._by_turn[0][2].owner if self._by_turn else None

    def take(self, may_join: Callable[[Owner], bool] = lambda owner: True) -> list[tuple[Owner, int]]:
        """Remove and return the rows of the next forward as `(owner, index)`, shortest first; [] when nothing waits.

        Args:
            may_join: whether rows of a request may run with the oldest row.
        """
        if self.oldest() is None:
            return []
        first = heapq.heappop(self._by_turn)[2]
        chosen, width = [first], first.length
        for row in self._nearest(first):
            if len(chosen) == self._max_rows:
                break
            if self._pays(len(chosen), width, row.length) and may_join(row.owner):
                chosen.append(row)
                width = max(width, row.length)
        self._remove(chosen)
        self._taken.discard(first.number)  # it has left both orders
        return [(row.owner, row.index) for row in sorted(chosen)]

    def discard(self, owner: Owner) -> None:
        """Forget all rows of a request."""
        gone = [row for row in self._by_length if row.owner is owner]
        self._remove(gone)
        self._served_tokens -= sum(row.length for row in gone)

    def _nearest(self, first: _Row[Owner]) -> list[_Row[Owner]]:
        """The rows about as long as `first`, the closest first."""
        position = bisect_left(self._by_length, first)
        below = self._by_length[max(0, position - self._max_rows) : position]
        above = self._by_length[position + 1 : position + 1 + self._max_rows]
        return sorted(below + above, key=lambda row: (abs(row.length - first.length), row.number))

    def _pays(self, rows: int, width: int, length: int) -> bool:
        """Whether a row of `length` had better join `rows` rows of a forward `width` wide than wait for another."""
        padding = width - length if length <= width else rows * (length - width)
        return (rows + 1) * max(width, length) <= self._token_budget and padding <= self._overhead_tokens

    def _remove(self, rows: Sequence[_Row[Owner]]) -> None:
        for row in rows:
            del self._by_length[bisect_left(self._by_length, row)]
            self._taken.add(row.number)
            self._count(row.owner, -row.length)
            self._served_tokens += row.length

    def _count(self, owner: Owner, tokens: int) -> None:
        """Note that so many tokens of a request came (or, negative, left)."""
        most = PRESSING_FORWARDS * self._token_budget
        before = self._of_owner.pop(owner, 0)
        after = before + tokens
        if after:
            self._of_owner[owner] = after
        self.tokens += tokens
        self.pressing_tokens += min(after, most) - min(before, most)
