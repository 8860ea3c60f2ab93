"""A thread that serves several slow requests in turn. Needs neither torch nor Triton."""

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

BackgroundJob = Iterator[Any]
SLICE_S = 0.005


class RoundRobin:
    """A thread that runs generators round-robin, each for `SLICE_S` or one step, whichever is longer.

    Short jobs thus do not wait for long ones.

    Jobs must not raise: an exception would end the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[BackgroundJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: BackgroundJob) -> None:
        """Append the job to the queue; its first step runs in the thread."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish all jobs, then end the thread. Submit nothing afterwards."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is not None:  # run it for one time slice
                deadline = time.monotonic() + SLICE_S
                for _ in job:
                    if time.monotonic() >= deadline:
                        self._jobs.put(job)
                        break
            elif self._jobs.empty():
                return
            else:  # closed, but jobs remain: move the end marker behind them
                self._jobs.put(None)
