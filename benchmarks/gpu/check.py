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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.support.benchmark import Option, Record, Result, Target
from python_backend.store.jsonl import read_jsonl
from tools.server.child import Child

PASSED, SKIPPED = "passed", "skipped"
BAD = MISSED, FAILED, TIMED_OUT = "OUTSIDE ITS LIMITS", "FAILED", "TIMED OUT"
SMALL_RUN = "tiny models, as without a GPU or with `--quick`: **its speeds say nothing about a real card**"

PARTS = {  # functions of `parts`, and the most seconds of each
    "environment": 60,
    "device_tests": 120,
    "served_score": 60,
    "scoring": 120,
    "tritonserver": 60,
    "swap": 60,
    "ppo_step": 90,
    "planner": 120,
    "mixed_requests": 60,
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
    record.result |= {"device": device, "note": SMALL_RUN if small else ""}
    end = time.monotonic() + 60 * settings.minutes
    with tempfile.TemporaryDirectory() as scratch:
        job = {"device": device, "small": small, "scratch": scratch, "tests": settings.tests}
        for name in settings.parts:
            limit_s = min(settings.patience * PARTS[name], end - time.monotonic())
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
    """Return each part's state and time, and the last line of what went wrong."""
    return [
        {
            "part": sample["part"],
            "state": sample["state"],
            "seconds": sample["seconds"],
            "why": "".join(sample["why"].splitlines()[-1:]),
        }
        for sample in result["samples"]
    ]


def targets(result: Result) -> list[Target]:
    """Return all numbers, those without limits included."""
    return [
        Target(**{**row, "name": f"{sample['part']}: {row['name']}"})
        for sample in result["samples"]
        for row in sample["rows"]
    ]


def has_failed(result: Result) -> bool:
    """Return whether a part has failed or taken too long, or a number lies outside its limits."""
    return any(sample["state"] in BAD for sample in result["samples"])
