"""`python_backend.client.pool` and names: servers that join and leave, and connections that are closed."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import pytest
from scripted_servers import LOST, REFUSED, Rig, Scripted, until

from python_backend.client.errors import RequestFailed


class Names:
    """A name service that tests change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
        self.hosts: tuple[str, ...] = hosts
        self.asked = 0
        monkeypatch.setattr("python_backend.config.addresses.socket.getaddrinfo", self._look_up)

    def _look_up(self, name: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        self.asked += 1
        if not self.hosts:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in self.hosts]


async def test_a_name_is_looked_up_again_when_one_of_its_servers_is_lost(monkeypatch: pytest.MonkeyPatch):
    names = Names(monkeypatch, "10.0.0.1", "10.0.0.2")

    async with Rig("dns:critic.svc:8000") as servers:
        assert {await servers.take() for _ in range(4)} == {"10.0.0.1:8000", "10.0.0.2:8000"}
        names.hosts = ("10.0.0.2", "10.0.0.3")
        lost = servers["10.0.0.1:8000"]
        lost.connection.refuses = True
        await servers.fail(lost.url, REFUSED)
        await until(lambda: lost not in servers.servers and not any(s.down for s in servers.servers))
        assert {await servers.take() for _ in range(4)} == {"10.0.0.2:8000", "10.0.0.3:8000"}
        names.hosts = ()
        servers["10.0.0.2:8000"].connection.refuses = True
        await servers.fail("10.0.0.2:8000", REFUSED)
        asked = len(servers["10.0.0.2:8000"].connection.asked)
        await until(lambda: len(servers["10.0.0.2:8000"].connection.asked) > asked)
        assert len(servers.servers) == 2, "an unavailable name service removes no server"


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are resolved again every millisecond."""
    monkeypatch.setattr("python_backend.client.pool.RESOLVE_EVERY_S", 0.001)


@pytest.mark.usefixtures("often")
async def test_a_server_that_joins_gets_requests_once_its_models_are_ready(monkeypatch: pytest.MonkeyPatch):
    names = Names(monkeypatch, "10.0.0.1")

    def connect(url: str) -> Scripted:
        made = Scripted(url)
        made.not_ready = {"m"}
        made.gate.clear()
        return made

    async with Rig("dns:critic.svc:8000") as servers:
        await servers.take()
        servers._connect = connect
        names.hosts = ("10.0.0.1", "10.0.0.2")
        await until(lambda: len(servers.servers) == 2)
        joining = servers["10.0.0.2:8000"]
        assert {await servers.take() for _ in range(4)} == {"10.0.0.1:8000"}, "it has not been probed"
        joining.connection.gate.set()
        await until(lambda: len(joining.connection.asked) >= 3)
        assert {await servers.take() for _ in range(4)} == {"10.0.0.1:8000"}, "every server was healthy"
        joining.connection.not_ready.clear()
        await until(lambda: joining.down is None)
        assert {await servers.take() for _ in range(4)} == {"10.0.0.1:8000", "10.0.0.2:8000"}


@pytest.mark.usefixtures("often")
async def test_a_healthy_server_that_leaves_answers_what_is_in_flight_and_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    names = Names(monkeypatch, "10.0.0.1", "10.0.0.2")

    async with Rig("dns:critic.svc:8000") as servers:
        assert await servers.take(writes=True) == "10.0.0.1:8000"
        leaving = servers["10.0.0.1:8000"]
        async with servers.one("m", writes=True, patient=True) as chosen:
            assert chosen is leaving
            names.hosts = ("10.0.0.2",)
            await until(lambda: leaving not in servers.servers)
            assert {await servers.take(writes=writes) for writes in (True, False)} == {"10.0.0.2:8000"}
            assert await servers.failed(leaving, "m", LOST), "not probed: it has left"
            assert not leaving.connection.closed
        assert leaving.connection.closed
        assert servers._gone == []
        names.hosts = ("10.0.0.1", "10.0.0.2")  # its address is given to another server
        await until(lambda: len(servers.servers) == 2 and not any(s.down for s in servers.servers))
        assert {await servers.take() for _ in range(4)} == {"10.0.0.1:8000", "10.0.0.2:8000"}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "10.0.0.1:8000 has left" in caplog.text
    assert "10.0.0.1:8000 is ready and joins" in caplog.text


@pytest.mark.usefixtures("often")
async def test_a_name_that_cannot_be_resolved_for_a_while_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    names = Names(monkeypatch, "10.0.0.1", "10.0.0.2")

    async with Rig("dns:critic.svc:8000", "here:8000") as servers:
        await servers.take()
        for _ in range(2):
            names.hosts, names.asked = (), 0
            await until(lambda: names.asked >= 3)
            assert len(servers.servers) == 3
            names.hosts = ("10.0.0.1", "10.0.0.2")
            await until(lambda: not servers._names._unresolved)
    assert caplog.text.count("dns:critic.svc:8000 cannot be resolved") == 2


async def test_addresses_without_a_name_are_not_resolved_again():
    async with Rig("a:1", "b:1") as servers:
        await servers.take()
        assert not servers._tasks


async def test_a_name_that_nobody_knows_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch):
    Names(monkeypatch)

    async with Rig("dns:critic.svc:8000") as servers:
        with pytest.raises(RequestFailed, match=r"server address 'dns:critic\.svc:8000' cannot be resolved"):
            await servers.take()


async def test_an_address_that_is_named_twice_is_one_server():
    async with Rig("a:1", "b:1", "a:1") as servers:
        await asyncio.gather(*(servers.take() for _ in range(10)))
        assert [server.url for server in servers.servers] == ["a:1", "b:1"]
