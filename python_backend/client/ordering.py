"""Sends training requests in step order, including retries, because the journal refuses gaps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class Turn:
    """Position of one training request in the queue, until its response arrives."""

    sent_to: str | None = None
    """Server of the first attempt while it is in flight; None: not sent yet, or held up."""
    held_up: bool = False
    """True once the request has been sent or had to wait. From its next attempt on, later requests wait for its
    response: if they were sent at the same moment, they might arrive first."""


class Turns:
    """Queue of training requests without a response.

    A step may be sent while the previous one is still training. It must wait, however, if the previous request may not
    have arrived yet because it waits for a server, is being retried, or was sent to a server that was lost.
    """

    def __init__(self) -> None:
        self._line: list[Turn] = []
        self._changed = asyncio.Event()

    @contextmanager
    def join(self) -> Iterator[Turn]:
        """Add a request at the end of the queue for the duration of the block."""
        turn = Turn()
        self._line.append(turn)
        try:
            yield turn
        finally:
            self._line.remove(turn)
            self._changed.set()  # wakes all that wait
            self._changed = asyncio.Event()

    async def come(self, turn: Turn, server: Callable[[], str | None]) -> None:
        """Wait until the request of `turn` may be sent to the server that `server()` returns.

        A request that was not delayed waits until every earlier one has begun its first attempt at that server; a
        delayed one waits until every earlier one has its response.
        """
        while not all(self._is_ahead(earlier, turn, server()) for earlier in self._line[: self._line.index(turn)]):
            turn.held_up = True
            await self._changed.wait()

    def is_first(self, turn: Turn) -> bool:
        """Return whether every earlier request has its response."""
        return self._line[0] is turn

    @contextmanager
    def under_way(self, turn: Turn | None, server: str) -> Iterator[None]:
        """Mark an attempt as in flight to `server` within the block; do nothing if `turn` is None."""
        if turn is None:
            yield
            return
        turn.sent_to, turn.held_up = None if turn.held_up else server, True
        try:
            yield
        finally:
            turn.sent_to = None

    def _is_ahead(self, earlier: Turn, turn: Turn, server: str | None) -> bool:
        return not turn.held_up and earlier.sent_to is not None and earlier.sent_to == server
