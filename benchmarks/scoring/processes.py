"""Child processes of the scoring benchmark: its load generator, and contenders with one process per instance.

These contenders are `one_forward` (one forward pass per request) and `ideal` (no server).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from benchmarks.support.children import serve_http, serve_json
from benchmarks.support.forward import CountedReward
from benchmarks.support.usage import difference, snapshot
from benchmarks.support.workload import as_requests, closed_loop, make_trace
from python_backend.client.client import TritonClient
from python_backend.config import ClientSection
from python_backend.serving.scheduling import RowPool
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
    *,
    urls: list[str],
    plain: bool,
    width: int,
    num_rows: int,
    rows: int,
    concurrency: int,
    num_warmup: int,
    num_checked: int,
    pids: list[int],
    counters: str,
) -> dict[str, Any]:
    """Measure one server with the first `num_rows` rows of the trace; return times, rewards and usage.

    Args:
        urls: `host:port`, one for Triton, one per instance for `plain` servers (`serve_one_forward`).
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
        "seconds": seconds,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "client_cpu_s": cpu_s,
        "rewards": [float(reward) for reward in rewards[:num_checked]],
        **used,
    }


def serve_load(ports: list[int]) -> None:
    """Serve `POST /measure` until SIGTERM; see `measure`."""
    serve_json(ports[0], measure=measure)


def serve_one_forward(ports: list[int], checkpoint: str, counters: str, threads: int) -> None:
    """Serve `POST /score` with one forward pass per request, as OpenRLHF's remote reward server does.

    Leaner than OpenRLHF's server: binary bodies, no tokenisation, and the forward pass in a thread, so that the event
    loop keeps accepting requests.
    """
    model, executor = CountedReward(checkpoint, counters, threads=threads), ThreadPoolExecutor(1)

    async def score(request: web.Request) -> web.Response:
        rows = unpack(await request.read())
        scores = await asyncio.get_running_loop().run_in_executor(executor, model.score, rows)
        return web.Response(body=scores.astype(np.float32).tobytes())

    serve_http(ports[0], {"/score": score})


def pack(rows: list[np.ndarray]) -> bytes:
    """Return the body of a request, all int32: the number of rows, the length of each row, then all tokens."""
    return np.concatenate([[len(rows)], [row.size for row in rows], *rows]).astype(np.int32).tobytes()


def unpack(body: bytes) -> list[np.ndarray]:
    """Return the token rows int64 `[length_i]` of a request's body."""
    numbers = np.frombuffer(body, np.int32).astype(np.int64)
    count = int(numbers[0])
    ends = np.cumsum(numbers[1 : count + 1])
    return np.split(numbers[count + 1 :], ends[:-1])


def serve_ideal(ports: list[int], checkpoint: str, counters: str, threads: int) -> None:
    """Serve `POST /run`, which scores the server's micro-batches in this process: an upper bound on throughput."""
    model = CountedReward(checkpoint, counters, threads=threads, lean=True)

    async def run(**job: Any) -> dict[str, Any]:
        return run_share(model, **job)

    serve_json(ports[0], run=run)


def run_share(
    model: CountedReward, *, num_rows: int, num_checked: int, pool: dict[str, int], claims: str, start_at: float
) -> dict[str, Any]:
    """Score this instance's share of the trace's first `num_rows` rows; return its start, end and first rewards.

    Times are on the monotonic clock that all processes share. Rewards that other instances compute are None.
    """
    rows = make_trace(num_rows)
    row_pool: RowPool[str] = RowPool(**pool)
    row_pool.add("all", [row.size for row in rows])
    plan = [[index for _, index in batch] for batch in iter(row_pool.take, [])]
    scores = np.full(len(rows), np.nan, np.float32)
    time.sleep(max(0.0, start_at - time.monotonic()))
    start = time.monotonic()
    for index in claim(Path(claims), len(plan)):
        scores[plan[index]] = model.score([rows[i] for i in plan[index]])[:, 0]
    end = time.monotonic()
    first = [None if np.isnan(score) else float(score) for score in scores[:num_checked]]
    return {"start": start, "end": end, "rewards": first}


def claim(path: Path, count: int) -> Iterator[int]:
    """Yield indices below `count`; of the processes that share `path`, only one gets each index.

    After an append, the kernel sets the writer's position just after its own byte, so no other process gets that index.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        while os.write(descriptor, b".") and (index := os.lseek(descriptor, 0, os.SEEK_CUR) - 1) < count:
            yield index
    finally:
        os.close(descriptor)
