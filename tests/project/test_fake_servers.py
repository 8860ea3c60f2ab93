"""The fake servers leave no connection open when their event loop ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from fake_triton import FakeTriton


@pytest.mark.parametrize("turns", range(8))
def test_a_connection_of_the_last_moment_ends_with_its_server(turns: int) -> None:
    """After so many turns of the loop it is waiting, accepted, made, or read; `conftest` looks at what is left open."""

    async def play() -> socket.socket:
        async with FakeTriton() as server:
            client = socket.create_connection(server.url.split(":"))
            for _ in range(turns):
                await asyncio.sleep(0)
        return client

    with asyncio.run(asyncio.wait_for(play(), 60)) as client, contextlib.suppress(ConnectionResetError):
        assert client.recv(1) == b""
