"""Child processes of the scoring benchmark: its load generator, and the contenders other than Triton and PyTriton.

These are `one_forward` (one forward pass per request), `ideal` (no server), the project's gateway, and the logic of
OpenRLHF's reward server, `serve_rm`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from benchmarks.support.children import HOST, serve_http, serve_json
from benchmarks.support.usage import cpu_seconds
from benchmarks.support.workload import LONGEST, as_requests, closed_loop, make_trace
from python_backend.client.client import TritonClient
from python_backend.config import ClientSection, GatewaySection
from python_backend.serving.allocator import keep_freed_memory
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
async def _http(urls: list[str], form: str) -> Any:
    """Send each request to the least-loaded instance, which is fairer to the contender than a random choice."""
    path, body_of, rewards_of = FORMS[form]
    in_flight = dict.fromkeys(urls, 0)
    # uvicorn closes a connection that is idle for 5 s, as all are during the turns of the others.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S), connector=connector) as session:

        async def send(rows: list[np.ndarray]) -> Any:
            url = min(in_flight, key=in_flight.__getitem__)
            in_flight[url] += 1
            headers = {"Content-Type": "application/json"}
            try:
                async with session.post(f"http://{url}{path}", data=body_of(rows), headers=headers) as answer:
                    answer.raise_for_status()
                    return rewards_of(await answer.read())
            finally:
                in_flight[url] -= 1

        yield send


def _token_body(rows: list[np.ndarray]) -> bytes:
    return json.dumps({"inputs": [{"tokens": row.tolist()} for row in rows]}).encode()


def _text_body(rows: list[np.ndarray]) -> bytes:
    return json.dumps({"query": [" ".join(f"w{token}" for token in row) for row in rows]}).encode()


def _rewards(content: bytes) -> np.ndarray:
    return np.asarray(json.loads(content)["rewards"], np.float32)


async def measure(
    *,
    urls: list[str],
    form: str,
    width: int,
    num_rows: int,
    rows: int,
    concurrency: int,
    num_warmup: int,
    num_checked: int,
    pids: list[int],
) -> dict[str, Any]:
    """Measure one server with the first `num_rows` rows of the trace; return times, rewards and CPU time.

    Args:
        urls: `host:port`, one for each instance.
        form: how requests are written, of `FORMS`, or `triton`.
        width: pad every request to this many tokens; 0: to its own longest row.
        rows: rows per request.
        num_warmup: number of requests before the clock starts.
        num_checked: number of rewards to return.
        pids: the server's processes, whose CPU time is read before and after the measurement.
    """
    requests = as_requests(make_trace(num_rows), rows)
    async with _triton(urls, width, concurrency) if form == "triton" else _http(urls, form) as send:
        await closed_loop(send, requests[:num_warmup], concurrency)
        before = cpu_seconds([os.getpid(), *pids])
        seconds, latencies, answers = await closed_loop(send, requests, concurrency)
        cpu_s = cpu_seconds([os.getpid(), *pids]) - before
    rewards = np.concatenate([np.ravel(answer) for answer in answers])
    if rewards.size != num_rows or not np.isfinite(rewards).all():
        raise ValueError(f"{urls} returned {rewards.size} rewards for {num_rows} rows, or a reward that is not finite")
    p50, p99 = np.percentile(np.asarray(latencies) * 1000, [50, 99]).tolist()
    return {
        "seconds": seconds,
        "p50_ms": p50,
        "p99_ms": p99,
        "cpu_s": cpu_s,
        "rewards": rewards[:num_checked].tolist(),
    }


def serve_load(ports: list[int]) -> None:
    """Serve `POST /measure` until SIGTERM; see `measure`."""
    serve_json(ports[0], measure=measure)


def load_contender(checkpoint: str, threads: int, *, lean: bool = False) -> Callable[..., np.ndarray]:
    """Load the reward model; return its `score`, with transformers' own forward pass unless `lean`."""
    import torch

    from python_backend.models.modeling import load_reward, quiet_transformers

    keep_freed_memory()
    torch.set_num_threads(threads)
    quiet_transformers()
    reward = load_reward(Path(checkpoint))
    if not lean:
        reward.use_own_forward()
    return reward.score


