"""What a contender has used and done so far: CPU seconds, forwards, batches; the difference of two is one cell's.
Given: the process ids, the counters' folder, the metrics' address. Returns: numbers by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import psutil

from python_backend.contract import REWARD_MODEL
from tools.bench.forward import read_counters

METRICS = {"batch_rows": "nv_inference_count", "executions": "nv_inference_exec_count"}


@dataclasses.dataclass(frozen=True)
class Watched:
    """Where to look."""

    pids: list[int]
    """Processes whose trees are the contender."""
    counters: str
    """Folder of its `Counters`."""
    metrics_url: str | None
    """`host:port` of Triton's metrics; None without Triton."""


def snapshot(watched: Watched) -> dict[str, float]:
    """`server_cpu_s`, what its forwards computed (`Computed`), and with Triton `batch_rows` and `executions`.

    From Triton's metrics and not from its statistics API, which PyTriton locks; they are the same counters.
    """
    found = {"server_cpu_s": cpu_seconds(watched.pids), **dataclasses.asdict(read_counters(Path(watched.counters)))}
    if watched.metrics_url:
        with urllib.request.urlopen(f"http://{watched.metrics_url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found |= {name: _total(text, metric) for name, metric in METRICS.items()}
    return found


def difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """What happened between two snapshots."""
    return {name: value - before[name] for name, value in after.items()}


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU seconds, user and system, of processes and all their descendants."""
    total = 0.0
    for process in _family(pids):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def memory_mb(pids: Iterable[int]) -> dict[str, float]:
    """`rss_mb` and `pss_mb` of processes and all their descendants; PSS divides pages among those that share them."""
    rss = pss = 0.0
    for process in _family(pids):
        with contextlib.suppress(psutil.NoSuchProcess):
            memory = process.memory_full_info()
            rss, pss = rss + memory.rss / 2**20, pss + memory.pss / 2**20
    return {"rss_mb": rss, "pss_mb": pss}


def _family(pids: Iterable[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(pid)
            found += [parent, *parent.children(recursive=True)]
    return found


def _total(text: str, metric: str) -> int:
    pattern = rf'^{metric}{{[^}}]*model="{REWARD_MODEL}"[^}}]*}} (\S+)$'
    return sum(int(float(number)) for number in re.findall(pattern, text, re.MULTILINE))
