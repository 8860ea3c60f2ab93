"""The load generator: C workers in a closed loop, over the project's own client; a process of its own.
Given: `POST /measure`, a `Job`. Returns: seconds, latencies (ms), CPU seconds, what was computed, first rewards.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from actor.client import TritonClient
from python_backend.config import ClientSection
from python_backend.contract import REWARDS
from tools.bench.one_forward import pack
from tools.bench.snapshot import Watched, difference, snapshot
from tools.bench.trace import as_requests, make_trace

DEADLINE_S = 900.0
Send = Callable[[list[np.ndarray]], Awaitable[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Job:
    """One measurement of one server."""

    urls: list[str]
    """`host:port`, one for Triton, one per instance for `plain` servers."""
    plain: bool
    """The server is `bench_one_forward`, and no Triton."""
    num_rows: int
    """Length of the trace's prefix that is sent and counted."""
    rows: int
    """Rows per request."""
    concurrency: int
    """Requests under way at once."""
    width: int
    """Pad every request to so many tokens; 0: to its own longest row."""
    num_warmup: int
    """Requests before the clock starts: the trace's first ones."""
    num_checked: int
    """How many rewards to return."""
    watched: dict[str, Any]
    """The server's `Watched`, as a dict: its counters are read around what is counted."""


@asynccontextmanager
async def _triton(job: Job) -> Any:
    settings = ClientSection(deadline_s=DEADLINE_S, retries=0, max_outage_s=0, max_in_flight=job.concurrency)
    async with TritonClient(job.urls[0], settings) as client:

        async def send(rows: list[np.ndarray]) -> np.ndarray:
            return (await client.rewards(rows, width=job.width))[REWARDS]

        yield send


@asynccontextmanager
async def _plain(job: Job) -> Any:
    """Each request goes to the instance with the fewest under way: fairer than a random choice."""
    under_way = dict.fromkeys(job.urls, 0)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def send(rows: list[np.ndarray]) -> np.ndarray:
            url = min(under_way, key=under_way.__getitem__)
            under_way[url] += 1
            try:
                async with session.post(f"http://{url}/score", data=pack(rows)) as answer:
                    answer.raise_for_status()
                    return np.frombuffer(await answer.read(), np.float32)
            finally:
                under_way[url] -= 1

        yield send


async def _closed_loop(send: Send, requests: list[list[np.ndarray]], concurrency: int) -> tuple[list[float], list[Any]]:
    """Latencies (s) and answers of all requests, `concurrency` of them under way."""
    latencies = [0.0] * len(requests)
    answers: list[Any] = [None] * len(requests)
    waiting = iter(range(len(requests)))

    async def work() -> None:
        for index in waiting:  # one event loop: the workers share the iterator
            start = time.perf_counter()
            answers[index] = await send(requests[index])
            latencies[index] = time.perf_counter() - start

    await asyncio.gather(*(work() for _ in range(min(concurrency, len(requests)))))
    return latencies, answers


async def measure(job: Job) -> dict[str, Any]:
    """Send the job's requests; what the clock says is of those alone."""
    requests = as_requests(make_trace(job.num_rows), job.rows)
    watched = Watched(**job.watched)
    async with (_plain if job.plain else _triton)(job) as send:
        await _closed_loop(send, requests[: job.num_warmup], job.concurrency)
        before = snapshot(watched)
        cpu, start = time.process_time(), time.perf_counter()
        latencies, answers = await _closed_loop(send, requests, job.concurrency)
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        used = difference(snapshot(watched), before)
    rewards = np.concatenate([np.ravel(answer) for answer in answers])
    if rewards.size != job.num_rows or not np.isfinite(rewards).all():
        raise ValueError(f"{job.urls}: {rewards.size} rewards for {job.num_rows} rows, or not finite")
    p50, p99 = np.percentile(np.asarray(latencies) * 1000, [50, 99])
    return {
        "seconds": seconds, "p50_ms": float(p50), "p99_ms": float(p99), "client_cpu_s": cpu_s,
        "rewards": [float(reward) for reward in rewards[: job.num_checked]], **used,
    }  # fmt: skip


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="bench_load")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()

    async def serve_measure(request: web.Request) -> web.Response:
        return web.json_response(await measure(Job(**await request.json())))

    async def ready(request: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.post("/measure", serve_measure), web.get("/ready", ready)])
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
