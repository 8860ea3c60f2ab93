"""Reload benchmark, part b (publish): time until a written version is served, against the unavoidable steps alone."""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.reload.service import MOST_SIZE_UNDER_LOAD, CriticService, ReloadSetup, on_core
from benchmarks.reload.windows import ratio
from benchmarks.support.benchmark import Target
from benchmarks.support.children import output_of
from benchmarks.support.samples import medians
from benchmarks.support.usage import timed
from benchmarks.support.workload import model_size
from python_backend.checkpoints.inspection import WEIGHTS_FILE
from python_backend.store.weights import sha256_of
from tools.server.triton_home import find_tritonserver, server_environment

MOST_SWAP, MOST_TRITON = 1.25, 1.2
FRESH_TIMEOUT_S = 120.0
FRESH_PROCESS = """
import sys, time
from pathlib import Path
import torch, transformers
from python_backend.models.modeling import (load_critic, quiet_transformers)
quiet_transformers()
torch.set_num_threads(1)
load_critic(Path(sys.argv[1]))
print(time.monotonic())
"""


def measure(setup: ReloadSetup) -> dict[str, Any]:
    """Measure each model on an otherwise idle server; return samples by model."""
    return {model: _measure_model(setup, model) for model in setup.settings.models}


def _measure_model(setup: ReloadSetup, model: str) -> dict[str, Any]:
    settings = setup.settings
    publishes = settings.publishes if model_size(model) <= MOST_SIZE_UNDER_LOAD else settings.loads
    swaps: list[dict[str, Any]] = []
    loads: list[dict[str, Any]] = []
    with CriticService(setup, "publish", model) as service:
        service.publish()  # warm-up: the first one includes deferred imports
        for _ in range(publishes):
            done = service.publish()
            alone = service.as_publisher(functools.partial(_alone, service, done["version"]))
            swaps.append({**done, "to_served_ms": done["verify_ms"] + done["reload_ms"], **alone})
        setup.say(f"b, {model}: {publishes} publishes, each against hash, load and canary alone")
        folder = service.store.folder(service.store.current() or 0)
        for _ in range(settings.loads):
            with on_core(setup.cores.server):
                fresh_ms = _fresh_process_ms(folder)
            loads.append({"fresh_ms": fresh_ms, "reload_ms": service.triton_reload()["reload_ms"]})
        setup.say(f"b, {model}: {settings.loads} Triton reloads, each against a new process")
        return {"parameters": service.num_parameters, "swaps": swaps, "loads": loads}


def _alone(service: CriticService, version: int) -> dict[str, float]:
    """Return the milliseconds of each unavoidable step on its own: hash, load, canary."""
    from python_backend.models.canary import canary_row  # torch: not for --help

    folder = service.store.folder(version)
    hash_s, _ = timed(lambda: sha256_of(folder / WEIGHTS_FILE))
    load_s, critic = timed(lambda: service.critic.with_weights(folder))
    canary_s, _ = timed(lambda: critic.values([canary_row(critic)]))
    return {"hash_ms": hash_s * 1e3, "load_ms": load_s * 1e3, "canary_ms": canary_s * 1e3}


def _fresh_process_ms(folder: Path) -> float:
    """Return the milliseconds in which a new process imports torch and transformers and loads the critic."""
    environment = {**os.environ, **server_environment(find_tritonserver())}
    command = [sys.executable, "-c", FRESH_PROCESS, str(folder)]
    start = time.monotonic()  # the same clock in every process
    output = output_of(f"loading {folder} in a new process", command, env=environment, timeout=FRESH_TIMEOUT_S)
    return (float(output.split()[-1]) - start) * 1e3


def summarise(part: dict[str, Any]) -> dict[str, Any]:
    """Return medians and ratios by model."""
    found = {}
    for model, of in part.items():
        swap = medians(of["swaps"], "publish_ms", "to_served_ms", "reload_ms", "hash_ms", "load_ms", "canary_ms")
        load = medians(of["loads"], "reload_ms", "fresh_ms")
        alone = swap["hash_ms"] + swap["load_ms"] + swap["canary_ms"]
        found[model] = {
            "parameters": of["parameters"],
            "swap": {**swap, "alone_ms": alone, "ratio": ratio(swap["to_served_ms"], alone), "n": len(of["swaps"])},
            "triton": {**load, "ratio": ratio(load["reload_ms"], load["fresh_ms"]), "n": len(of["loads"])},
        }
    return found


def targets(summary: dict[str, Any]) -> list[Target]:
    """Return the targets for each model."""
    found = []
    for model, of in summary.items():
        swap, load = of["swap"], of["triton"]
        detail = (
            f"{swap['to_served_ms']:,.1f} ms; hash {swap['hash_ms']:,.1f}, load {swap['load_ms']:,.1f}, "
            f"canary {swap['canary_ms']:,.1f} ms; n {swap['n']}"
        )
        found.append(Target(f"b, {model}: swap / hash + load + canary", swap["ratio"], None, MOST_SWAP, detail))
        detail = f"{load['reload_ms']:,.0f} ms against {load['fresh_ms']:,.0f} ms; n {load['n']}"
        found.append(Target(f"b, {model}: Triton reload / new process", load["ratio"], None, MOST_TRITON, detail))
    return found
