"""`python -m tools bench trl --out DIR`: critic-free training steps beside TRL's, in matched rounds.

TRL runs in an environment of its own, which the first measurement makes. Both sides train the same model on the same
prompts with the same reward function, full parameters in float32, one optimizer step per rollout; every response has
the same number of new tokens. Our side is `python -m actor` with its reward function behind a real tritonserver.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from python_backend.durable import write_json
from tools.bench.machine import describe_machine, describe_versions, now_utc
from tools.bench.trace import SIZES
from tools.bench.trl_stage import GROUP, Environment, prepare_cell, prepare_environment, prepare_model, running
from tools.bench.trl_turns import ContenderFailed

OURS, TRL = "ours", "trl"
BAR = 0.85
SMOLLM2 = "135m"
Steps = Callable[[int], dict[str, Any]]
Note = Callable[[dict[str, Any]], None]
Log = Callable[[str], None]
MOST_STEPS = 20  # of a turn
QUICK: dict[str, Any] = {"models": "tiny", "cells": "16x8", "algorithms": "grpo", "rounds": 1, "seconds": 0.1}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; 0 when done, whatever the bar says, 1 if a trainer failed."""
    arguments = parse_arguments(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        print(report(measure(arguments)))
    except ContenderFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(prog="python -m tools bench trl", description="Training steps beside TRL's.")
    parser.add_argument("--out", type=Path, required=True, help="folder of result.json")
    parser.add_argument("--models", default=f"7m,{SMOLLM2}", help=f"of {SMOLLM2} (SmolLM2), {', '.join(SIZES)}")
    parser.add_argument("--smollm2", type=Path, metavar="DIR", help=f"SmolLM2-135M as a Hugging Face folder: {SMOLLM2}")
    parser.add_argument("--algorithms", default="grpo,rloo")
    parser.add_argument("--cells", default="16x32,64x64", help=f"rows x new tokens; rows are a multiple of {GROUP}")
    parser.add_argument("--contenders", default=f"{TRL},{OURS}", help="one alone shows its profile")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender in each cell")
    parser.add_argument("--seconds", type=float, default=10.0, help="least length of a turn, in whole steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first round")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of each side")
    parser.add_argument("--trl-micro-batch", type=int, default=64, help="rows of TRL's forwards; accumulated beyond")
    parser.add_argument(
        "--environment", type=Path, default=Path("runs/trl-environment"), help="of TRL; made if missing"
    )
    parser.add_argument("--quick", action="store_true", help="seconds only: shows that it works, measures nothing")
    if "--quick" in (argv if argv is not None else sys.argv):
        parser.set_defaults(**QUICK)
    arguments = parser.parse_args(argv)
    unknown = set(arguments.models.split(",")) - {SMOLLM2, *SIZES}
    if unknown:
        parser.error(f"--models: unknown {sorted(unknown)[0]!r}; known: {SMOLLM2}, {', '.join(SIZES)}")
    if SMOLLM2 in arguments.models.split(",") and arguments.smollm2 is None:
        parser.error(f"--models {SMOLLM2} needs --smollm2 DIR, the model's folder; or leave it out of --models")
    return arguments


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Samples of all cells, written to result.json after each round."""
    contenders = arguments.contenders.split(",")
    theirs = prepare_environment(arguments.environment, say) if TRL in contenders else None
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    result: dict[str, Any] = {
        "date": now_utc(), "machine": describe_machine(), "versions": describe_versions(),
        "trl_versions": None if theirs is None else theirs.versions,
        "ppo": "not compared: this release of TRL has no trl.experimental.ppo", "settings": settings, "samples": [],
    }  # fmt: skip
    cells = [
        {"model": model, "algorithm": algorithm, "rows": rows, "new_tokens": new_tokens}
        for model in arguments.models.split(",")
        for rows, new_tokens in (map(int, cell.split("x")) for cell in arguments.cells.split(","))
        for algorithm in arguments.algorithms.split(",")
    ]
    for number, cell in enumerate(cells, 1):
        log = functools.partial(_say_of, f"cell {number}/{len(cells)}: {cell_name(cell)}")
        measure_cell(arguments, cell, theirs, functools.partial(_note, result, arguments.out, cell), log)
    return result


def measure_cell(
    arguments: argparse.Namespace, cell: dict[str, Any], theirs: Environment | None, note: Note, log: Log
) -> None:
    """Start all contenders of a cell, give them their turns, and stop them."""
    checkpoint = prepare_model(arguments.out / "models", cell["model"], arguments.smollm2)
    settings = prepare_cell(arguments, cell, checkpoint)
    with contextlib.ExitStack() as stack:
        started: dict[str, Steps] = {
            name: stack.enter_context(running(name, settings, theirs)).steps for name in arguments.contenders.split(",")
        }
        take_turns(
            started, rounds=arguments.rounds, warmup=arguments.warmup, seconds=arguments.seconds, note=note, log=log
        )


def take_turns(contenders: dict[str, Steps], *, rounds: int, warmup: int, seconds: float, note: Note, log: Log) -> None:
    """Warm up all contenders, then give each a turn per round, a different one first each time.

    Args:
        contenders: take so many steps and return the measured means.
        seconds: least length of a turn, by the faster contender's last warm-up step.
        note: receives each sample.
    """
    warm: dict[str, float] = {}
    for name, steps in contenders.items():
        for _ in range(max(1, warmup)):
            warm[name] = steps(1)["seconds_per_step"]
        log(f"{name} warmed up, {warm[name]:.2f} s a step")
    count = max(1, min(MOST_STEPS, round(seconds / min(warm.values()))))
    names = list(contenders)
    start = time.monotonic()
    for number in range(rounds):
        order = [*names[number % len(names) :], *names[: number % len(names)]]
        samples = {name: {"contender": name, "round": number, **contenders[name](count)} for name in order}
        for sample in samples.values():
            note(sample)
        left = (time.monotonic() - start) / (number + 1) * (rounds - number - 1)
        times = ", ".join(f"{name} {samples[name]['seconds_per_step']:.2f} s" for name in names)
        log(f"round {number + 1}/{rounds}: {times} a step; about {left / 60:.1f} min left for this cell")


def summarise(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per cell: medians over its rounds, and the median over the rounds of ours by TRL's seconds."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        cells.setdefault(cell_name(sample), []).append(sample)
    return [summarise_cell(own) for own in cells.values()]


def summarise_cell(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of one cell; ratios are ours by TRL's."""
    summary: dict[str, Any] = {name: samples[0][name] for name in ("model", "algorithm", "rows", "new_tokens")}
    for name in dict.fromkeys(sample["contender"] for sample in samples):
        own = [sample for sample in samples if sample["contender"] == name]
        phases = {phase: statistics.median(s["phases"].get(phase, 0.0) for s in own) for phase in own[0]["phases"]}
        summary[name] = {
            "seconds_per_step": statistics.median(sample["seconds_per_step"] for sample in own),
            "cpu_seconds_per_step": statistics.median(sample["cpu_seconds_per_step"] for sample in own),
            "peak_rss_mb": max(sample["peak_rss_mb"] for sample in own), "tokens": own[0]["tokens"], "phases": phases,
        }  # fmt: skip
    summary["ratio"] = ratio(samples, "seconds_per_step")
    summary["cpu_ratio"] = ratio(samples, "cpu_seconds_per_step")
    return summary


def ratio(samples: Sequence[dict[str, Any]], key: str) -> float | None:
    """Median over the rounds of ours by TRL's; None where a contender is missing."""
    by_turn = {(sample["contender"], sample["round"]): sample[key] for sample in samples}
    rounds = [number for name, number in by_turn if name == OURS and (TRL, number) in by_turn]
    ratios = [by_turn[OURS, number] / by_turn[TRL, number] for number in rounds]
    return statistics.median(ratios) if ratios else None


def report(result: dict[str, Any]) -> str:
    """Seconds per step of both, the ratio against the bar, CPU seconds, peak memory, and each side's phases."""
    lines = [f"ours / TRL, seconds per step; bar <= {BAR:g}; {result['settings']['threads']} threads"]
    for row in summarise(result["samples"]):
        own = ", ".join(
            f"{name} {row[name]['seconds_per_step']:.2f} s ({row[name]['cpu_seconds_per_step']:.2f} s CPU, "
            f"{row[name]['peak_rss_mb']:,.0f} MB)"
            for name in (TRL, OURS)
            if name in row
        )
        verdict = ""
        if row["ratio"] is not None:
            verdict = f"  {row['ratio']:.2f} {'PASS' if row['ratio'] <= BAR else 'MISS'}, CPU {row['cpu_ratio']:.2f}"
        lines.append(f"{cell_name(row):<18}{own}{verdict}")
        for name in (TRL, OURS):
            if name in row:
                phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in row[name]["phases"].items())
                lines.append(f"    {name}: {phases}")
    return "\n".join([*lines, f"PPO {result['ppo']}"])


def cell_name(cell: dict[str, Any]) -> str:
    """Model, algorithm and size, in words."""
    return f"{cell['model']} {cell['algorithm']} {cell['rows']}x{cell['new_tokens']}"


def _note(result: dict[str, Any], out: Path, cell: dict[str, Any], sample: dict[str, Any]) -> None:
    result["samples"].append({**cell, **sample})
    write_json(out / "result.json", result, durable=False)


def _say_of(what: str, line: str) -> None:
    say(f"{what}: {line}")


def say(line: str) -> None:
    """Progress, as it is made."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
