"""Sends training requests in step order, including retries, because the journal refuses gaps."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class QueuedRequest:
    """Position of one training request in the queue, until its reply arrives."""

    sent_to: object = None
    """Server to which the first attempt is in flight; None: not sent yet, or delayed."""
    is_delayed: bool = False
    """True once the request has been sent or had to wait. From its next attempt on, later requests wait for its
    reply, because otherwise they might arrive first."""


class TrainingQueue:
    """Queue of the training requests that have no reply yet.

    A step may be sent while the previous one is still training. It must wait, however, if the previous request may not
    have arrived yet because it waits for a server, is being retried, or was sent to a server that was lost.
    """

    def __init__(self) -> None:
        self._line: list[QueuedRequest] = []
        self._changed = asyncio.Event()

    @contextmanager
    def join(self) -> Iterator[QueuedRequest]:
        """Append a request to the queue for the duration of the block."""
        queued = QueuedRequest()
        self._line.append(queued)
        try:
            yield queued
        finally:
            self._line.remove(queued)
            self._changed.set()  # wakes all waiting requests
            self._changed = asyncio.Event()

    async def wait_for(self, queued: QueuedRequest, server: Callable[[], object]) -> None:
        """Wait until the request of `queued` may be sent to the server that `server()` returns.

        A request that has not been delayed waits until all earlier ones have started their first attempt at that
        server; a delayed one waits until all earlier ones have their replies.
        """
        while not all(self._is_ahead(earlier, queued, server()) for earlier in self._line[: self._line.index(queued)]):
            queued.is_delayed = True
            await self._changed.wait()

    def is_first(self, queued: QueuedRequest) -> bool:
        """Return whether all earlier requests have their replies."""
        return self._line[0] is queued

    @contextmanager
    def in_flight(self, queued: QueuedRequest | None, server: object) -> Iterator[None]:
        """Mark an attempt as in flight to `server` within the block; do nothing if `queued` is None."""
        if queued is None:
            yield
            return
        queued.sent_to = None if queued.is_delayed else server
        queued.is_delayed = True
        try:
            yield
        finally:
            queued.sent_to = None

    def _is_ahead(self, earlier: QueuedRequest, queued: QueuedRequest, server: object) -> bool:
        return not queued.is_delayed and earlier.sent_to is not None and earlier.sent_to == server
