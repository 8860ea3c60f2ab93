"""Requests of several rows: rows that come at about the same time share one, and one that is refused is halved."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from rlhf_triton.client.errors import RequestFailed, RequestRefused

T = TypeVar("T")
R = TypeVar("R")
F = TypeVar("F")


class Gathering(Generic[T, R]):
    """Gathers rows for a request, which is sent as soon as it is full, or a moment after its first row."""

    def __init__(self, send: Callable[[list[T]], Awaitable[R]], *, gather_s: float, max_rows: int) -> None:
        self._send = send
        self._gather_s = gather_s
        self._max_rows = max_rows
        self._rows: list[T] = []  # of the request that is open
        self._is_full = asyncio.Event()
        self._request: asyncio.Task[R]

    def add(self, rows: Sequence[T]) -> tuple[asyncio.Task[R], int]:
        """Return the request that these rows are sent in, all of them, and the index of the first one in it."""
        if len(self._rows) + len(rows) > self._max_rows:
            self.flush()
        index = len(self._rows)
        self._rows += rows
        if index == 0:
            self._request = asyncio.create_task(self._sent(self._rows, self._is_full))
            asyncio.get_running_loop().call_later(self._gather_s, self._is_full.set)
        if len(self._rows) >= self._max_rows:
            self.flush()
        return self._request, index

    def flush(self) -> None:
        """Send the open request, if there is one."""
        self._is_full.set()
        self._rows, self._is_full = [], asyncio.Event()

    async def _sent(self, rows: list[T], is_full: asyncio.Event) -> R:
        await is_full.wait()
        if rows is self._rows:
            self.flush()
        return await self._send(rows)


async def halved(
    rows: Sequence[T],
    ask: Callable[[Sequence[T]], Awaitable[R]],
    failure: Callable[[RequestFailed], F],
    *,
    unit: int = 1,
) -> list[tuple[Sequence[T], R | F]]:
    """Send one request; if the server refuses it, send its halves, until only the refused rows have no answer.

    So one row that it refuses, such as a text that is too long for its template, does not cost the others.

    Args:
        rows: of the request.
        ask: sends a request.
        failure: stands for the answer to a request that failed.
        unit: number of consecutive rows that only make sense together.

    Returns: rows and answer of each request, in the order of the rows.
    """
    try:
        return [(rows, await ask(rows))]
    except RequestFailed as error:
        failed, is_refused = failure(error), isinstance(error, RequestRefused)
    num_units = len(rows) // unit  # not within `except`, where the error would keep the encoded request in memory
    if num_units < 2 or not is_refused:
        return [(rows, failed)]
    middle = num_units // 2 * unit
    parts = await asyncio.gather(*(halved(half, ask, failure, unit=unit) for half in (rows[:middle], rows[middle:])))
    return [*parts[0], *parts[1]]
