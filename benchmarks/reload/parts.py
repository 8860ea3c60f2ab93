"""Benchmark of reloads of the critic (or reward model): their cost for clients, and the time until one is served.

Server and clients have one core each.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.reload import load, publish, training
from benchmarks.reload.service import SERVICES, Cores, ReloadSetup, on_core
from benchmarks.support.benchmark import Option, Record, Result, Target
from benchmarks.support.children import running_child
from benchmarks.support.workload import SIZES
from tools.report.curves import figure_of

PARTS: dict[str, tuple[str, ModuleType]] = {
    "load": ("a", load),
    "publish": ("b", publish),
    "training": ("c", training),
}
"""Letter and module of each part; a module has `measure(setup)`, `summarise(part)`, `targets(summary)`, and
`draw(axes, part, summary)` if it has a picture."""
LETTERS = "abc"
OPTIONS = {
    "parts": Option(
        list(LETTERS),
        "a: clients during reloads, b: time until served, c: clients during updates",
        known=LETTERS,
    ),
    "model": Option("critic", "model that is reloaded in part a: critic or reward", known=tuple(SERVICES)),
    "models": Option(["1m", "7m", "110m"], f"any of {', '.join(SIZES)}; above 7m only in b", ["tiny"], SIZES),
    "swaps": Option(200, "part a: number of swaps", quick=4),
    "triton_reloads": Option(50, "part a: number of Triton reloads", quick=1),
    "clients": Option(32, "part a: scoring requests in flight while the model is reloaded", quick=4),
    "cycles": Option(25, "part a: cycles of quiet, swaps, quiet, Triton reloads", quick=1),
    "quiet_s": Option(3.0, "part a: seconds of each quiet block", quick=0.5),
    "publishes": Option(20, "part b: publishes of each model up to 7 million parameters", quick=2),
    "loads": Option(7, "part b: Triton reloads of each model, and publishes of larger models", quick=1),
    "update_clients": Option(8, "part c: value requests in flight while the critic trains", quick=2),
    "update_rows": Option(
        32, "part c: rows of the smallest update; the others have two and four times as many", quick=4
    ),
    "updates": Option(3, "part c: updates of each size on each server", quick=1),
}


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Measure the parts in turn, and save each as soon as it is done."""
    record.result["parts"] = {}
    cores, servers = Cores.of_machine(), record.out / "servers"
    record.say(f"cores: server {cores.server}, clients {cores.clients}, trainer {cores.trainer}")
    with contextlib.ExitStack() as running:
        with on_core(cores.clients):
            clients = running.enter_context(
                running_child("load generator", "reload.clients:serve", {}, servers / "clients.log")
            )
        running.enter_context(on_core(*cores.trainer))
        setup = ReloadSetup(settings, servers, cores, clients, record.say)
        for name, (letter, part) in PARTS.items():
            if letter in settings.parts:
                record.say(f"{letter}: {name}")
                record.result["parts"][name] = part.measure(setup)
                record.save()
    shutil.rmtree(servers)


def summarise(result: Result) -> dict[str, Any]:
    """Return the summary of each measured part."""
    return {name: part.summarise(result["parts"][name]) for name, (_, part) in PARTS.items() if name in result["parts"]}


def targets(result: Result) -> list[Target]:
    """Return the targets of each measured part."""
    return [target for name, summary in result["summary"].items() for target in PARTS[name][1].targets(summary)]


def draw(result: Result, out: Path) -> None:
    """Draw latency over time and p99 while training, for the parts that were measured."""
    drawn = [name for name in result["parts"] if hasattr(PARTS[name][1], "draw")]
    if drawn:
        with figure_of(out / "reload.png", (11, 4.1 * len(drawn))) as figure:
            for axes, name in zip(figure.subplots(len(drawn), 1, squeeze=False).flat, drawn, strict=True):
                PARTS[name][1].draw(axes, result["parts"][name], result["summary"][name])
