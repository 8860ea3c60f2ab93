"""Reload benchmark, part c (training): value requests while the critic trains, against a server with one lock."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import psutil

from benchmarks.reload.critic_service import LOWEST_PRIORITY, RUN_ID, CriticService
from benchmarks.reload.setup import ReloadSetup, on_core, under_load
from benchmarks.reload.windows import Samples, Window, p99, ratio
from benchmarks.support.benchmark import Target
from benchmarks.support.children import running_child
from benchmarks.support.servers import running_sidecar
from benchmarks.support.workload import make_trace, noise_payload
from python_backend.client.client import TritonClient
from python_backend.config import ClientSection, CriticOptimizerSection, TrainerSection
from python_backend.wire.contract import CRITIC_TRAIN, SEQUENCE_LENGTHS, TOKENS

SIZES = (1, 2, 4)
MOST_GROWTH = 1.2
SETTLE_S = 0.5
DEADLINE_S = 600.0
TRAINER = TrainerSection(
    optimizer=CriticOptimizerSection(lr=1e-5), token_budget=1024, checkpoint_every=1_000_000, reload_on_save="none"
)


def measure(setup: ReloadSetup) -> list[dict[str, Any]]:
    """Return, for each server, size and repeat, the requests around an update and the update's begin and end."""
    settings = setup.settings
    model = under_load(settings.models)[-1]
    runs = []
    with ExitStack() as running:
        service = running.enter_context(CriticService(setup, "training", model, trainer=TRAINER))
        sidecar = running.enter_context(running_sidecar(service.config))
        psutil.Process(sidecar.process.pid).nice(LOWEST_PRIORITY)
        # PyTriton's critic infers and trains under one lock; PyTriton binds the model that trains last.
        arguments = {"critic": service.store.folder(0).absolute(), "trainer": TRAINER.model_dump(mode="json")}
        with on_core(setup.cores.server):
            locked = running.enter_context(
                running_child(
                    "server with one lock",
                    "support.pytriton:serve_critic",
                    arguments,
                    service.folder / "locked.log",
                    ready=f"/v2/models/{CRITIC_TRAIN}/ready",
                )
            )
        urls = {"ours": service.url, "one lock": locked.url}
        steps = dict.fromkeys(urls, 0)
        for repeat in range(settings.updates):
            for size in SIZES:
                payload = make_payload(settings.update_rows, copies=size)
                for server, url in urls.items():
                    steps[server] += 1
                    found = _one_update(setup, url, payload, steps[server])
                    runs.append({"server": server, "size": size, "repeat": repeat, "model": model, **found})
                    begin, end = found["window"]
                    setup.say(f"c, {server}: update x{size} of {payload[TOKENS].size:,} tokens, {end - begin:.1f} s")
    return runs


def make_payload(num_rows: int, *, copies: int) -> dict[str, np.ndarray]:
    """Return the trace's first rows, `copies` times, as a packed training payload."""
    arrays = noise_payload(make_trace(num_rows) * copies).arrays()
    return {name: array[:, None] if name == SEQUENCE_LENGTHS else array[None] for name, array in arrays.items()}


def _one_update(setup: ReloadSetup, url: str, payload: dict[str, np.ndarray], step: int) -> dict[str, Any]:
    setup.clients.ask("/start", {"url": url, "num_clients": setup.settings.update_clients})
    time.sleep(SETTLE_S)
    window = asyncio.run(_train(url, payload, step))
    return {"window": window, "samples": setup.clients.ask("/stop", {})}


async def _train(url: str, payload: dict[str, np.ndarray], step: int) -> Window:
    settings = ClientSection(deadline_s=DEADLINE_S, train_deadline_s=DEADLINE_S, retries=0, max_outage_s=0)
    async with TritonClient(url, settings) as client:
        begin = time.monotonic()
        await client.train(payload, run_id=RUN_ID, step=step)
        return begin, time.monotonic()


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return, by server and size, the p99 of requests in flight during an update, and the update's duration."""
    found: dict[str, Any] = {}
    for server in dict.fromkeys(run["server"] for run in runs):
        found[server] = {}
        for size in SIZES:
            chosen = [run for run in runs if (run["server"], run["size"]) == (server, size)]
            during = [Samples.of(run["samples"]).in_flight([run["window"]]) for run in chosen]
            latencies = np.concatenate(during) if during else np.zeros(0)
            found[server][f"x{size}"] = {
                "updates": len(chosen),
                "requests": int(latencies.size),
                "failed": sum(len(run["samples"]["failures"]) for run in chosen),
                "p99_ms": p99(latencies),
                "update_s": float(np.median([end - begin for begin, end in (run["window"] for run in chosen)])),
            }
    return found


def targets(summary: dict[str, Any]) -> list[Target]:
    """Return our largest p99 divided by our p99 during the smallest update, and our failed requests.

    The p99 of the server with one lock is only a detail.
    """
    ours, locked = summary["ours"], summary["one lock"]
    p99s = {size: of["p99_ms"] for size, of in ours.items()}
    known = [value for value in p99s.values() if value is not None]
    growth = ratio(max(known, default=None), p99s["x1"])
    detail = "p99 " + ", ".join(f"{size}: {value:,.0f} ms" for size, value in p99s.items() if value is not None)
    theirs = ", ".join(f"{size}: {of['p99_ms']:,.0f} ms" for size, of in locked.items() if of["p99_ms"] is not None)
    return [
        Target(
            "c: p99 while the critic trains, largest / x1", growth, None, MOST_GROWTH, f"{detail}; one lock {theirs}"
        ),
        Target("c: failed requests", sum(of["failed"] for of in ours.values()), None, 0, "ours"),
    ]
