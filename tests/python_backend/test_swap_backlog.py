"""A swap under a backlog: the new version is served within two micro-batches, and never inside a request.

The server's module stands in for itself here: which forward runs with which version cannot be seen from outside.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scoring_rig import started

from python_backend.wire.contract import VALUES, ScoringRows, TokenRow

ROW_TOKENS, BUDGET = 20, 200  # ten rows a forward
PATIENCE_S = 120.0


class Call:
    """A request of so many rows."""

    timeout_s = None
    answered = False
    wanted = frozenset({VALUES})

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.versions: set[int] = set()
        self.done = threading.Event()

    def answer(self, arrays: dict[str, Any]) -> None:
        self.versions.add(arrays[VALUES])
        self.done.set()


class Model:
    """A model whose forwards run one by one, when the test lets them; `ran` gets each one's version and rows."""

    def __init__(self) -> None:
        self.version = 1
        self.ran: queue.Queue[tuple[int, int]] = queue.Queue()
        self.go = threading.Semaphore(0)
        self.begun = 0
        self.reply = {VALUES: lambda done: done.model}
        self.engine = started(self, token_budget=BUDGET).served

    def read(self, call: Call) -> ScoringRows:
        return ScoringRows([TokenRow(np.zeros(ROW_TOKENS, np.int64))] * call.rows, ROW_TOKENS)

    def forward(self, model: int, rows: list[TokenRow], width: int) -> Callable[[], list[np.ndarray]]:
        self.begun += 1
        assert self.go.acquire(timeout=PATIENCE_S)
        self.ran.put((model, len(rows)))
        return lambda: [np.zeros(1)] * len(rows)

    def run(self, forwards: int) -> list[tuple[int, int]]:
        for _ in range(forwards):
            self.go.release()
        return [self.ran.get(timeout=PATIENCE_S) for _ in range(forwards)]

    def line_up(self, *calls: Call) -> None:
        with self.engine._changed:
            self.engine._line_up([self.engine._begin(call) for call in calls])


def wait_for_forward(model: Model, number: int) -> None:
    """Return when it is under way, its version chosen."""
    deadline = time.monotonic() + PATIENCE_S
    while model.begun < number:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_under_a_backlog_of_600_rows_the_new_version_runs_within_two_micro_batches(scoring: Any):
    model = Model()
    calls = [Call(1) for _ in range(600)]
    model.line_up(*calls)
    assert model.run(3) == [(1, 10)] * 3
    wait_for_forward(model, 4)
    model.version = 2  # what the follower's one assignment does; a forward of the old one is under way
    assert model.run(2) == [(1, 10), (2, 10)]
    assert set(model.run(55)) == {(2, 10)}
    assert all(call.done.wait(PATIENCE_S) for call in calls)
    assert [len(call.versions) for call in calls] == [1] * 600
    model.engine.finalize()


def test_a_request_that_has_begun_stays_with_its_version_and_holds_nobody_up(scoring: Any):
    model = Model()
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
    model.engine.finalize()
