"""Load generator of the scoring benchmark: a process whose workers send requests in a closed loop."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from actor.scoring.client import TritonClient
from benchmarks.scoring.instances import pack
from benchmarks.support.children import serve_json
from benchmarks.support.usage import difference, snapshot
from benchmarks.support.workload import as_requests, closed_loop, make_trace
from python_backend.config import ClientSection
from python_backend.wire.contract import REWARDS

DEADLINE_S = 900.0


@asynccontextmanager
async def _triton(urls: list[str], width: int, concurrency: int) -> Any:
    settings = ClientSection(deadline_s=DEADLINE_S, retries=0, max_outage_s=0, max_in_flight=concurrency)
    async with TritonClient(urls[0], settings) as client:

        async def send(rows: list[np.ndarray]) -> np.ndarray:
            return (await client.rewards(rows, width=width))[REWARDS]

        yield send


@asynccontextmanager
async def _plain(urls: list[str]) -> Any:
    """Send each request to the least-loaded instance, which is fairer to the contender than a random choice."""
    in_flight = dict.fromkeys(urls, 0)
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


async def measure(
    *, urls: list[str], plain: bool, width: int, num_rows: int, rows: int, concurrency: int, num_warmup: int,
    num_checked: int, pids: list[int], counters: str,
) -> dict[str, Any]:  # fmt: skip
    """Measure one server with the first `num_rows` rows of the trace; return times, rewards and usage.

    Args:
        urls: `host:port`, one for Triton, one per instance for `plain` servers (`instances.serve_one_forward`).
        width: pad every request to this many tokens; 0: to its own longest row.
        rows: rows per request.
        num_warmup: number of requests before the clock starts.
        num_checked: number of rewards to return.
        pids, counters: the server's processes and folder of counters, read before and after the measurement.
    """
    requests = as_requests(make_trace(num_rows), rows)
    async with _plain(urls) if plain else _triton(urls, width, concurrency) as send:
        await closed_loop(send, requests[:num_warmup], concurrency)
        before = snapshot(pids, Path(counters))
        cpu = time.process_time()
        seconds, latencies, answers = await closed_loop(send, requests, concurrency)
        cpu_s = time.process_time() - cpu
        used = difference(snapshot(pids, Path(counters)), before)
    rewards = np.concatenate([np.ravel(answer) for answer in answers])
    if rewards.size != num_rows or not np.isfinite(rewards).all():
        raise ValueError(f"{urls} returned {rewards.size} rewards for {num_rows} rows, or a reward that is not finite")
    p50, p99 = np.percentile(np.asarray(latencies) * 1000, [50, 99])
    return {
        "seconds": seconds, "p50_ms": float(p50), "p99_ms": float(p99), "client_cpu_s": cpu_s,
        "rewards": [float(reward) for reward in rewards[:num_checked]], **used,
    }  # fmt: skip


def serve(ports: list[int]) -> None:
    """Serve `measure` until SIGTERM."""
    serve_json(ports[0], measure=measure)
