"""Servers with scripted connections, for tests of `rlhf_triton.client.pool`."""

import asyncio

from rlhf_triton.client.errors import AttemptFailed, ErrorKind
from rlhf_triton.client.pool import ServerPool
from rlhf_triton.client.retry import RequestCounters
from rlhf_triton.config.client import ClientSettings

REFUSED = AttemptFailed(ErrorKind.UNREACHABLE, "cannot be reached", "Connection refused")
LOST = AttemptFailed(ErrorKind.LOST, "did not respond within 1 s")
DEAD = AttemptFailed(ErrorKind.DEAD, "refused", "Stub process is not healthy.")
UNLOADED = AttemptFailed(ErrorKind.UNLOADED, "refused", "Request for unknown model: 'm' has no available versions")
BUSY = AttemptFailed(ErrorKind.BUSY, "refused", "no room")


class Scripted:
    """A connection whose server can refuse connections, and whose models can be not ready."""

    def __init__(self, url):
        self.url = url
        self.refuses = self.closed = False
        self.not_ready = set()
        self.asked = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def get_ready(self, model):
        self.asked.append(model)
        await self.gate.wait()
        if self.refuses:
            raise REFUSED
        return f"{model} not ready" if model in self.not_ready else None

    async def close(self):
        self.closed = True


class Rig(ServerPool[Scripted]):
    """Servers with scripted connections and short back-off, and shortcuts for tests."""

    def __init__(self, *addresses, **settings):
        self.counters = RequestCounters()
        super().__init__(addresses or ("a:1", "b:1"), Scripted, ClientSettings(**settings), self.counters)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.close()
        assert len(asyncio.all_tasks()) == 1, "tasks are left besides the test"
        assert all(server.connection.closed for server in [*self.servers, *self._gone])

    def __getitem__(self, url):
        return next(server for server in self.servers if server.url == url)

    async def take(self, model="m", *, writes=False):
        """Send a request that is answered at once; return the URL of its server."""
        async with self.select(model, writes=writes, patient=True) as server:
            self.record_success(server, model)
            return server.url

    async def fail(self, url, failure, model="m"):
        """Report a failed request to this server; return whether that suspends the server."""
        return await self.record_failure(self[url], model, failure)

    async def lose_all(self):
        """Make all servers refuse connections."""
        await self.take()
        for server in self.servers:
            server.connection.refuses = True
            await self.record_failure(server, "m", REFUSED)
