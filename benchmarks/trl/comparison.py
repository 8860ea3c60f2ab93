"""Benchmark of critic-free training steps against TRL's, in matched rounds.

TRL runs in an environment of its own, which the first measurement sets up. Both sides train the same model on the same
prompts with the same reward function, full parameters in float32, one optimizer step per rollout; every response has
the same number of new tokens. Our side is `python -m actor` with its reward function behind a real tritonserver.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.support.benchmark import BenchError, Option, Record, Result, Target
from benchmarks.support.samples import grouped, in_turn, medians, ratio
from benchmarks.support.workload import SIZES
from benchmarks.trl.trainers import GROUP, prepare_cell, prepare_environment, prepare_model, running

OURS, TRL = "ours", "trl"
MOST_RATIO = 0.85
SMOLLM2 = "135m"
CELL = ("model", "algorithm", "rows", "new_tokens")
MOST_STEPS = 20  # per turn
Steps = Callable[[int], dict[str, Any]]
OPTIONS = {
    "models": Option(["7m", SMOLLM2], f"any of {SMOLLM2} (SmolLM2), {', '.join(SIZES)}", ["tiny"], (SMOLLM2, *SIZES)),
    "smollm2": Option(None, f"Hugging Face folder of SmolLM2-135M, for --models {SMOLLM2}", kind=Path),
    "algorithms": Option(["grpo", "rloo"], "any of grpo, rloo", quick=["grpo"], known=("grpo", "rloo")),
    "cells": Option(["16x32", "64x64"], f"rows x new tokens; rows are a multiple of {GROUP}", quick=["16x8"]),
    "contenders": Option([TRL, OURS], "trainers to measure; one alone for its profile", known=(TRL, OURS)),
    "rounds": Option(5, "turns of each contender in each cell", quick=1),
    "seconds": Option(10.0, f"duration of the faster trainer's turn, at most {MOST_STEPS} steps", quick=0.1),
    "warmup": Option(2, "unmeasured steps before the first round"),
    "threads": Option(2, "torch threads of each side"),
    "trl_micro_batch": Option(64, "rows per forward pass of TRL; gradients of more rows are accumulated"),
    "environment": Option(Path("runs/trl-environment"), "folder of TRL's environment; created if missing"),
}


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Measure all cells. Raises BenchError if a trainer fails, or if SmolLM2 is requested without its folder."""
    if SMOLLM2 in settings.models and settings.smollm2 is None:
        raise BenchError(f"--models {SMOLLM2} requires --smollm2 DIR, the model's folder; add it or drop {SMOLLM2}")
    theirs = prepare_environment(settings.environment, record.say) if TRL in settings.contenders else None
    for model in settings.models:
        checkpoint = prepare_model(record.out / "models", model, settings.smollm2)
        for rows, new_tokens in (map(int, cell.split("x")) for cell in settings.cells):
            for algorithm in settings.algorithms:
                cell = dict(zip(CELL, (model, algorithm, rows, new_tokens), strict=True))
                shared = prepare_cell(settings, record.out, cell, checkpoint)
                with contextlib.ExitStack() as stack:
                    steps: dict[str, Steps] = {}
                    for name in settings.contenders:
                        steps[name] = stack.enter_context(running(name, shared, theirs)).steps
                    take_turns(steps, settings, cell, record)


def take_turns(
    contenders: dict[str, Steps],
    settings: argparse.Namespace,
    cell: dict[str, Any],
    record: Record,
) -> None:
    """Warm up all contenders, then give each one turn per round, starting with a different one each time.

    Args:
        contenders: for each name, a function that runs a number of steps and returns the measured means.
        settings: `seconds` and the faster contender's last warm-up step determine the number of steps of all turns.
    """
    warm: dict[str, float] = {}
    for name, steps in contenders.items():
        for _ in range(max(1, settings.warmup)):
            warm[name] = steps(1)["seconds_per_step"]
        record.say(f"{cell_name(cell)}: {name} warmed up, {warm[name]:.2f} s a step")
    count = max(1, min(MOST_STEPS, round(settings.seconds / min(warm.values()))))
    for number, name in in_turn(list(contenders), settings.rounds):
        sample = contenders[name](count)
        record.add({**cell, "contender": name, "round": number, **sample})
        seconds = sample["seconds_per_step"]
        record.say(f"{cell_name(cell)}: round {number + 1}/{settings.rounds}, {name} {seconds:.2f} s a step")


def summarise(result: Result) -> list[dict[str, Any]]:
    """Return medians over the rounds for each cell and contender, with the seconds of each phase."""
    rows = []
    for key, own in grouped(result["samples"], *CELL, "contender").items():
        phases = {phase: statistics.median(s["phases"].get(phase, 0.0) for s in own) for phase in own[0]["phases"]}
        rows.append(
            {
                **dict(zip((*CELL, "contender"), key, strict=True)),
                **medians(own, "seconds_per_step", "cpu_seconds_per_step"),
                "peak_rss_mb": max(sample["peak_rss_mb"] for sample in own),
                "tokens": own[0]["tokens"],
                "phases": ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items()),
            }
        )
    return rows


def targets(result: Result) -> list[Target]:
    """Return, for each cell, our seconds per step divided by TRL's, and the same ratio of CPU seconds."""
    found = []
    for key, samples in grouped(result["samples"], *CELL).items():
        name = cell_name(dict(zip(CELL, key, strict=True)))
        found.append(
            Target(f"{name}: ours / TRL, seconds", ratio(samples, OURS, TRL, "seconds_per_step"), None, MOST_RATIO)
        )
        found.append(Target(f"{name}: ours / TRL, CPU time", ratio(samples, OURS, TRL, "cpu_seconds_per_step")))
    return found


def cell_name(cell: dict[str, Any]) -> str:
    """Return model, algorithm and size of a cell as text."""
    return f"{cell['model']} {cell['algorithm']} {cell['rows']}x{cell['new_tokens']}"
