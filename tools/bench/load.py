"""Load generator of the scoring benchmark: workers in a closed loop over the project's client, in its own process."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from actor.client import TritonClient
from python_backend.config import ClientSection
from python_backend.contract import REWARDS
from tools.bench.children import serve_json
from tools.bench.instances import pack
from tools.bench.trace import as_requests, make_trace
from tools.bench.usage import difference, snapshot

DEADLINE_S = 900.0
Send = Callable[[list[np.ndarray]], Awaitable[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Job:
    """One measurement of one server."""

    urls: list[str]
    """`host:port`, one for Triton, one per instance for `plain` servers."""
    plain: bool
    """The server is `instances.serve_one_forward`, not a Triton."""
    num_rows: int
    """Length of the trace's prefix that is sent and counted."""
    rows: int
    """Rows per request."""
    concurrency: int
    """Requests in flight."""
    width: int
    """Pad every request to so many tokens; 0: to its own longest row."""
    num_warmup: int
    """Requests before the clock starts: the trace's first ones."""
    num_checked: int
    """Rewards to return."""
    pids: list[int]
    counters: str
    """The server's processes and the folder of its counters: read around what is counted."""


@asynccontextmanager
async def _triton(job: Job) -> Any:
    settings = ClientSection(deadline_s=DEADLINE_S, retries=0, max_outage_s=0, max_in_flight=job.concurrency)
    async with TritonClient(job.urls[0], settings) as client:

        async def send(rows: list[np.ndarray]) -> np.ndarray:
            return (await client.rewards(rows, width=job.width))[REWARDS]

        yield send


@asynccontextmanager
async def _plain(job: Job) -> Any:
    """Send each request to the least-loaded instance: fairer than a random choice."""
    in_flight = dict.fromkeys(job.urls, 0)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def send(rows: list[np.ndarray]) -> np.ndarray:
            url = min(in_flight, key=in_flight.__getitem__)
            in_flight[url] += 1
            try:
                async with session.post(f"http://{url}/score", data=pack(rows)) as answer:
                    answer.raise_for_status()
                    return np.frombuffer(await answer.read(), np.float32)
            finally:
                in_flight[url] -= 1

        yield send


async def _closed_loop(send: Send, requests: list[list[np.ndarray]], concurrency: int) -> tuple[list[float], list[Any]]:
    """Return latencies (s) and answers of all requests, `concurrency` of them in flight."""
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


async def measure(**arguments: Any) -> dict[str, Any]:
    """Send the requests of the `Job`; return seconds, latencies, CPU seconds, what was computed, and first rewards."""
    job = Job(**arguments)
    requests = as_requests(make_trace(job.num_rows), job.rows)
    counters = Path(job.counters)
    async with (_plain if job.plain else _triton)(job) as send:
        await _closed_loop(send, requests[: job.num_warmup], job.concurrency)
        before = snapshot(job.pids, counters)
        cpu, start = time.process_time(), time.perf_counter()
        latencies, answers = await _closed_loop(send, requests, job.concurrency)
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        used = difference(snapshot(job.pids, counters), before)
    rewards = np.concatenate([np.ravel(answer) for answer in answers])
    if rewards.size != job.num_rows or not np.isfinite(rewards).all():
        raise ValueError(f"{job.urls}: {rewards.size} rewards for {job.num_rows} rows, or not finite")
    p50, p99 = np.percentile(np.asarray(latencies) * 1000, [50, 99])
    return {
        "seconds": seconds, "p50_ms": float(p50), "p99_ms": float(p99), "client_cpu_s": cpu_s,
        "rewards": [float(reward) for reward in rewards[: job.num_checked]], **used,
    }  # fmt: skip


def serve(ports: list[int]) -> None:
    """Serve `measure` until SIGTERM."""
    serve_json(ports[0], measure=measure)
