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
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.benchmark import Option, Record, Result, Target

PASSED, MISSED, FAILED, TIMED_OUT, SKIPPED = "passed", "MISSED", "FAILED", "TIMED OUT", "skipped"
LOG_LINES = 15  # of a failed part, in the report


@dataclass(frozen=True)
class Part:
    """One part of the check."""

    shows: str
    """What its numbers mean, for the report."""
    limit_s: int
    module: str = "parts"
    """Module of this package with a function of the part's name."""


PARTS = {
    "environment": Part("The card, its driver, the packages, and what the card does at best.", 60),
    "device_tests": Part("The project's own tests of its GPU code (`tests/device`), on this device.", 120),
    "served_score": Part(
        "A served reward against transformers' forward pass of each row alone. The error is the largest of 64 rows, in "
        "standard deviations of the scores; in bfloat16 it is compared with transformers' own error.",
        60,
    ),
    "throughput": Part(
        "Scoring by a reward model with random weights, always 64 requests of mixed length in flight: by the serving "
        "code in this process, and behind a real tritonserver. The share is the model's useful work (2 operations per "
        "parameter and token, and attention; no padding) divided by the rate of a large bfloat16 matrix product.",
        150,
    ),
    "swap": Part(
        "A new critic version while clients request values. The pause is the longest time without any reply; memory is "
        "in units of the served weights.",
        60,
    ),
    "decoding": Part(
        "Generation by the policy, all responses at once: tokens of responses per second.", 90, "training"
    ),
    "ppo_step": Part(
        "A PPO step with LoRA in bfloat16, the second one, phase by phase: policy, reference, reward, critic and both "
        "updates in one process on one device.",
        90,
        "training",
    ),
    "planner": Part("Memory that `tools run --dry-run` plans, divided by the measured peak of each role.", 120),
    "mixed_requests": Part(
        "1,000 requests of tokens and texts, one in eight of them bad in one of eight ways. Each bad one must be "
        "refused, and each other one scored as if it were alone.",
        90,
    ),
}
OPTIONS = {
    "device": Option("auto", "cuda, cpu, or auto: cuda if there is a GPU", known=("auto", "cuda", "cpu")),
    "parts": Option(list(PARTS), f"any of {', '.join(PARTS)}", known=PARTS),
    "minutes": Option(8.0, "time for all parts together; what is left then is skipped"),
    "patience": Option(1.0, "factor on the time limit of each part"),
    "tests": Option("tests/device", "arguments of pytest for device_tests"),
}


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Run the parts one after the other."""
    import torch

    available = "cuda" if torch.cuda.is_available() else "cpu"
    device = available if settings.device == "auto" else settings.device
    small = settings.quick or device == "cpu"
    record.result["device"], record.result["small"], record.result["facts"] = device, small, {}
    end = time.monotonic() + 60 * settings.minutes
    with tempfile.TemporaryDirectory() as scratch:
        job = {"device": device, "small": small, "tests": settings.tests, "scratch": scratch}
        for name in settings.parts:
            record.say(f"{name} ...")
            limit_s = min(settings.patience * PARTS[name].limit_s, end - time.monotonic())
            sample = run_part(name, job, limit_s, record.out / f"{name}.log")
            record.result["facts"] |= sample.pop("facts")
            record.add(sample)
            for target in map(_target, sample["rows"]):
                record.say(f"    {target.name}: {target.detail if target.value is None else f'{target.value:.4g}'}")
            record.say(f"{name}: {sample['state']} {sample['why'].strip().rpartition(chr(10))[2]}")


def run_part(name: str, job: Mapping[str, Any], limit_s: float, log: Path) -> dict[str, Any]:
    """Run one part in a process of its own, which ends with its descendants at the limit; return its sample."""
    if limit_s <= 0:
        return {"part": name, "state": SKIPPED, "why": "no time was left", "seconds": 0.0, "rows": [], "facts": {}}
    command = [sys.executable, "-m", f"benchmarks.gpu.{PARTS[name].module}", name, json.dumps(job)]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as found, log.open("w") as errors:
        process = subprocess.Popen(command, stdout=found, stderr=errors, start_new_session=True)
        try:
            state = FAILED if process.wait(limit_s) else PASSED
        except subprocess.TimeoutExpired:
            state = TIMED_OUT
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found.seek(0)
        lines = [json.loads(line) for line in found if line.endswith("\n")]
    rows = [line for line in lines if "name" in line]
    facts = {key: value for line in lines if "name" not in line for key, value in line.items()}
    why = facts.pop("skipped", "")
    if state == PASSED:
        state = MISSED if any(_target(row).verdict == "miss" for row in rows) else SKIPPED if why else PASSED
    elif state == FAILED:
        why = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    else:
        why = f"it did not end within {limit_s:.0f} s"
    seconds = time.monotonic() - start
    return {"part": name, "state": state, "why": why, "seconds": seconds, "rows": rows, "facts": facts}


def summarise(result: Result) -> list[dict[str, Any]]:
    """Return each part's state and time."""
    return [
        {
            "part": sample["part"],
            "state": sample["state"],
            "seconds": sample["seconds"],
            "within the limits": f"{sum(target.verdict == 'pass' for target in judged)} of {len(judged)}"
            if judged
            else "",
        }
        for sample in result["samples"]
        for judged in [[t for t in map(_target, sample["rows"]) if t.verdict in ("pass", "miss")]]
    ]


