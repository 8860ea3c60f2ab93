"""Reload benchmark, part c (training): value requests while the critic trains, with updates of three sizes."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import psutil

from benchmarks.reload.service import LOWEST_PRIORITY, RUN_ID, CriticService, ReloadSetup, under_load
from benchmarks.reload.windows import Samples, p99, ratio
from benchmarks.support.benchmark import Target
from benchmarks.support.children import running_sidecar
from benchmarks.support.samples import grouped, median_of
from benchmarks.support.workload import make_trace, model_title, noise_payload
from python_backend.client.client import TritonClient
from python_backend.config import ClientSection, CriticOptimizerSection, TrainerSection
from python_backend.wire.contract import SEQUENCE_LENGTHS

SIZES = (1, 2, 4)
MOST_GROWTH = 1.2
SETTLE_S = 0.5
DEADLINE_S = 600.0
TRAINER = TrainerSection(
    optimizer=CriticOptimizerSection(lr=1e-5), token_budget=1024, checkpoint_every=1_000_000, reload_on_save="none"
)


def measure(setup: ReloadSetup) -> list[dict[str, Any]]:
    """Return, for each size and repeat, the requests around an update and the update's begin and end."""
    model = under_load(setup.settings.models)[-1]
    runs: list[dict[str, Any]] = []
    with ExitStack() as running:
        service = running.enter_context(CriticService(setup, "training", model, trainer=TRAINER))
        sidecar = running.enter_context(running_sidecar(service.config))
        psutil.Process(sidecar.process.pid).nice(LOWEST_PRIORITY)
        for size in SIZES * setup.settings.updates:
            payload = make_payload(setup.settings.update_rows, copies=size)
            setup.clients.ask("/start", {"url": service.url, "num_clients": setup.settings.update_clients})
            time.sleep(SETTLE_S)
            begin, end = asyncio.run(_train(service.url, payload, len(runs) + 1))
            samples = setup.clients.ask("/stop", {})
            runs.append({"model": model, "size": size, "window": (begin, end), "samples": samples})
            setup.say(f"c: update x{size}, {end - begin:.1f} s")
    return runs


def make_payload(num_rows: int, *, copies: int) -> dict[str, np.ndarray]:
    """Return the trace's first rows, `copies` times, as a packed training payload."""
    arrays = noise_payload(make_trace(num_rows) * copies).arrays()
    return {name: array[:, None] if name == SEQUENCE_LENGTHS else array[None] for name, array in arrays.items()}


async def _train(url: str, payload: dict[str, np.ndarray], step: int) -> tuple[float, float]:
    settings = ClientSection(deadline_s=DEADLINE_S, train_deadline_s=DEADLINE_S, retries=0, max_outage_s=0)
    async with TritonClient(url, settings) as client:
        begin = time.monotonic()
        await client.train(payload, run_id=RUN_ID, step=step)
        return begin, time.monotonic()


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return, by size, the p99 of requests in flight during an update, and the update's duration."""
    found: dict[str, Any] = {}
    for (size,), chosen in grouped(runs, "size").items():
        latencies = np.concatenate([Samples.of(run["samples"]).in_flight([run["window"]]) for run in chosen])
        found[f"x{size}"] = {
            "updates": len(chosen),
            "requests": int(latencies.size),
            "failed": sum(len(run["samples"]["failures"]) for run in chosen),
            "p99_ms": p99(latencies),
            "update_s": median_of(end - begin for begin, end in (run["window"] for run in chosen)),
        }
    return found


def targets(summary: dict[str, Any]) -> list[Target]:
    """Return the largest p99 divided by the p99 during the smallest update, and the failed requests."""
    p99s = {size: of["p99_ms"] for size, of in summary.items() if of["p99_ms"] is not None}
    growth = ratio(max(p99s.values(), default=None), p99s.get("x1"))
    detail = "p99 " + ", ".join(f"{size}: {value:,.0f} ms" for size, value in p99s.items())
    return [
        Target("c: p99 while the critic trains, largest / x1", growth, None, MOST_GROWTH, detail),
        Target("c: failed requests", sum(of["failed"] for of in summary.values()), None, 0),
    ]


def draw(axes: Any, runs: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Draw the p99 for each size of the update as bars, and the duration of the update as a line."""
    for place, of in enumerate(summary.values()):
        bar = axes.bar(place, of["p99_ms"] or 0.0, 0.5, color="#0072B2")
        axes.bar_label(bar, fmt="%.0f", padding=2)
        axes.hlines(
            of["update_s"] * 1e3, place - 0.25, place + 0.25, color="#3C4043", label=None if place else "the update"
        )
    title = f"While the critic trains, {model_title(runs[0]['model'])}"
    axes.set(yscale="log", ylabel="p99 of value requests (ms)", title=title)
    axes.set_xticks(range(len(summary)), [f"update {size}" for size in summary])
    axes.legend()
