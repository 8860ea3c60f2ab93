"""Samples what a system uses: memory, open files and threads of each process, shared memory, files on disk."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from chaos.system import ChaosSystem
from tools.server.shared_memory import SHARED_MEMORY


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