def targets(result: Result) -> list[Target]:
    """Return all numbers, those without limits included."""
    return [_target(row) for sample in result["samples"] for row in sample["rows"]]


def has_failed(result: Result) -> bool:
    """Return whether a part has failed or taken too long, or a number lies outside its limits."""
    return any(sample["state"] not in (PASSED, SKIPPED) for sample in result["samples"])


def sections(result: Result) -> list[str | list[dict[str, Any]]]:
    """Return the texts and tables of report.md."""
    bad = [sample["part"] for sample in result["samples"] if sample["state"] not in (PASSED, SKIPPED)]
    facts, versions = result["facts"], result["versions"]
    head = [
        "# GPU check",
        f"**{'Failed: ' + ', '.join(bad) if bad else 'Everything that ran has passed.'}**",
        "\n".join(
            f"* {name}: {value}"
            for name, value in {
                "Date": result["date"],
                "Device": facts.get("card", result["device"]),
                **{name: value for name, value in facts.items() if name != "card"},
                "Host": "{processor}, {cores} cores, {memory_gb} GiB, {system}".format(**result["machine"]),
                "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
            }.items()
        ),
    ]
    if result["small"]:
        head.append(
            "This run used tiny models, as every run without a GPU or with `--quick` does. It shows that the check and "
            "the code work on this device; **its rates say nothing about a real card**."
        )
    return [*head, result["summary"], *(piece for sample in result["samples"] for piece in _section(sample))]


def _section(sample: Mapping[str, Any]) -> Sequence[str | list[dict[str, Any]]]:
    name, state, why = sample["part"], sample["state"], sample["why"]
    rows = [
        {
            "measured": target.name,
            "value": target.value,
            "must be": target.limits,
            "": {"pass": "ok", "miss": "**missed**"}.get(target.verdict, ""),
            "note": target.detail,
        }
        for target in map(_target, sample["rows"])
    ]
    ending = {
        FAILED: f"The part failed; {name}.log ends with:\n\n```\n{why.strip()}\n```",
        TIMED_OUT: f"Stopped: {why}; see {name}.log.",
        SKIPPED: f"Skipped: {why}.",
    }
    return [f"## {name}: {state}", PARTS[name].shows, rows, ending.get(state, "")]


def _target(row: Mapping[str, Any]) -> Target:
    return Target(**row)
