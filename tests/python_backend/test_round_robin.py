"""Long jobs in one thread: short ones pass, all are finished at the end."""

from __future__ import annotations

import threading
from collections.abc import Generator

from python_backend.serving import round_robin
from python_backend.serving.round_robin import RoundRobin


def counting(log: list[str], name: str, steps: int, done: threading.Event | None = None) -> Generator[int, None, None]:
    for i in range(steps):
        log.append(f"{name}{i}")
        yield i
    log.append(f"{name.strip()} done")
    if done is not None:
        done.set()


def test_short_jobs_pass_a_long_one(monkeypatch) -> None:
    monkeypatch.setattr(round_robin, "SLICE_S", 0.0)  # a step is a slice
    log: list[str] = []
    begin, done = threading.Event(), threading.Event()

    def waits() -> Generator[int, None, None]:
        begin.wait(30)
        yield 0

    jobs = RoundRobin("test")
    jobs.submit(waits())  # so that the others are all there before one runs
    jobs.submit(counting(log, "long ", 50))
    jobs.submit(counting(log, "short ", 2, done))
    begin.set()
    assert done.wait(30)
    assert log.index("short done") < 10
    jobs.close()
    assert log[-1] == "long done"
