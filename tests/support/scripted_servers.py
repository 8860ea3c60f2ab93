"""Servers whose connections are scripted, for tests of `actor.servers`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from actor.scoring.pool import Server, ServerPool
from actor.scoring.retry import Kind, RequestCounters, Trouble
from python_backend.config import ClientSection

REFUSED = Trouble(Kind.UNREACHABLE, "cannot be reached", "Connection refused")
LOST = Trouble(Kind.LOST, "gave no answer within 1 s")
DEAD = Trouble(Kind.DEAD, "refused", "Stub process is not healthy.")
BUSY = Trouble(Kind.BUSY, "refused", "no room")


class Scripted:
    """A connection whose server is there or not, and has models that are ready or not."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.refuses = self.closed = False
        self.not_ready: set[str] = set()
        self.asked: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def is_ready(self, model: str) -> bool:
        self.asked.append(model)
        await self.gate.wait()
        if self.refuses:
            raise REFUSED
        return model not in self.not_ready

    async def close(self) -> None:
        self.closed = True


class Rig(ServerPool[Scripted]):
    """Servers with short pauses, and what tests ask of them."""

    def __init__(self, *addresses: str, **settings: Any) -> None:
        self.counters = RequestCounters()
        section = ClientSection(backoff_s=0.001, **settings)
        super().__init__(addresses or ("a:1", "b:1"), Scripted, section, self.counters)

    async def __aenter__(self) -> Rig:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
        assert len(asyncio.all_tasks()) == 1, "nothing is left but the test"
        assert all(server.connection.closed for server in [*self.servers, *self._gone])

    def __getitem__(self, url: str) -> Server[Scripted]:
        return next(server for server in self.servers if server.url == url)

    async def take(self, model: str = "m", *, writes: bool = False, patient: bool = True) -> str:
        """Where a request goes that is answered at once."""
        async with self.one(model, writes=writes, patient=patient) as server:
            self.answered(server, model)
            return server.url

    async def fail(self, url: str, trouble: Trouble, model: str = "m") -> bool:
        """A request to this server fails."""
        return await self.failed(self[url], model, trouble)

    async def lose_all(self) -> None:
        """Nobody listens any more."""
        await self.take()
        for server in self.servers:
            server.connection.refuses = True
            await self.failed(server, "m", REFUSED)


def scene(play: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(play())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)
