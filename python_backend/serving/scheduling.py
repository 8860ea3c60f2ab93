"""Selects the rows of the next forward pass: the oldest row, and rows of similar length that are cheaper to add than to
run alone.

Needs neither torch nor Triton.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)
# For sys.setswitchinterval. With Python's default of 5 ms, a thread that runs forward passes holds the GIL so long that
# the threads that read and answer requests stall.
SWITCH_INTERVAL_S = 0.0005
# A request counts towards backpressure with at most this many forward passes, so that one huge request does not keep
# others out of the pool.
PRESSING_FORWARDS = 4
LONG_REQUEST_SHARE = 4  # while other requests wait, a long request gets at most 1/4 of the tokens


@dataclass(frozen=True, order=True)
class _Row(Generic[Owner]):
    length: int
    number: int  # unique and ascending, so that rows are totally ordered by (length, number)
    owner: Owner = field(compare=False)
    index: int = field(compare=False)


class RowPool(Generic[Owner]):
    """Rows that wait for a forward pass, in the order of start-time fair queueing.

    The row with the earliest virtual start time runs next: the number of tokens served before its request arrived, plus
    `LONG_REQUEST_SHARE` times the tokens of the request's earlier rows. Small requests thus run in order of arrival, no
    request starves, and later requests overtake a request of a thousand rows between its forward passes.
    """

    def __init__(self, *, token_budget: int, overhead_tokens: int) -> None:
        """
        Args:
            token_budget: maximum tokens of one forward pass, padding included; a longer row runs alone.
            overhead_tokens: fixed cost of a forward pass, in tokens. A row joins a forward pass if it adds at most this
                much padding, because a separate pass would cost more.
        """
        self._token_budget = token_budget
        self._overhead_tokens = overhead_tokens
        self._by_length: list[_Row[Owner]] = []
        self._by_turn: list[tuple[int, int, _Row[Owner]]] = []
        self._removed: set[int] = set()  # numbers of removed rows that are still in the heap; `oldest` drops them
        self._numbers = count()
        self._served_tokens = 0
        self._of_owner: dict[Owner, int] = {}
        self.tokens = 0
        """Tokens waiting."""
        self.pressing_tokens = 0
        """Tokens waiting, counting at most `PRESSING_FORWARDS * token_budget` of each request."""

    def __len__(self) -> int:
        return len(self._by_length)

    def add(self, owner: Owner, lengths: Sequence[int]) -> None:
        """Add a request's rows, given their lengths in tokens."""
        earlier = 0
        for index, length in enumerate(lengths):
            turn = self._served_tokens + LONG_REQUEST_SHARE * earlier
            row = _Row(length, next(self._numbers), owner, index)
            insort(self._by_length, row)
            heapq.heappush(self._by_turn, (turn, row.number, row))
            earlier += length
        self._count(owner, earlier)

    def oldest(self) -> Owner | None:
        """Return the request that owns the next row; None if no row is waiting."""
        while self._by_turn and self._by_turn[0][1] in self._removed:
            self._removed.discard(heapq.heappop(self._by_turn)[1])
        return self._by_turn[0][2].owner if self._by_turn else None

    def take(self, may_join: Callable[[Owner], bool] = lambda owner: True) -> list[tuple[Owner, int]]:
        """Remove and return the rows of the next forward pass as `(owner, index)`, shortest first; [] if none.

        Args:
            may_join: whether rows of the given request may run together with the oldest row.
        """
        if self.oldest() is None:
            return []
        first = heapq.heappop(self._by_turn)[2]
        chosen = [first, *self._batch_with(first, may_join)]
        self._remove(chosen)
        self._removed.discard(first.number)  # `oldest` will not meet it in the heap again
        self.oldest()  # drops the removed rows from the heap: their owners keep a weights version alive
        return [(row.owner, row.index) for row in sorted(chosen)]

    def discard(self, owner: Owner) -> None:
        """Drop all waiting rows of a request."""
        gone = [row for row in self._by_length if row.owner is owner]
        self._remove(gone)
        # `_remove` counted them as served, but they were not: later requests would get a turn that is too late.
        self._served_tokens -= sum(row.length for row in gone)

    def _batch_with(self, first: _Row[Owner], may_join: Callable[[Owner], bool]) -> list[_Row[Owner]]:
        """Return the rows to run together with `first`: rows of similar length."""
        chosen: list[_Row[Owner]] = []
        width = first.length
        for row in self._nearest(first):
            if self._saves_time(1 + len(chosen), width, row.length) and may_join(row.owner):
                chosen.append(row)
                width = max(width, row.length)
        return chosen

    def _nearest(self, first: _Row[Owner]) -> list[_Row[Owner]]:
        """Return the rows closest to `first` in length, closest first: as many as could join it on either side."""
        position = bisect_left(self._by_length, first)
        most = self._token_budget // first.length
        below = self._by_length[max(0, position - most) : position]
        above = self._by_length[position + 1 : position + 1 + most]
        return sorted(below + above, key=lambda row: (abs(row.length - first.length), row.number))

    def _saves_time(self, rows: int, width: int, length: int) -> bool:
        """Return whether a row fits into a forward pass of `rows` x `width` tokens and is cheaper there than alone."""
        padding = width - length if length <= width else rows * (length - width)
        return (rows + 1) * max(width, length) <= self._token_budget and padding <= self._overhead_tokens

    def _remove(self, rows: Sequence[_Row[Owner]]) -> None:
        for row in rows:
            del self._by_length[bisect_left(self._by_length, row)]
            self._removed.add(row.number)
            self._count(row.owner, -row.length)
            self._served_tokens += row.length

    def _count(self, owner: Owner, tokens: int) -> None:
        """Update the token counts when a request adds `tokens` (negative: removes)."""
        most = PRESSING_FORWARDS * self._token_budget
        before = self._of_owner.pop(owner, 0)
        after = before + tokens
        if after:
            self._of_owner[owner] = after
        self.tokens += tokens
        self.pressing_tokens += min(after, most) - min(before, most)
