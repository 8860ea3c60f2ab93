"""Round-robin execution of jobs in one thread, in time slices, so that a short job need not wait for long ones."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")
Job = Generator[Any, None, T]
SLICE_S = 0.005


def run_to_end(job: Job[T]) -> T:
    """Run the job to completion in the calling thread; return its return value."""
    while True:
        try:
            next(job)
        except StopIteration as end:
            return end.value


class RoundRobin:
    """A thread that runs generators in turn, each for `SLICE_S` or one step, whichever is longer.

    Jobs must not raise: an exception would end the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job[None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job[None]) -> None:
        """Append the job to the queue; its first step runs in the thread."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish all jobs, then end the thread. Submit nothing afterwards."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is not None:
                with contextlib.suppress(StopIteration):
                    self._run_slice(job)
                    self._jobs.put(job)
            elif self._jobs.empty():
                return
            else:  # closed, but jobs remain: move the end marker behind them
                self._jobs.put(None)

    def _run_slice(self, job: Job[None]) -> None:
        """Advance the job for one time slice. Raises StopIteration when the job is done."""
        deadline = time.monotonic() + SLICE_S
        next(job)
        while time.monotonic() < deadline:
            next(job)
