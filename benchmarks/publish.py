"""Benchmark of publishing a critic that is sharded over several ranks: extra memory of each rank, and time.

The time of writing and verifying a version is compared with writing and hashing the same bytes in one process, in turn.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.support.benchmark import Option, Record, Result, Target
from benchmarks.support.children import output_of
from benchmarks.support.samples import grouped, median_of
from benchmarks.support.workload import SIZES, make_checkpoint

MOST_MEMORY, MOST_TIME = 0.75, 1.25
OPTIONS = {
    "models": Option(["110m"], f"any of {', '.join(SIZES)}", quick=["tiny"], known=SIZES),
    "ranks": Option(2, "number of ranks"),
    "repeats": Option(5, "publishes of each model, each next to a plain write and hash", quick=2),
}


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Publish each model on the ranks of an agent."""
    with tempfile.TemporaryDirectory(dir=record.out) as scratch:
        for model in settings.models:
            folder = Path(scratch) / model
            make_checkpoint(SIZES[model], folder / "critic")
            arguments = ["benchmarks.publish_ranks", str(folder), str(settings.repeats)]
            agent = [sys.executable, "-m", "python_backend.parallel.agent", str(settings.ranks), *arguments]
            output_of("publishing on several ranks", agent)
            for sample in json.loads((folder / "samples.json").read_text()):
                record.add({"model": model, **sample})
                record.say(f"{model}  {sample['publish_s']:.2f} s, plain {sample['plain_s']:.2f} s")


def summarise(result: Result) -> list[dict[str, Any]]:
    """Return medians of each model, its memory in shares of the model's bytes."""
    return [
        {
            "model": model,
            "mb": own[0]["bytes"] / 1e6,
            "write_s": median_of(sample["write_s"] for sample in own),
            "verify_s": median_of(sample["publish_s"] - sample["write_s"] for sample in own),
            "plain_s": median_of(sample["plain_s"] for sample in own),
            "time_ratio": median_of(sample["publish_s"] / sample["plain_s"] for sample in own),
            "memory_ratio": max(extra / sample["bytes"] for sample in own for extra in sample["extra_bytes"]),
            "same_bytes": len({json.dumps(sample["files"], sort_keys=True) for sample in own}) == 1,
        }
        for (model,), own in grouped(result["samples"], "model").items()
    ]


def targets(result: Result) -> list[Target]:
    """Return the limits of memory and time, and that each publish gave the same bytes."""
    found = []
    for row in result["summary"]:
        name = row["model"]
        found += [
            Target(f"{name}: extra resident memory of a rank / the model", row["memory_ratio"], high=MOST_MEMORY),
            Target(f"{name}: publish / write and hash of the same bytes", row["time_ratio"], high=MOST_TIME),
            Target(f"{name}: share of publishes with the same bytes", float(row["same_bytes"]), low=1.0),
        ]
    return found
