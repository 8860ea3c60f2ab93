"""An HTTP server that runs one forward per request, as OpenRLHF's remote reward server does; a process of its own.
Given: a checkpoint, a port. Returns: rewards of the rows in the body (`pack`, `unpack`), as raw float32.
Leaner than its model: binary bodies, no tokenising, the forward in a thread so that the loop keeps accepting.
"""

from __future__ import annotations

import argparse
import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from aiohttp import web

from tools.bench.forward import CountedReward


def pack(rows: list[np.ndarray]) -> bytes:
    """Body of a request: int32 number of rows, their lengths, their tokens."""
    return np.concatenate([[len(rows)], [row.size for row in rows], *rows]).astype(np.int32).tobytes()


def unpack(body: bytes) -> list[np.ndarray]:
    """Token rows int64 `[length_i]` of a request's body."""
    numbers = np.frombuffer(body, np.int32).astype(np.int64)
    count = int(numbers[0])
    ends = np.cumsum(numbers[1 : count + 1])
    return np.split(numbers[count + 1 :], ends[:-1])


def make_app(model: CountedReward) -> web.Application:
    """`POST /score` and `GET /ready`."""
    executor = ThreadPoolExecutor(1)

    async def score(request: web.Request) -> web.Response:
        rows = unpack(await request.read())
        scores = await asyncio.get_running_loop().run_in_executor(executor, model.score, rows)
        return web.Response(body=scores.astype(np.float32).tobytes())

    async def ready(request: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/score", score), web.get("/ready", ready)])
    return app


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="bench_one_forward")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--counters", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tuned", type=int, required=True)
    args = parser.parse_args()
    model = CountedReward(args.checkpoint, args.counters, threads=args.threads, tuned=bool(args.tuned))
    web.run_app(make_app(model), host="127.0.0.1", port=args.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
