"""Clients of the reload benchmark: a process that sends scoring requests in a closed loop until it is stopped."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from actor.scoring.client import RequestFailed, TritonClient
from benchmarks.support.children import serve_json
from benchmarks.support.workload import make_trace
from python_backend.config import ClientSection
from python_backend.wire.contract import REWARD_VERSION, REWARDS, VALUES, WEIGHTS_VERSION

DEADLINE_S = 300.0
NUM_ROWS = 256
AFTER_FAILURE_S = 0.01  # pause, so that a failing server is not flooded with requests


class Recording:
    """Running clients and their observations. Each client has one row at a time scored, without retries."""

    def __init__(self, url: str, num_clients: int, model: str) -> None:
        self._model = model
        self._seen: dict[str, list[Any]] = {"start_s": [], "latency_ms": [], "version": [], "failures": []}
        self._going_on = True
        self._task = asyncio.create_task(self._run(url, num_clients))

    async def finish(self) -> dict[str, Any]:
        """Stop the clients after their current requests and return the observations.

        These are `start_s` (on the monotonic clock), `latency_ms` and `version` of each answer, and `failures`.
        """
        self._going_on = False
        await self._task
        return self._seen

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
                scores, version = await self._scored(client, row)
            except RequestFailed as error:
                self._seen["failures"].append((start, str(error)))
                await asyncio.sleep(AFTER_FAILURE_S)
                continue
            latency = time.monotonic() - start
            if not np.isfinite(scores).all():
                self._seen["failures"].append((start, "scores that are not finite"))
                continue
            self._seen["start_s"].append(round(start, 5))
            self._seen["latency_ms"].append(round(latency * 1e3, 3))
            self._seen["version"].append(version)

    async def _scored(self, client: TritonClient, row: np.ndarray) -> tuple[np.ndarray, int]:
        if self._model == "critic":
            answer = await client.score([row], (VALUES, WEIGHTS_VERSION))
            return answer[VALUES].reshape(1, row.size), int(answer[WEIGHTS_VERSION][0, 0])
        answer = await client.rewards([row], (REWARDS, REWARD_VERSION))
        return answer[REWARDS].reshape(1, 1), int(answer[REWARD_VERSION][0, 0])


def serve(ports: list[int]) -> None:
    """Serve `/start`, which starts clients, and `/stop`, which returns their observations, until SIGTERM."""
    recordings: list[Recording] = []

    async def start(url: str, num_clients: int, model: str = "critic") -> dict[str, Any]:
        recordings.append(Recording(url, num_clients, model))
        return {}

    async def stop() -> dict[str, Any]:
        return await recordings.pop().finish()

    serve_json(ports[0], start=start, stop=stop)
