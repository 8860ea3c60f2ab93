"""Real servers of one name under 32 clients: one is drained, one is added, one is killed, and no request fails."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tiny_models import write_repository
from tiny_serve import serve, wait_for, write_run

from python_backend.client.client import TritonClient
from python_backend.client.connection import HTTPConnection
from python_backend.client.errors import Kind, Trouble
from python_backend.client.pool import ServerPool
from python_backend.client.server import Server
from python_backend.config import ClientSection
from python_backend.wire.contract import REWARDS, VALUES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NAME = "critic.svc"
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
NUM_CLIENTS = 32
SOME = 50  # requests


class Cluster:
    """Servers on addresses of loopback, which `names` lists, and what a client did with each of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.port = folder, common_port()
        self.names: tuple[str, ...] = HOSTS[:3]
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.answered: Counter[str] = Counter()
        self.troubles: defaultdict[str, Counter[Kind]] = defaultdict(Counter)
        self.connections: list[HTTPConnection] = []
        self._record(monkeypatch)

    def start(self, *hosts: str) -> None:
        """Start a server on each address, in parallel."""
        for host in hosts:
            run_dir = write_run(self.folder / host)
            write_repository(run_dir / "model_repository", on_request="time.sleep(0.01)")
            self.processes[host] = serve(run_dir, f"server.host={host}", f"server.http_port={self.port}")

    def wait_ready(self, *hosts: str) -> None:
        for host in hosts:
            wait_for(self.folder / host / "server.json", self.processes[host])

    def kill(self, host: str) -> None:
        """Kill all processes of a server at once, as if its machine failed."""
        whole = psutil.Process(self.processes[host].pid)
        for process in [whole, *whole.children(recursive=True)]:
            process.send_signal(signal.SIGKILL)

    async def wait_for_answers(self, *hosts: str) -> None:
        """Wait until each of the servers has answered some more requests."""
        before = self.answered.copy()
        while any(self.answered[host] < before[host] + SOME for host in hosts):
            await asyncio.sleep(0.01)

    def _record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        look_up, answered, failed, connect = (
            socket.getaddrinfo,
            ServerPool.answered,
            ServerPool.failed,
            HTTPConnection.__init__,
        )

        def of_name(name: Any, port: Any, *args: Any, **options: Any) -> list[Any]:
            hosts = self.names if name == NAME else (name,)
            return [found for host in hosts for found in look_up(host, port, *args, **options)]

        def with_answer(pool: Any, server: Server[Any], model: str) -> None:
            self.answered[host_of(server)] += 1
            answered(pool, server, model)

        async def with_failure(pool: Any, server: Server[Any], model: str, trouble: Trouble) -> bool:
            self.troubles[host_of(server)][trouble.kind] += 1
            return await failed(pool, server, model, trouble)

        def opened(connection: HTTPConnection, *args: Any, **options: Any) -> None:
            self.connections.append(connection)
            connect(connection, *args, **options)

        monkeypatch.setattr(socket, "getaddrinfo", of_name)
        monkeypatch.setattr(ServerPool, "answered", with_answer)
        monkeypatch.setattr(ServerPool, "failed", with_failure)
        monkeypatch.setattr(HTTPConnection, "__init__", opened)
        monkeypatch.setattr("python_backend.client.pool.RESOLVE_EVERY_S", 0.1)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster(tmp_path, monkeypatch)
    try:
        yield made
    finally:
        for process in made.processes.values():
            process.terminate()
        for process in made.processes.values():
            process.communicate()


def host_of(server: Server[Any]) -> str:
    return server.url.partition(":")[0]


def common_port() -> int:
    """Return a port that is free on all addresses."""
    while True:
        with socket.socket() as first:
            first.bind((HOSTS[0], 0))
            port = int(first.getsockname()[1])
            try:
                for host in HOSTS[1:]:
                    with socket.socket() as other:
                        other.bind((host, port))
            except OSError:
                continue
            return port


def test_servers_that_leave_and_join_under_load_fail_no_request(cluster: Cluster) -> None:
    drained, killed, stays, added = HOSTS
    cluster.start(*HOSTS)
    cluster.wait_ready(*HOSTS)
    settings = ClientSection(servers=(f"dns:{NAME}:{cluster.port}",), backoff_s=0.05)

    async def ask(client: TritonClient, seed: int, stop: asyncio.Event) -> int:
        """Score one row after the other; return how many. Raises RequestFailed."""
        lengths, count = np.random.default_rng(seed), 0
        while not stop.is_set():
            row = np.zeros(int(lengths.integers(1, 50)), np.int64)
            answer = await client.score([row], (REWARDS, VALUES))
            assert answer[VALUES].shape == (1, row.size)
            count += 1
        return count

    async def play() -> None:
        stop = asyncio.Event()
        async with TritonClient("unused:1", settings) as client:
            asking = [asyncio.create_task(ask(client, seed, stop)) for seed in range(NUM_CLIENTS)]
            await cluster.wait_for_answers(drained, killed, stays)

            cluster.processes[drained].terminate()
            out, err = await asyncio.to_thread(cluster.processes[drained].communicate)
            assert (cluster.processes[drained].returncode, err) == (0, "")
            assert "all requests are answered" in out
            assert set(cluster.troubles[drained]) == {Kind.UNLOADED}, "it answered what it had accepted"

            assert cluster.answered[added] == 0
            cluster.names = (killed, stays, added)
            await cluster.wait_for_answers(killed, stays, added)

            cluster.kill(killed)
            await cluster.wait_for_answers(stays, added)
            cluster.names = (stays, added)
            while {host_of(server) for server in client._servers.servers} != {stays, added}:
                await asyncio.sleep(0.01)
            await cluster.wait_for_answers(stays, added)
            sessions = [connection.http._stub for connection in cluster.connections]
            assert [session.closed for session in sessions] == [True, True, False, False]
            stop.set()
            count = sum(await asyncio.gather(*asking))
            c = client.counters
            assert (c.failed_requests, c.over_budget, c.outages) == (0, 0, 0)
            assert c.requests == count == sum(cluster.answered.values())
            assert client._scoring_budget._tokens == client._scoring_budget._most, "no retry took from the budget"
            print(json.dumps({"requests": count, "retries": c.retries, "failed": 0, "answered": cluster.answered}))
        assert all(session.closed for session in sessions)

    asyncio.run(play())
    assert not cluster.troubles[stays]
    assert not cluster.troubles[added]
