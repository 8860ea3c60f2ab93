"""Settings and resources that every part of the reload benchmark receives: cores, clients, a folder."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.support.children import BenchChild
from benchmarks.support.workload import model_size

MOST_SIZE_UNDER_LOAD = 7  # million parameters; latencies of larger models are too long


def under_load(models: list[str]) -> list[str]:
    """Return the models that are small enough to be reloaded under load; the first model if none is."""
    return [name for name in models if model_size(name) <= MOST_SIZE_UNDER_LOAD] or models[:1]


@dataclasses.dataclass(frozen=True)
class Cores:
    """Cores of server, clients and trainer; the trainer has all cores but two.

    With two cores the trainer shares the clients' core; with one, all share it.
    """

    server: int
    clients: int
    trainer: tuple[int, ...]

    @classmethod
    def of_machine(cls) -> Cores:
        """Divide the cores that this process may use."""
        cores = sorted(os.sched_getaffinity(0))
        return cls(cores[0], cores[min(1, len(cores) - 1)], tuple(cores[2:] or cores[-1:]))


@contextlib.contextmanager
def on_core(*cores: int) -> Iterator[None]:
    """Pin this thread, and the threads and processes that it starts in the block, to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclasses.dataclass(frozen=True)
class ReloadSetup:
    """Settings and resources that every part receives."""

    settings: argparse.Namespace
    folder: Path
    """Folder for temporary files, which are removed when the measurement ends."""
    cores: Cores
    clients: BenchChild
    """Process that runs `clients.serve`."""
    say: Callable[[str], None]
