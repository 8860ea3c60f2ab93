"""The same plan without a server: what the cores could do at best; one process per instance.
Given: `POST /run`, a number of the trace's rows, a token budget. Returns: when it started and ended, first rewards.
The instances of one run share its micro-batches.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from python_backend.scheduling import RowPool
from tools.bench.forward import CountedReward
from tools.bench.trace import make_trace


def claim(path: Path, count: int) -> Iterator[int]:
    """Indices below `count`, each given to one of the processes that share `path`.

    The kernel moves the position of an appending writer behind its own byte: nobody else gets that number.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        while os.write(descriptor, b".") and (index := os.lseek(descriptor, 0, os.SEEK_CUR) - 1) < count:
            yield index
    finally:
        os.close(descriptor)


def run(model: CountedReward, job: dict[str, Any]) -> dict[str, Any]:
    """Score this instance's share of the first `num_rows` rows; times are of the system's monotonic clock."""
    rows = make_trace(job["num_rows"])
    lengths = [row.size for row in rows]
    pool: RowPool[str] = RowPool(
        token_budget=job["token_budget"], max_rows=job["max_rows"], overhead_tokens=job["overhead_tokens"]
    )
    pool.add("all", lengths)
    plan = [[index for _, index in batch] for batch in iter(pool.take, [])]
    scores = np.full(len(rows), np.nan, np.float32)
    time.sleep(max(0.0, job["start_at"] - time.monotonic()))
    start = time.monotonic()
    for index in claim(Path(job["claims"]), len(plan)):
        scores[plan[index]] = model.score([rows[i] for i in plan[index]])[:, 0]
    end = time.monotonic()
    first = [None if np.isnan(score) else float(score) for score in scores[: job["num_checked"]]]
    return {"start": start, "end": end, "rewards": first}


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="bench_ideal")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--counters", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tuned", type=int, required=True)
    args = parser.parse_args()
    model = CountedReward(args.checkpoint, args.counters, threads=args.threads, tuned=bool(args.tuned), lean=True)

    async def serve_run(request: web.Request) -> web.Response:
        return web.json_response(run(model, await request.json()))

    async def ready(request: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.post("/run", serve_run), web.get("/ready", ready)])
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