def serve_one_forward(ports: list[int], checkpoint: str, threads: int) -> None:
    """Serve `POST /score` with one forward pass per request, as OpenRLHF's remote reward server does.

    Leaner than OpenRLHF's server: binary bodies, no tokenisation, and the forward pass in a thread, so that the event
    loop keeps accepting requests.
    """
    score, executor = load_contender(checkpoint, threads), ThreadPoolExecutor(1)

    async def answer(request: web.Request) -> web.Response:
        scores = await asyncio.get_running_loop().run_in_executor(executor, score, unpack(await request.read()))
        return web.Response(body=scores.astype(np.float32).tobytes())

    serve_http(ports[0], {"/score": answer})


def pack(rows: list[np.ndarray]) -> bytes:
    """Return the body of a request, all int32: the number of rows, the length of each row, then all tokens."""
    return np.concatenate([[len(rows)], [row.size for row in rows], *rows]).astype(np.int32).tobytes()


def unpack(body: bytes) -> list[np.ndarray]:
    """Return the token rows int64 `[length_i]` of a request's body."""
    numbers = np.frombuffer(body, np.int32).astype(np.int64)
    count = int(numbers[0])
    return np.split(numbers[count + 1 :], np.cumsum(numbers[1:count]))


FORMS: dict[str, tuple[str, Callable[[list[np.ndarray]], bytes], Callable[[bytes], np.ndarray]]] = {
    "binary": ("/score", pack, partial(np.frombuffer, dtype=np.float32)),
    "tokens": ("/v1/rewards", _token_body, _rewards),
    "texts": ("/get_reward", _text_body, _rewards),
}
"""Path of a request, the body of token rows, and the rewards in the reply's body."""


def serve_gateway(ports: list[int], triton: str) -> None:
    """Serve the gateway until SIGTERM."""
    import uvicorn

    from tools.gateway.app import create_app
    from tools.gateway.connections import bounded

    settings = GatewaySection(host=HOST, port=ports[0])
    uvicorn.Server(bounded(create_app(TritonClient(triton, ClientSection()), settings), settings)).run()


def serve_rm(ports: list[int], checkpoint: str, threads: int) -> None:
    """Serve `/get_reward` as OpenRLHF's `serve_rm` does: a forward pass per request, padded on the left."""
    import torch
    import uvicorn
    from fastapi import FastAPI
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.set_num_threads(threads)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    given = {"return_tensors": "pt", "add_special_tokens": False, "max_length": LONGEST, "truncation": True}
    app = FastAPI()

    @app.post("/get_reward")
    async def get_reward(body: dict[str, Any]) -> dict[str, Any]:
        inputs = tokenizer(body["query"], padding=True, **given)
        mask = inputs["attention_mask"]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            hidden = model.model(inputs["input_ids"], attention_mask=mask, position_ids=positions).last_hidden_state
            rewards = model.score(hidden[:, -1])[:, 0].tolist()
        return {"rewards": rewards, "scores": rewards, "extra_logs": {"dummy_scores": rewards}}

    uvicorn.run(app, host=HOST, port=ports[0], log_level="warning")


def serve_ideal(ports: list[int], checkpoint: str, threads: int, pool: dict[str, int]) -> None:
    """Serve `POST /run`, which scores the server's micro-batches in this process: an upper bound on throughput.

    `pool`: arguments of the `RowPool` that plans the micro-batches.
    """
    score = load_contender(checkpoint, threads, lean=True)

    async def run(*, num_rows: int, num_checked: int, claims: str, start_at: float) -> dict[str, Any]:
        """Score a share of the trace's first `num_rows` rows; return its start, end and first rewards.

        Times are on the monotonic clock that all processes share. Rewards that other instances compute are None.
        """
        rows, row_pool = make_trace(num_rows), RowPool[str](**pool)
        row_pool.add("all", [row.size for row in rows])
        plan = [[index for _, index in batch] for batch in iter(row_pool.take, [])]
        scores = np.full(len(rows), np.nan, np.float32)
        time.sleep(max(0.0, start_at - time.monotonic()))
        start = time.monotonic()
        for index in claim(Path(claims), len(plan)):
            scores[plan[index]] = score([rows[i] for i in plan[index]])[:, 0]
        end = time.monotonic()
        first = [None if np.isnan(reward) else float(reward) for reward in scores[:num_checked]]
        return {"start": start, "end": end, "rewards": first}

    serve_json(ports[0], run=run)


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
