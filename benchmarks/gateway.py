"""Benchmark of the gateway, compared with direct requests to Triton and with the logic of OpenRLHF's reward server.

All contenders score the scoring benchmark's trace with one model on the same cores, in interleaved rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.support.benchmark import BenchError, Option, Record, Result, Target
from benchmarks.support.children import HOST, running_child
from benchmarks.support.samples import grouped, in_turn, ratio
from benchmarks.support.servers import start_triton
from benchmarks.support.workload import LONGEST, SIZES, as_requests, closed_loop, make_checkpoint, make_trace
from python_backend.client.client import TritonClient
from python_backend.config import (
    ActorSection,
    AlgorithmSection,
    ClientSection,
    GatewaySection,
    RewardSection,
    RunConfig,
    RunSection,
    ServerSection,
)
from python_backend.wire.contract import REWARD_MODEL, REWARDS

DIRECT, TOKENS, TEXTS, PEER = "direct", "gateway_tokens", "gateway_texts", "serve_rm"
CONTENDERS = (DIRECT, TOKENS, TEXTS, PEER)
RATIOS = ((TOKENS, DIRECT), (TEXTS, DIRECT), (TEXTS, PEER))
LEAST_OF_DIRECT, LEAST_OF_PEER = 0.85, 2.5
TOLERANCE = 1e-4
CELL = ("rows_per_request", "in_flight")
OPTIONS = {
    "model": Option("7m", "size of the reward model", "tiny", tuple(SIZES)),
    "cells": Option(["1x64", "8x8"], "rows per request x requests in flight", ["1x4"]),
    "rows": Option(600, "rows of the trace in each turn", 16),
    "rounds": Option(5, "turns of each contender in each cell", 1),
    "workers": Option(2, "forward passes at a time in Triton, of one thread each; torch threads of serve_rm"),
    "token_budget": Option(1024, "tokens in one of Triton's forward passes"),
}
Send = Callable[[Any], Awaitable[Any]]


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Measure all cells. Raises BenchError if a contender returns other rewards than Triton."""
    checkpoint = record.out / "model"
    make_checkpoint(SIZES[settings.model], checkpoint)
    with contextlib.ExitStack() as running:
        triton = start_triton(server_config(checkpoint, record.out, settings))
        running.callback(triton.stop)
        url = triton.section.http_url
        gateway = running.enter_context(
            running_child(
                "gateway", "gateway:serve_gateway", {"triton": url}, record.out / "gateway.log", ready="/readyz"
            )
        )
        arguments = {"checkpoint": checkpoint, "threads": settings.workers}
        peer = running.enter_context(
            running_child(
                PEER, "gateway:serve_rm", arguments, record.out / "peer.log", threads=settings.workers, ready="/docs"
            )
        )
        asyncio.run(take_turns(url, gateway.url, peer.url, settings, record))


def server_config(checkpoint: Path, folder: Path, settings: argparse.Namespace) -> RunConfig:
    """Return the configuration of Triton with the reward model alone."""
    return RunConfig(
        run=RunSection(dir=folder, run_id="bench"),
        reward=RewardSection(
            checkpoint=checkpoint,
            workers=settings.workers,
            threads=1,
            token_budget=settings.token_budget,
            forward_overhead_tokens=64,
            add_special_tokens=False,
        ),
        actor=ActorSection(algorithm=AlgorithmSection(name="reinforce++")),
        server=ServerSection(http_port=0, grpc_port=0, metrics_port=0, exit_timeout_s=1),
    )


