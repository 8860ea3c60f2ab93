"""Check of a machine's GPU: whether everything works there, and how fast.

Each part runs in a process of its own with a time limit, so that no failure hides what the other parts find. Without a
GPU the same parts run on the CPU, with tiny models.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.benchmark import Option, Record, Result, Target
from python_backend.store.jsonl import read_jsonl
from tools.server.child import Child

PASSED, SKIPPED = "passed", "skipped"
BAD = MISSED, FAILED, TIMED_OUT = "OUTSIDE ITS LIMITS", "FAILED", "TIMED OUT"
SMALL_RUN = (
    "This run used tiny models, as each run without a GPU or with `--quick` does. It shows that the check and the code "
    "work here; **its speeds say nothing about a real card**."
)


PARTS: dict[str, tuple[str, int]] = {  # functions of `parts`: what their numbers mean, and most seconds
    "environment": ("The card, its driver, and what it does at best.", 60),
    "device_tests": ("The project's own tests of its GPU code (`tests/device`), on this device.", 120),
    "served_score": (
        "A served reward against transformers' forward pass of each row alone, in float32. The error is the largest of "
        "64 rows, in standard deviations of the scores; in bfloat16 it is compared with transformers' own error.",
        60,
    ),
    "scoring": (
        "Scoring by a reward model with random weights, 64 requests of mixed length in flight, by the serving code in "
        "one process. The share is the model's useful work (2 operations per parameter and token, and attention; no "
        "padding, no embeddings) divided by the rate of a large bfloat16 matrix product.",
        120,
    ),
    "tritonserver": ("The same requests as in `scoring`, to a real tritonserver.", 60),
    "swap": (
        "A new critic version is published while 8 clients request values: how long until it is served, what requests "
        "notice of it, and how much memory it takes, in units of the served weights.",
        60,
    ),
    "ppo_step": (
        "A PPO step with LoRA in bfloat16, the second one, phase by phase: policy, reference, reward, critic and both "
        "updates in one process on one device.",
        90,
    ),
    "planner": (
        "Memory that `tools run --dry-run` plans, divided by the measured peak of each role: all weights trained, in "
        "bfloat16 on a GPU.",
        120,
    ),
    "mixed_requests": (
        "Requests of tokens and texts, one in eight of them bad in one of eight ways. Each bad one must be refused, "
        "and each other one scored as if it were alone (in standard deviations of the scores).",
        60,
    ),
}
OPTIONS = {
    "device": Option("auto", "cuda, cpu, or auto: cuda if there is a GPU", known=("auto", "cuda", "cpu")),
    "parts": Option(list(PARTS), f"any of {', '.join(PARTS)}", known=PARTS),
    "minutes": Option(8.0, "time for all parts together; what is left then is skipped"),
    "patience": Option(1.0, "factor on the time limit of each part", quick=3.0),
    "tests": Option("tests/device", "arguments of pytest for device_tests"),
}


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Run the parts one after the other."""
    import torch

    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    small = settings.quick or device == "cpu"
    record.result |= {"device": device, "small": small}
    end = time.monotonic() + 60 * settings.minutes
    with tempfile.TemporaryDirectory() as scratch:
        job = {"device": device, "small": small, "scratch": scratch, "tests": settings.tests}
        for name in settings.parts:
            limit_s = min(settings.patience * PARTS[name][1], end - time.monotonic())
            sample = run_part(name, job, limit_s, record.out / f"{name}.log")
            record.add(sample)
            record.say(f"{name}: {' '.join([sample['state'], *sample['why'].splitlines()[-1:]])}")


def run_part(name: str, job: Mapping[str, Any], limit_s: float, log: Path) -> dict[str, Any]:
    """Run one part in a process of its own, which ends with its descendants at the limit; return its sample."""
    found = log.with_suffix(".jsonl")
    found.unlink(missing_ok=True)
    start = time.monotonic()
    child = Child(name, ["benchmarks.gpu.parts", name, json.dumps(job), str(found)], log, {})
    why = ""
    try:
        state = FAILED if child.process.wait(max(0.0, limit_s)) else PASSED
    except subprocess.TimeoutExpired:
        state, why = TIMED_OUT, f"it did not end within {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()
    rows = read_jsonl(found)
    verdicts = {Target(**row).verdict for row in rows}
    if state == FAILED:
        why = child.obituary()
    elif state == PASSED and "miss" in verdicts:
        state = MISSED
    elif state == PASSED and verdicts == {"not measured"}:
        state, why = SKIPPED, rows[0]["detail"]
    return {"part": name, "state": state, "why": why, "seconds": time.monotonic() - start, "rows": rows}


def summarise(result: Result) -> list[dict[str, Any]]:
    """Return each part's state and time."""
    return [{key: sample[key] for key in ("part", "state", "seconds", "why")} for sample in result["samples"]]


def targets(result: Result) -> list[Target]:
    """Return all numbers, those without limits included."""
    return [Target(**row) for sample in result["samples"] for row in sample["rows"]]


def has_failed(result: Result) -> bool:
    """Return whether a part has failed or taken too long, or a number lies outside its limits."""
    return any(sample["state"] in BAD for sample in result["samples"])


def sections(result: Result) -> list[str | list[dict[str, Any]]]:
    """Return the texts and tables of report.md."""
    states = {sample["part"]: sample["state"] for sample in result["samples"]}
    bad = [part for part, state in states.items() if state in BAD]
    head = {
        "date": result["date"],
        "device": result["device"],
        "GPUs by nvidia-smi": "; ".join(result["machine"]["gpus"]) or "none",
        "host": "{processor}, {cores} cores, {memory_gb} GiB, {system}".format(**result["machine"]),
        "versions": ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
    }
    pieces: list[str | list[dict[str, Any]]] = [
        "# GPU check",
        f"**Not passed: {', '.join(bad)}.**" if bad else "**Passed**: all that is not listed as skipped.",
        SMALL_RUN if result["small"] else "",
        "\n".join(f"* {name}: {value}" for name, value in head.items()),
        [{**row, "why": row["why"].splitlines()[-1] if row["why"] else ""} for row in result["summary"]],
    ]
    for sample in result["samples"]:
        pieces += [f"## {sample['part']}: {sample['state']}", PARTS[sample["part"]][0]]
        if sample["state"] != SKIPPED:
            pieces += [_table(sample["rows"]), f"```\n{sample['why']}\n```" if sample["why"] else ""]
    return pieces


def _table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "measured": target.name,
            "value": target.value,
            "must be": target.limits,
            "verdict": target.verdict if target.limits else "",
            "note": target.detail,
        }
        for target in (Target(**row) for row in rows)
    ]
