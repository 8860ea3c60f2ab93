"""How long each row waited and computed, by a clock that only forward passes advance."""

from __future__ import annotations

import importlib
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton_python_backend_utils as stub
from scoring_rig import started

from python_backend.wire.contract import REWARDS, ScoringRows, TokenRow

PATIENCE_S = 120.0
FORWARD_S = 2.0


@pytest.fixture
def model(scoring: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model with one row per forward pass, each of which takes two seconds once the test lets it run."""
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(scoring, "time", types.SimpleNamespace(monotonic=lambda: clock.now))

    def launch(model: None, rows: list[TokenRow], width: int) -> Callable[[], list[np.ndarray]]:
        assert go.wait(PATIENCE_S)
        clock.now += FORWARD_S
        return lambda: [np.zeros(1)] * len(rows)

    go = threading.Event()
    parts = types.SimpleNamespace(
        version=object(),
        read=lambda call: ScoringRows([TokenRow(np.zeros(10, np.int64))] * 3, 10),
        forward=launch,
        reply={REWARDS: lambda done: np.zeros((3, 1), np.float32)},
    )
    model = started(parts, token_budget=10, queue_timeout_s=1)
    model.go = go
    return model


def test_each_row_has_its_own_times_if_requested(model: Any) -> None:
    model.go.set()
    answers = []
    for outputs in (("rewards", "queue_us", "compute_us"), ("rewards",)):
        model.execute([request := stub.Request({}, outputs)])
        answers.append(request.responses.get(timeout=PATIENCE_S).outputs)
    model.finalize()
    assert answers[0]["queue_us"].tolist() == [[0], [2_000_000], [4_000_000]]
    assert answers[0]["compute_us"].tolist() == [[2_000_000]] * 3
    assert answers[1].keys() == {"rewards"}


def test_a_request_whose_first_forward_pass_is_due_after_its_deadline_is_refused(model: Any) -> None:
    model.go.set()
    requests = [stub.Request({}, ("rewards",)) for _ in range(2)]
    model.execute(requests)
    answers = [request.responses.get(timeout=PATIENCE_S) for request in requests]
    model.finalize()
    (refused,) = [answer.error for answer in answers if answer.error is not None]  # the one whose first row came later
    assert "deadline passed" in str(refused)


def test_counters_that_the_server_refuses_cost_no_answer(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[float] = []

    def refuse(metric: stub.MetricFamily, amount: float) -> None:
        raise RuntimeError("Failed to allocate shared memory")

    monkeypatch.setattr(stub.MetricFamily, "increment", refuse)
    model.go.set()
    for i in range(3):  # the clock advances by more than the interval between two updates of the counters
        if i == 2:
            monkeypatch.setattr(stub.MetricFamily, "increment", lambda metric, amount: sent.append(amount))
        model.execute([request := stub.Request({}, ("rewards",))])
        assert request.responses.get(timeout=PATIENCE_S).error is None
    model.finalize()
    assert sum(sent) == 9 + 9 + 90, "nothing is lost: nine forward passes of one row of ten tokens"


def test_a_named_counter_that_the_server_refuses_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = importlib.import_module("python_backend.serving.triton").NamedCounters("m", "f", "", "counter")

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to allocate shared memory")

    for name in ("Metric", "increment"):
        monkeypatch.setattr(stub.MetricFamily, name, refuse)
        counters.add({"a": 1.0})
        monkeypatch.undo()
