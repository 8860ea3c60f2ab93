"""`actor.scoring.pool` and names: looked up again when a server is lost; connections to removed servers are closed."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from scripted_servers import REFUSED, Rig, Scripted, scene, until

from actor.scoring.retry import RequestFailed


class Names:
    """A name service that tests change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
        self.hosts: tuple[str, ...] = hosts
        monkeypatch.setattr("python_backend.config.addresses.socket.getaddrinfo", self._look_up)

    def _look_up(self, name: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        if not self.hosts:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in self.hosts]


def test_a_name_is_looked_up_again_when_one_of_its_servers_is_lost(monkeypatch: pytest.MonkeyPatch):
    names = Names(monkeypatch, "10.0.0.1", "10.0.0.2")

    async def play() -> None:
        async with Rig("dns:critic.svc:8000") as servers:
            assert {await servers.take() for _ in range(4)} == {"10.0.0.1:8000", "10.0.0.2:8000"}
            names.hosts = ("10.0.0.2", "10.0.0.3")
            lost = servers["10.0.0.1:8000"]
            lost.connection.refuses = True
            await servers.fail(lost.url, REFUSED)
            await until(lambda: lost not in servers.servers)
            assert {await servers.take() for _ in range(4)} == {"10.0.0.2:8000", "10.0.0.3:8000"}
            names.hosts = ()
            servers["10.0.0.2:8000"].connection.refuses = True
            await servers.fail("10.0.0.2:8000", REFUSED)
            asked = len(servers["10.0.0.2:8000"].connection.asked)
            await until(lambda: len(servers["10.0.0.2:8000"].connection.asked) > asked)
            assert len(servers.servers) == 2, "an unavailable name service removes no server"

    scene(play)


def test_servers_that_are_replaced_one_after_the_other_leave_no_connection_open(monkeypatch: pytest.MonkeyPatch):
    names = Names(monkeypatch, "10.0.0.0")
    opened: list[Scripted] = []

    def connect(url: str) -> Scripted:
        opened.append(Scripted(url))
        return opened[-1]

    async def play() -> None:
        async with Rig("dns:critic.svc:8000") as servers:
            servers._connect = connect
            for i in range(1, 20):
                async with servers.one("m", writes=False, patient=True) as lost:  # in flight while its pod goes
                    names.hosts = (f"10.0.0.{i}",)
                    lost.connection.refuses = True
                    await servers.failed(lost, "m", REFUSED)
                    await until(lambda lost=lost: lost not in servers.servers)
                    assert not lost.connection.closed
                assert lost.connection.closed
            assert [connection.url for connection in opened if not connection.closed] == ["10.0.0.19:8000"]
            assert await servers.take(writes=True) == "10.0.0.19:8000"
            assert servers._gone == []

    scene(play)


def test_a_name_that_nobody_knows_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch):
    Names(monkeypatch)

    async def play() -> None:
        async with Rig("dns:critic.svc:8000") as servers:
            with pytest.raises(
                RequestFailed, match=r"actor\.client\.servers: 'dns:critic\.svc:8000' cannot be resolved"
            ):
                await servers.take()

    scene(play)


def test_an_address_that_is_named_twice_is_one_server():
    async def play() -> None:
        async with Rig("a:1", "b:1", "a:1") as servers:
            await asyncio.gather(*(servers.take() for _ in range(10)))
            assert [server.url for server in servers.servers] == ["a:1", "b:1"]

    scene(play)
