"""CPU time, memory and counted work of a contender's processes."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import psutil

from benchmarks.support.benchmark import BenchError
from benchmarks.support.forward import read_counters

T = TypeVar("T")


def timed(do: Callable[[], T]) -> tuple[float, T]:
    """Call `do`; return the seconds that it took, and its result."""
    start = time.perf_counter()
    result = do()
    return time.perf_counter() - start, result


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
    return _family_sum(pids, lambda process: sum(process.cpu_times()[:2]))


def memory_mb(pids: Iterable[int]) -> float:
    """Return the memory (PSS, MiB) of the processes and descendants: a shared page is divided among its users."""
    return _family_sum(pids, lambda process: process.memory_full_info().pss) / 2**20


def peak_rss_mb(pids: Iterable[int]) -> float:
    """Return the summed peak resident size (MiB) of the processes and descendants; each counts shared pages in full."""
    return _family_sum(pids, lambda process: peak_rss_bytes(process.pid)) / 2**20


def peak_rss_bytes(pid: int | str = "self") -> int:
    """Return the largest resident memory of a process since its start, or since its last `reset_peak_rss`."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if found is None:  # a zombie, or a system without this line
        raise BenchError(f"/proc/{pid}/status has no VmHWM")
    return int(found[1]) * 1024


def reset_peak_rss() -> None:
    """Set the peak of this process's resident memory to its present value."""
    Path("/proc/self/clear_refs").write_text("5")


def _family_sum(pids: Iterable[int], value: Callable[[psutil.Process], float]) -> float:
    """Return the sum of `value` over the processes and their descendants, except those that have ended."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, BenchError):
                    total += value(process)
    return total
