"""Contenders with one process per instance: `one_forward` (one forward pass per request) and `ideal` (no server)."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from benchmarks.support.children import serve_http, serve_json
from benchmarks.support.forward import CountedReward
from benchmarks.support.workload import make_trace
from python_backend.serving.scheduling import RowPool


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
