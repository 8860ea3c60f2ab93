"""An HTTP server on loopback that leaves no connection behind, the base of the fake servers."""

import asyncio
import socket

from aiohttp import web


class FakeServer:
    """A fake server on a free port of loopback, which it keeps over restarts; an async context manager.

    It accepts connections itself: asyncio loses one that it accepts in the turn of the loop in which the server is
    closed, and aiohttp's `cleanup` leaves those open that it does not know yet, or waits for their clients.
    """

    def __init__(self, routes):
        self._routes = routes
        self._port = 0
        self._is_stopped = True

    @property
    def url(self):
        """`host:port`."""
        return f"127.0.0.1:{self._port}"

    async def __aenter__(self):
        await self.start()
        return self

    async def __aexit__(self, *_):
        await self.stop()

    async def start(self):
        """Listen, after a stop on the same port as before."""
        self._is_stopped = False
        app = web.Application()
        app.add_routes(self._routes)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)  # a restart finds none at work
        await self._runner.setup()
        self._accepted = []
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._listener.setblocking(False)
        self._port = self._listener.getsockname()[1]
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self):
        loop = asyncio.get_running_loop()
        connection = self._listener.accept()[0]
        connection.setblocking(False)
        self._accepted.append(loop.create_task(loop.connect_accepted_socket(self._runner.server, connection)))

    async def stop(self):
        """Refuse new connections, and abort the open ones; does nothing after the first call."""
        if self._is_stopped:
            return
        self._is_stopped = True
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self._abort()
        await asyncio.gather(*self._accepted)
        self._abort()
        await asyncio.sleep(0)  # the aborted ones end
        await self._runner.cleanup()

    def _abort(self):
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
