"""CPU time, memory and counted work of a contender's processes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

import psutil

from benchmarks.support.forward import read_counters


def snapshot(pids: Iterable[int], counters: Path) -> dict[str, float]:
    """Return the CPU seconds that the processes and their descendants have used, and the sums of their counters.

    The key of the CPU seconds is `server_cpu_s`. `counters` is the folder of the processes' `ForwardCounters`.
    """
    return {"server_cpu_s": cpu_seconds(pids), **read_counters(counters)}


def difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Return the difference between two snapshots."""
    return {name: value - before[name] for name, value in after.items()}


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return CPU seconds, user and system, of the processes and all their descendants."""
    total = 0.0
    for process in _family(pids):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def memory_mb(pids: Iterable[int]) -> float:
    """Return the memory (PSS, MiB) of the processes and descendants: a shared page is divided among its users."""
    total = 0.0
    for process in _family(pids):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss / 2**20
    return total


def peak_rss_mb(pids: Iterable[int]) -> float:
    """Return the summed peak resident size (MiB) of the processes and descendants; each counts shared pages in full."""
    total = 0.0
    for process in _family(pids):
        with contextlib.suppress(FileNotFoundError):
            found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
            total += int(found[1]) / 1024 if found else 0.0
    return total


def _family(pids: Iterable[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(pid)
            found += [parent, *parent.children(recursive=True)]
    return found
