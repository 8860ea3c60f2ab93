"""Keeps training requests in the order of their steps, retries included: the journal refuses a gap."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class Turn:
    """One training request, until it is answered."""

    sent_to: str | None = None
    """The server that its first attempt is under way at; None: not sent yet, or held up."""
    held_up: bool = False
    """It was sent before, or had to wait: those behind it would be sent in the same moment, and might arrive first."""


class Turns:
    """The line of training requests that are not answered yet.

    A step may be sent while the one before it is being trained. But where that one may not have arrived, because it
    waits for a server, is being repeated, or was sent to a server that is lost, the next would come too early.
    """

    def __init__(self) -> None:
        self._line: list[Turn] = []
        self._changed = asyncio.Event()

    @contextmanager
    def join(self) -> Iterator[Turn]:
        """A place at the end of the line."""
        turn = Turn()
        self._line.append(turn)
        try:
            yield turn
        finally:
            self._line.remove(turn)
            self._change()

    async def come(self, turn: Turn, server: Callable[[], str | None]) -> None:
        """Wait until it may be sent to `server()`: those before it are on their way there; or answered, if held up."""
        while not all(self._is_ahead(earlier, turn, server()) for earlier in self._line[: self._line.index(turn)]):
            turn.held_up = True
            await self._changed.wait()

    @contextmanager
    def under_way(self, turn: Turn | None, server: str) -> Iterator[None]:
        """An attempt."""
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

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
