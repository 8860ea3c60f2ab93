"""A weighted semaphore, which asyncio does not have: callers share an amount, first come, first served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Room:
    """An amount, of bytes or rows, that is in use at a time."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def reserved(self, amount: int) -> AsyncIterator[None]:
        """Hold a part of the room, as soon as it is free; all of it if `amount` is more."""
        amount = min(amount, self._size)
        async with self._turn:
            while self._free < amount:
                self._freed.clear()
                await self._freed.wait()
            self._free -= amount
        try:
            yield
        finally:
            self._free += amount
            self._freed.set()
