"""Reload benchmark, part d (leak): growth of memory, handles, threads and disk usage over many reloads."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.reload.critic_service import CriticService
from benchmarks.reload.setup import ReloadSetup, under_load
from benchmarks.support.benchmark import BenchError, Target
from python_backend.wire.contract import CRITIC
from tools.server.shared_memory import SHARED_MEMORY
from tools.server.tritonserver import TritonServer

EVERY = 10
WARM_UP = 50  # reloads that the slope leaves out; fewer if few reloads are measured
MOST_SLOPE_KB = 20.0
ENDING_TIMEOUT_S = 60.0
# Allowed growth from the first to the last fifth of the samples: a sample may include short-lived handles or threads.
FLAT = {"handles": 3, "threads": 2, "shm_bytes": 1 << 20}


def measure(setup: ReloadSetup) -> dict[str, Any]:
    """Take a sample at every tenth reload of both kinds, each kind on its own server, under light load."""
    settings = setup.settings
    return {
        "swap": _measure_kind(setup, "swap", settings.leak_swaps, lambda service: service.publish()),
        "triton": _measure_kind(setup, "triton", settings.leak_triton_reloads, lambda service: service.triton_reload()),
    }


def _measure_kind(setup: ReloadSetup, kind: str, total: int, reload: Callable[[CriticService], Any]) -> dict[str, Any]:
    samples = []
    with CriticService(setup, f"leak-{kind}", under_load(setup.settings.models)[0]) as service:
        setup.clients.ask("/start", {"url": service.url, "num_clients": setup.settings.leak_clients})
        for number in range(total + 1):
            if number:
                reload(service)
            if number % EVERY == 0 or number == total:
                samples.append({"reloads": number, **look(service.server, service.config.run.weights_dir)})
            if number % max(1, total // 5) == 0:
                setup.say(f"d: {number} of {total} {kind} reloads")
        seen = setup.clients.ask("/stop", {})
    return {"samples": samples, "requests": len(seen["start_s"]), "failed": len(seen["failures"])}


def look(running: TritonServer, weights: Path) -> dict[str, float]:
    """Return memory of server and stub (kB), handles and threads of both, and bytes in /dev/shm and in `weights`."""
    server, stub = psutil.Process(running.pid), _only_stub(running)
    return {
        "server_rss_kb": server.memory_info().rss / 1024,
        "stub_rss_kb": stub.memory_info().rss / 1024,
        "handles": server.num_fds() + stub.num_fds(),
        "threads": server.num_threads() + stub.num_threads(),
        "shm_bytes": _disk_bytes(SHARED_MEMORY.glob(f"rlhf-{os.getpid()}-*")),
        "disk_bytes": _disk_bytes(weights.rglob("*")),
    }


def _only_stub(server: TritonServer) -> psutil.Process:
    """Wait until the critic's previous process, which outlives Triton's load call, has ended; return the new one."""
    deadline = time.monotonic() + ENDING_TIMEOUT_S
    while len(stubs := server.processes()[CRITIC]) != 1:
        if time.monotonic() > deadline:
            raise BenchError(f"the critic has {len(stubs)} processes {ENDING_TIMEOUT_S:g} s after a reload, expected 1")
        time.sleep(0.05)
    return stubs[0]


def _disk_bytes(paths: Any) -> int:
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            total += path.stat().st_blocks * 512
    return total


def summarise(part: dict[str, Any]) -> dict[str, Any]:
    """Return slopes of memory (kB per reload), and growth of other resources from the first to the last fifth."""
    return {kind: _summarise_kind(found) for kind, found in part.items()}


def _summarise_kind(found: dict[str, Any]) -> dict[str, Any]:
    warm = min(WARM_UP, found["samples"][-1]["reloads"] // 5)
    samples = [sample for sample in found["samples"] if sample["reloads"] >= warm]
    reloads = [sample["reloads"] for sample in samples]
    fifth = max(1, len(samples) // 5)
    slopes = {f"{who}_slope_kb": _slope(samples, f"{who}_rss_kb") for who in ("server", "stub")}
    growth = {
        f"{what}_growth": statistics.median(sample[what] for sample in samples[-fifth:])
        - statistics.median(sample[what] for sample in samples[:fifth])
        for what in (*FLAT, "disk_bytes")
    }
    last = {name: samples[-1][name] for name in ("server_rss_kb", "stub_rss_kb", "disk_bytes")}
    return {"reloads": reloads[-1], "failed": found["failed"], **slopes, **growth, **last}


def _slope(samples: list[dict[str, Any]], key: str) -> float | None:
    if len(samples) < 2:
        return None
    return statistics.linear_regression([s["reloads"] for s in samples], [s[key] for s in samples]).slope


def targets(summary: dict[str, Any]) -> list[Target]:
    """Return the targets. Each Triton reload starts a new stub, so the stub's memory has a target only for swaps."""
    found = []
    for kind, of in summary.items():
        for who in ("server", "stub") if kind == "swap" else ("server",):
            name = f"d: {kind}, memory of the {who}, kB a reload"
            detail = f"{of[f'{who}_rss_kb'] / 1024:,.1f} MB after {of['reloads']:,} reloads"
            found.append(Target(name, of[f"{who}_slope_kb"], None, MOST_SLOPE_KB, detail))
        over = [what for what, most in FLAT.items() if of[f"{what}_growth"] > most]
        over += ["disk_bytes"] if of["disk_bytes_growth"] > of["disk_bytes"] / 4 else []
        grown = ", ".join(f"{what} {of[f'{what}_growth']:+,.0f}" for what in (*FLAT, "disk_bytes"))
        found.append(Target(f"d: {kind}, other resources that grew, of 4", len(over), None, 0, grown))
    return found
