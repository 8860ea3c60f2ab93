"""Clients of the reload benchmark: a process that sends scoring requests in a closed loop until it is stopped."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import numpy as np

from benchmarks.support.children import serve_json
from benchmarks.support.workload import make_trace
from python_backend.client.client import TritonClient
from python_backend.client.errors import RequestFailed
from python_backend.config import ClientSection
from python_backend.wire.contract import REWARD_VERSION, REWARDS, VALUES, WEIGHTS_VERSION

DEADLINE_S = 300.0
NUM_ROWS = 256
AFTER_FAILURE_S = 0.01  # pause, so that a failing server is not flooded with requests


async def observe(url: str, num_clients: int, model: str, ended: asyncio.Event) -> dict[str, list[Any]]:
    """Run clients until the event, and return their observations; each client has one row at a time scored, no retries.

    These are `start_s` (on the monotonic clock), `latency_ms` and `version` of each answer, and `failures`.
    """
    seen: dict[str, list[Any]] = {"start_s": [], "latency_ms": [], "version": [], "failures": []}
    rows = itertools.cycle(make_trace(NUM_ROWS))  # one event loop: the clients share the iterator
    settings = ClientSection(deadline_s=DEADLINE_S, retries=0, max_outage_s=0, max_in_flight=num_clients)
    async with TritonClient(url, settings) as client:

        async def ask() -> None:
            while not ended.is_set():
                start = time.monotonic()
                try:
                    scores, version = await _scored(client, model, next(rows))
                except RequestFailed as error:
                    seen["failures"].append((start, str(error)))
                    await asyncio.sleep(AFTER_FAILURE_S)
                    continue
                latency = time.monotonic() - start
                if not np.isfinite(scores).all():
                    seen["failures"].append((start, "scores that are not finite"))
                    continue
                seen["start_s"].append(round(start, 5))
                seen["latency_ms"].append(round(latency * 1e3, 3))
                seen["version"].append(version)

        await asyncio.gather(*(ask() for _ in range(num_clients)))
    return seen


async def _scored(client: TritonClient, model: str, row: np.ndarray) -> tuple[np.ndarray, int]:
    if model == "critic":
        answer = await client.score([row], (VALUES, WEIGHTS_VERSION))
        return answer[VALUES].reshape(1, row.size), int(answer[WEIGHTS_VERSION][0, 0])
    answer = await client.rewards([row], (REWARDS, REWARD_VERSION))
    return answer[REWARDS].reshape(1, 1), int(answer[REWARD_VERSION][0, 0])


def serve(ports: list[int]) -> None:
    """Serve `/start`, which starts clients, and `/stop`, which returns their observations, until SIGTERM."""
    running: list[tuple[asyncio.Event, asyncio.Task[dict[str, list[Any]]]]] = []

    async def start(url: str, num_clients: int, model: str = "critic") -> dict[str, Any]:
        ended = asyncio.Event()
        running.append((ended, asyncio.create_task(observe(url, num_clients, model, ended))))
        return {}

    async def stop() -> dict[str, Any]:
        ended, task = running.pop()
        ended.set()  # the clients finish their current requests
        return await task

    serve_json(ports[0], start=start, stop=stop)
