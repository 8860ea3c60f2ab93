"""What the soak test measures and checks: no update lost, every response scored, every kill survived, and no growth.

Growth is measured in the last part of the test, in which nothing is killed: from the median of its first quarter to the
median of its last quarter, within the life of one process.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil

from chaos.system import ChaosSystem
from chaos.verdict import Verdict, verdict
from python_backend.store.jsonl import read_jsonl
from tools.report.curves import figure_of
from tools.server.shared_memory import SHARED_MEMORY

Axes = Any  # matplotlib is imported only by functions that draw
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#3C4043", "#9AA0A6", "#F0E442")
ROWS = 16  # responses per step
MOST_REQUESTS = 32  # in flight
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
class ProcessUsage:
    """What one process uses."""

    pid: int
    rss_mb: float
    files: int
    """Open file descriptors other than sockets."""
    sockets: int
    """These follow the number of requests in flight."""
    threads: int


@dataclass(frozen=True)
class UsageSample:
    """What the system uses at one moment."""

    time_s: float
    step: int
    processes: dict[str, ProcessUsage]
    """By name; a model of several processes or none is left out."""
    shared_memory_mb: float
    versions: int
    journal_entries: int
    journal_results: int
    checkpoints: int
    disk_mb: float
    """Of versions, journal entries and checkpoints; metrics and logs grow with the number of steps."""


def take_sample(system: ChaosSystem, time_s: float, step: int) -> UsageSample:
    """Return what the system uses now; a process that ends meanwhile is left out."""
    run, journal = system.config.run, system.config.run.journal_dir / system.config.run.identity
    folders = [run.weights_dir, journal / "entries", run.dir / "checkpoints"]
    return UsageSample(
        time_s=round(time_s, 2),
        step=step,
        processes={
            name: usage for name in system.victims if (usage := _usage_of(system.processes_of(name))) is not None
        },
        shared_memory_mb=_megabytes(SHARED_MEMORY, system.region_prefix),
        versions=len(system.store.versions()),
        journal_entries=_num_files(journal / "entries"),
        journal_results=_num_files(journal / "results"),
        checkpoints=sum(_num_files(run.dir / "checkpoints" / role) for role in ("actor", "critic")),
        disk_mb=sum(map(_megabytes, folders)),
    )


def _usage_of(processes: list[psutil.Process]) -> ProcessUsage | None:
    if len(processes) != 1:
        return None
    process = processes[0]
    try:
        links = [_target(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
        sockets = sum(link.startswith("socket:") for link in links)
        rss_mb = process.memory_info().rss / 1e6
        return ProcessUsage(process.pid, rss_mb, len(links) - sockets, sockets, process.num_threads())
    except (psutil.Error, OSError):
        return None


def _target(path: Path) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 - Path.readlink would parse the text as a path
    except FileNotFoundError:  # closed since it was listed
        return ""


def _num_files(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0


def _megabytes(root: Path, prefix: str = "") -> float:
    """Return the size on disk of the files below `root` whose names begin with `prefix`."""
    total = 0
    for folder, _, names in os.walk(root):  # which ignores a folder that was removed since it was listed
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(folder) / name).stat().st_blocks * 512 if name.startswith(prefix) else 0
    return total / 1e6


def draw(path: Path, samples: Sequence[UsageSample], kills: Sequence[Mapping[str, Any]], calm_from_s: float) -> None:
    """Write the picture, a timeline of the run, to `path`."""
    with figure_of(path, (12, 12)) as figure:
        steps, killed, memory, files, disk = figure.subplots(5, 1, sharex=True, height_ratios=[1, 1, 1.3, 1.3, 1])
        minutes = [sample.time_s / 60 for sample in samples]
        steps.plot(minutes, [sample.step for sample in samples], color=COLOURS[2], lw=1.5)
        steps.set(title="steps completed by the actor", ylabel="step")
        names = list(dict.fromkeys(name for sample in samples for name in sample.processes))
        _draw_kills(killed, kills, names)
        for name, colour in zip(names, COLOURS, strict=False):
            for ax, field in ((memory, "rss_mb"), (files, "files")):
                values = [getattr(s.processes[name], field) if name in s.processes else float("nan") for s in samples]
                ax.plot(minutes, values, color=colour, lw=1.2, label=name)
        memory.set(title="resident memory of each process", ylabel="MB", ylim=(0, None))
        files.set(title="open files of each process, without sockets", ylabel="files", ylim=(0, None))
        memory.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0))
        disk.plot(
            minutes, [s.disk_mb for s in samples], color=COLOURS[0], lw=1.2, label="versions, journal, checkpoints"
        )
        disk.plot(minutes, [s.shared_memory_mb for s in samples], color=COLOURS[3], lw=1.2, label="/dev/shm")
        disk.set(title="disk and shared memory", ylabel="MB", ylim=(0, None), xlabel="minutes")
        disk.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0))
        for ax in (steps, killed, memory, files, disk):
            ax.axvspan(calm_from_s / 60, minutes[-1] if minutes else 0, color="#E8F0FE", lw=0, zorder=0)


def _draw_kills(axes: Axes, kills: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    for kill in kills:
        at = names.index(kill["victim"])
        start, until = kill["time_s"] / 60, (kill["time_s"] + (kill["until_s"] or 0)) / 60
        axes.plot([start, until], [at, at], color="#D55E00", lw=4, solid_capstyle="butt")
        axes.plot([start], [at], marker="|", ms=12, color="#3C4043")
    axes.set_yticks(range(len(names)), names)
    title = "processes killed (SIGKILL), and how long until the next step; growth is measured where blue"
    axes.set(ylim=(len(names) - 0.5, -0.5), title=f"{len(kills)} {title}")


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