async def take_turns(triton: str, gateway: str, peer: str, settings: argparse.Namespace, record: Record) -> None:
    """Warm up all contenders of a cell, then give each one turn per round. The arguments are `host:port`."""
    trace = make_trace(settings.rows)
    # uvicorn closes a connection that is idle for 5 s, as all are during the turns of the others.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(connector=connector) as session, TritonClient(triton, ClientSection()) as client:
        await client.describe(REWARD_MODEL)

        async def direct(rows: list[np.ndarray]) -> Any:
            return (await client.rewards(rows))[REWARDS][:, 0]

        def poster(url: str) -> Send:
            async def post(body: bytes) -> Any:
                async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as reply:
                    reply.raise_for_status()
                    return (await reply.json())["rewards"]

            return post

        for cell in settings.cells:
            per_request, in_flight = map(int, cell.split("x"))
            requests = as_requests(trace, per_request)
            tokens, texts = [_token_body(rows) for rows in requests], [_text_body(rows) for rows in requests]
            contenders: dict[str, tuple[Send, Sequence[Any]]] = {
                DIRECT: (direct, requests),
                TOKENS: (poster(f"http://{gateway}/v1/rewards"), tokens),
                TEXTS: (poster(f"http://{gateway}/get_reward"), texts),
                PEER: (poster(f"http://{peer}/get_reward"), texts),
            }
            expected = np.concatenate((await closed_loop(*contenders[DIRECT], in_flight))[2])
            for send, bodies in contenders.values():
                await closed_loop(send, bodies[: 2 * in_flight], in_flight)
            for number, name in in_turn(CONTENDERS, settings.rounds):
                seconds, _, rewards = await closed_loop(*contenders[name], in_flight)
                worst = float(np.abs(np.concatenate(rewards) - expected).max())
                if not worst <= TOLERANCE:
                    raise BenchError(f"{name}: a reward differs from Triton's by {worst:g}, more than {TOLERANCE:g}")
                labels = dict(zip(CELL, (per_request, in_flight), strict=True))
                sample = {"contender": name, "round": number, "rows_per_s": settings.rows / seconds, "error": worst}
                record.add({**labels, **sample})
                record.say(f"{cell}: {name} {settings.rows / seconds:.0f} rows/s")


def _token_body(rows: Sequence[np.ndarray]) -> bytes:
    return json.dumps({"inputs": [{"tokens": row.tolist()} for row in rows]}).encode()


def _text_body(rows: Sequence[np.ndarray]) -> bytes:
    return json.dumps({"query": [" ".join(f"w{token}" for token in row) for row in rows]}).encode()


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
    app = FastAPI()

    @app.post("/get_reward")
    async def get_reward(body: dict[str, Any]) -> dict[str, Any]:
        inputs = tokenizer(
            body["query"],
            return_tensors="pt",
            add_special_tokens=False,
            max_length=LONGEST,
            padding=True,
            truncation=True,
        )
        mask = inputs["attention_mask"]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            hidden = model.model(inputs["input_ids"], attention_mask=mask, position_ids=positions).last_hidden_state
            rewards = model.score(hidden[:, -1])[:, 0].tolist()
        return {"rewards": rewards, "scores": rewards, "extra_logs": {"dummy_scores": rewards}}

    uvicorn.run(app, host=HOST, port=ports[0], log_level="warning")


def summarise(result: Result) -> list[dict[str, Any]]:
    """Return the median rows/s of each contender in each cell, and the ratios within a round."""
    rows = []
    for cell, samples in grouped(result["samples"], *CELL).items():
        speeds = {
            name: statistics.median(sample["rows_per_s"] for sample in of)
            for (name,), of in grouped(samples, "contender").items()
        }
        ratios = {f"{one}/{other}": ratio(samples, one, other, "rows_per_s") for one, other in RATIOS}
        rows.append({**dict(zip(CELL, cell, strict=True)), **speeds, **ratios})
    return rows


def targets(result: Result) -> list[Target]:
    """Return the targets of each cell."""
    found = []
    for row in result["summary"]:
        where = f"{row['rows_per_request']} rows x {row['in_flight']} requests"
        for one, other, low in ((TOKENS, DIRECT, LEAST_OF_DIRECT), (TEXTS, PEER, LEAST_OF_PEER)):
            found.append(Target(f"rows/s, {one} / {other}", row[f"{one}/{other}"], low=low, detail=where))
    return found
