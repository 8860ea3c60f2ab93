"""What the soak test checks: no update lost, every response scored, every kill survived, and nothing grows.

Growth is measured in the last part of the test, in which nothing is killed: from the median of its first quarter to the
median of its last quarter, within the life of one process.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from chaos.soak.config import MOST_REQUESTS, ROWS
from chaos.soak.usage import UsageSample
from chaos.verdict import Verdict, verdict
from python_backend.store.jsonl import read_jsonl

LONG_S = 900.0  # of calm, after which allocators and caches have settled
MEMORY_SHARE, SHORT_MEMORY_SHARE = 0.05, 0.5  # allowed growth after a long and a short calm
MEMORY_MB = 16.0  # in addition
FILES, THREADS = 4, 4  # a sample may include short-lived ones
SOCKETS = 2 * MOST_REQUESTS + 32  # connections of scoring, probes and metrics, open and closing
FLAT_MB = 2.0
FLAT_FILES = 8  # versions, entries or checkpoints that are being replaced
RESULTS = 1100  # python_backend.store.journal.KEPT_RESULTS, and those of the last steps
QUARTER = 4


@dataclass(frozen=True)
class Ended:
    """The state in which the run ended."""

    actor: Mapping[str, Any]
    """state.json of the actor's last checkpoint."""
    critic: Mapping[str, Any]
    """state.json of the critic's checkpoint of that step."""
    served_step: int
    """Number of updates in the critic version that CURRENT names."""


def check_updates(ended: Ended, metrics: Path, critic_metrics: Path) -> Verdict:
    """Check that each step of the actor trained the critic exactly once.

    A step has `ROWS` rows and is one optimizer step, so the critic's checkpoint counts its updates.
    """
    last = ended.actor["step"]
    found = [
        f"{what} {value}, but the actor ended after step {last}"
        for what, value in (
            ("the critic's checkpoint is of step", ended.critic["step"]),
            ("the number of the critic's optimizer steps is", ended.critic["optimizer_step"]),
            ("the served version contains updates up to step", ended.served_step),
        )
        if value != last
    ]
    steps = [line["step"] for line in read_jsonl(metrics)]
    if steps != list(range(1, last + 1)):
        found.append(f"metrics.jsonl has {len(steps)} steps from {steps[:1]} to {steps[-1:]}, expected 1 to {last}")
    found += [f"step {line['step']}: {line['error']}" for line in read_jsonl(critic_metrics) if "error" in line]
    return verdict("no update is lost: each step trained the critic exactly once", last, found)


def check_responses(ended: Ended) -> Verdict:
    """Check that every response was scored."""
    masked = ended.actor["masked_samples"]
    found = [f"{masked} responses were not scored"] if masked else []
    return verdict("every response was scored, by reward model and critic", ended.actor["step"] * ROWS, found)


def check_survival(kills: Sequence[Mapping[str, Any]], troubles: Sequence[str], leftovers: Sequence[str]) -> Verdict:
    """Check that the run went on after each kill, and that no process ended that was not killed."""
    found = [f"no step within the time limit after the {k['victim']} was killed" for k in kills if k["until_s"] is None]
    return verdict(
        "after each kill the run goes on; no other process ends, and none is left behind",
        len(kills),
        [*found, *troubles, *leftovers],
    )


def check_processes(calm: Sequence[UsageSample]) -> list[Verdict]:
    """Check that memory, open files, threads and sockets of each process stay flat."""
    seconds = calm[-1].time_s - calm[0].time_s if calm else 0.0
    share = MEMORY_SHARE if seconds >= LONG_S else SHORT_MEMORY_SHARE
    names = sorted({name for sample in calm for name in sample.processes})
    memory, files = [], []
    for name in names:
        last = [sample.processes[name] for sample in calm if name in sample.processes]
        last = [usage for usage in last if usage.pid == last[-1].pid]
        before, after = _ends(last, attrgetter("rss_mb"))
        if after > before * (1 + share) + MEMORY_MB:
            memory.append(f"{name} had {before:.0f} MB, and {after:.0f} MB later")
        for what, slack in (("files", FILES), ("threads", THREADS)):
            before, after = _ends(last, attrgetter(what))
            if after > before + slack:
                files.append(f"{name} had {before:g} {what}, and {after:g} later")
        if (most := max(usage.sockets for usage in last)) > SOCKETS:
            files.append(f"{name} had {most} sockets, expected at most {SOCKETS}")
    return [
        verdict(
            f"the memory of each process is flat (growth up to {share:.0%} + {MEMORY_MB:g} MB)", len(names), memory
        ),
        verdict("open files, sockets and threads of each process are flat", len(names), files),
    ]


def check_disk(calm: Sequence[UsageSample]) -> Verdict:
    """Check that shared memory, versions, journal and checkpoints stay flat."""
    limits = {
        "shared_memory_mb": FLAT_MB,
        "versions": FLAT_FILES,
        "journal_entries": 2 * FLAT_FILES,
        "checkpoints": FLAT_FILES,
        "disk_mb": None,
    }
    found = []
    for what, slack in limits.items():
        before, after = _ends(calm, attrgetter(what))
        if after > before + (slack if slack is not None else FLAT_MB + before / 4):
            found.append(f"{what} was {before:g}, and {after:g} later")
    if calm and (most := max(sample.journal_results for sample in calm)) > RESULTS:
        found.append(f"the journal held {most} results, expected at most {RESULTS}")
    return verdict("shared memory and disk are flat: versions, journal, checkpoints", len(calm), found)


def _ends(samples: Sequence[Any], value: Callable[[Any], float]) -> tuple[float, float]:
    """Return the medians of the first and of the last quarter; zeros if there are no samples."""
    if not samples:
        return 0.0, 0.0
    size = max(1, len(samples) // QUARTER)
    return statistics.median(map(value, samples[:size])), statistics.median(map(value, samples[-size:]))
