"""The clients of the reload measurement: value requests in a closed loop until told to stop; a process of its own.
Given: a server's address, how many clients. Returns: begin, latency and weights version of every request, and failures.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from actor.client import RequestFailed, TritonClient
from python_backend.config import ClientSection
from python_backend.contract import VALUES, WEIGHTS_VERSION
from tools.bench.children import BenchChild
from tools.bench.trace import make_trace

DEADLINE_S = 300.0
NUM_ROWS = 256
AFTER_FAILURE_S = 0.01


class Clients:
    """The process, as the measurement holds it."""

    def __init__(self, log: Path) -> None:
        self._child = BenchChild("load generator", "tools.bench.reload_clients", [], log)
        self._child.wait_ready()

    def start(self, url: str, num_clients: int) -> None:
        """Begin: each client asks for the values of one row at a time, without a pause and without retries."""
        self._child.ask("/start", {"url": url, "num_clients": num_clients})

    def stop(self) -> dict[str, Any]:
        """End; what they saw since `start`, as `Recording.facts` says."""
        return self._child.ask("/stop", {})

    def close(self) -> None:
        """End the process."""
        self._child.stop()


class Recording:
    """Clients under way, and what they saw."""

    def __init__(self, url: str, num_clients: int) -> None:
        self._starts: list[float] = []
        self._latencies: list[float] = []
        self._versions: list[int] = []
        self._failures: list[tuple[float, str]] = []
        self._going_on = True
        self._task = asyncio.create_task(self._run(url, num_clients))

    async def finish(self) -> dict[str, Any]:
        """Let every client end its request; returns the facts."""
        self._going_on = False
        await self._task
        return self.facts()

    def facts(self) -> dict[str, Any]:
        """`start_s` on the machine's monotonic clock, `latency_ms`, `version` of what was answered; `failures`."""
        return {
            "start_s": [round(start, 5) for start in self._starts],
            "latency_ms": [round(latency * 1e3, 3) for latency in self._latencies],
            "version": self._versions,
            "failures": self._failures,
        }

    async def _run(self, url: str, num_clients: int) -> None:
        rows = itertools.cycle(make_trace(NUM_ROWS))  # one event loop: the clients share the iterator
        settings = ClientSection(deadline_s=DEADLINE_S, retries=0, max_outage_s=0, max_in_flight=num_clients)
        async with TritonClient(url, settings) as client:
            await asyncio.gather(*(self._ask(client, rows) for _ in range(num_clients)))

    async def _ask(self, client: TritonClient, rows: Iterator[np.ndarray]) -> None:
        while self._going_on:
            row = next(rows)
            start = time.monotonic()
            try:
                answer = await client.score([row], (VALUES, WEIGHTS_VERSION))
            except RequestFailed as error:
                self._failures.append((start, str(error)))
                await asyncio.sleep(AFTER_FAILURE_S)
                continue
            latency = time.monotonic() - start
            if answer[VALUES].shape != (1, row.size) or not np.isfinite(answer[VALUES]).all():
                self._failures.append((start, f"values of shape {answer[VALUES].shape}, or not finite"))
                continue
            self._starts.append(start)
            self._latencies.append(latency)
            self._versions.append(int(answer[WEIGHTS_VERSION][0, 0]))


def main() -> None:
    """Serve `/start` and `/stop` until SIGTERM."""
    parser = argparse.ArgumentParser(prog="bench_reload_clients")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    recordings: list[Recording] = []

    async def start(request: web.Request) -> web.Response:
        job = await request.json()
        recordings.append(Recording(job["url"], job["num_clients"]))
        return web.json_response({})

    async def stop(request: web.Request) -> web.Response:
        return web.json_response(await recordings.pop().finish())

    async def ready(request: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.post("/start", start), web.post("/stop", stop), web.get("/ready", ready)])
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
