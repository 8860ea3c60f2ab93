"""Time, CPU time and memory of processes."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")


def timed(do: Callable[[], T]) -> tuple[float, T]:
    """Call `do`; return the seconds that it took, and its result."""
    start = time.perf_counter()
    result = do()
    return time.perf_counter() - start, result


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return CPU seconds, user and system, of the processes and all their descendants."""
    return _family_sum(pids, lambda process: sum(process.cpu_times()[:2]))


def peak_rss_mb(pids: Iterable[int]) -> float:
    """Return the summed peak resident size (MiB) of the processes and descendants; each counts shared pages in full."""
    return _family_sum(pids, lambda process: peak_rss_bytes(process.pid)) / 2**20


def peak_rss_bytes(pid: int | str = "self") -> int:
    """Return the largest resident memory of a process since its start, or since its last `reset_peak_rss`."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0  # a zombie has none


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
                with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                    total += value(process)
    return total
