"""A swap under a backlog: the new version is served within two micro-batches, and never inside a request.

The server's module stands in for itself here: which forward runs with which version cannot be seen from outside.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from scoring_rig import started

from python_backend.serving.round_robin import run_to_end
from python_backend.wire.contract import Limits, ScoringRows

ROW_TOKENS, BUDGET = 20, 200  # ten rows a forward
PATIENCE_S = 120.0


class Call:
    """A request of so many rows."""

    timeout_s = None
    answered = False
    wanted = frozenset({"version"})

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.versions: set[int] = set()
        self.done = threading.Event()

    def answer(self, arrays: dict[str, Any]) -> None:
        self.versions.add(arrays["version"])
        self.done.set()


def make_model(scoring: Any) -> Any:
    """A model whose forwards run one by one, when the test lets them; `ran` gets each one's version and rows."""

    class Model(scoring.ScoringModel):
        limits = Limits(100, 64)

        def __init__(self) -> None:
            self.version = 1
            self.ran: queue.Queue[tuple[int, int]] = queue.Queue()
            self.go = threading.Semaphore(0)
            self.begun = 0

        def current_model(self) -> int:
            return self.version

        def read(self, call: Call) -> Generator[int, None, ScoringRows]:
            yield from ()
            rows = [np.zeros(ROW_TOKENS, np.int64)] * call.rows
            return ScoringRows(rows, ROW_TOKENS)

        def launch(self, model: int, rows: list[np.ndarray], width: int) -> Callable[[], list[np.ndarray]]:
            self.begun += 1
            assert self.go.acquire(timeout=PATIENCE_S)
            self.ran.put((model, len(rows)))
            return lambda: [np.zeros(1)] * len(rows)

        def reply(self, done: Any) -> dict[str, Any]:
            return {"version": done.model}

        def run(self, forwards: int) -> list[tuple[int, int]]:
            for _ in range(forwards):
                self.go.release()
            return [self.ran.get(timeout=PATIENCE_S) for _ in range(forwards)]

        def line_up(self, *calls: Call) -> None:
            with self._changed:
                self._line_up([run_to_end(self._begin(call)) for call in calls])

    return started(Model(), token_budget=BUDGET)


def wait_for_forward(model: Any, number: int) -> None:
    """Return when it is under way, its version chosen."""
    deadline = time.monotonic() + PATIENCE_S
    while model.begun < number:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_under_a_backlog_of_600_rows_the_new_version_runs_within_two_micro_batches(scoring: Any):
    model = make_model(scoring)
    calls = [Call(1) for _ in range(600)]
    model.line_up(*calls)
    assert model.run(3) == [(1, 10)] * 3
    wait_for_forward(model, 4)
    model.version = 2  # what the follower's one assignment does; a forward of the old one is under way
    assert model.run(2) == [(1, 10), (2, 10)]
    assert set(model.run(55)) == {(2, 10)}
    assert all(call.done.wait(PATIENCE_S) for call in calls)
    assert [len(call.versions) for call in calls] == [1] * 600
    model.finalize()


def test_a_request_that_has_begun_stays_with_its_version_and_holds_nobody_up(scoring: Any):
    model = make_model(scoring)
    long, short = Call(40), [Call(1) for _ in range(60)]
    model.line_up(long)
    assert model.run(1) == [(1, 10)]
    wait_for_forward(model, 2)
    model.line_up(*short)
    model.version = 2
    ran = model.run(9)
    assert (2, 10) in ran[1:3], "those that have not begun do not wait for the long one"
    assert sum(rows for version, rows in ran if version == 1) == 30, "the long one's, and no other's"
    assert all(call.done.wait(PATIENCE_S) for call in (long, *short))
    assert long.versions == {1}
    assert {version for call in short for version in call.versions} == {2}
    model.finalize()
