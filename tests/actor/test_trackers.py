"""`actor.run.trackers`: what each tracker receives, under its own names; an error in one never ends a run.

Neither package is a dependency, so stand-ins with the calls that theirs document take their places.
"""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from actor.run.metrics import MetricsLog
from actor.run.trackers import Trackers
from python_backend.errors import RlhfError
from python_backend.store.jsonl import read_jsonl


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Calls of both packages, in order."""
    calls: list[tuple[str, Any]] = []

    class Run:
        def log(self, metrics: dict[str, float], step: int) -> None:
            calls.append(("wandb.log", (metrics, step)))

        def finish(self) -> None:
            calls.append(("wandb.finish", None))

    wandb = types.ModuleType("wandb")
    wandb.Table = lambda columns, data: (columns, data)  # type: ignore[attr-defined]
    wandb.init = lambda **settings: calls.append(("wandb.init", settings)) or Run()  # type: ignore[attr-defined]
    mlflow = types.ModuleType("mlflow")
    mlflow.set_experiment = lambda name: calls.append(("mlflow.set_experiment", name))  # type: ignore[attr-defined]
    mlflow.start_run = lambda run_name: calls.append(("mlflow.start_run", run_name))  # type: ignore[attr-defined]
    mlflow.log_metrics = lambda metrics, step: calls.append(("mlflow.log", (metrics, step)))  # type: ignore[attr-defined]
    mlflow.log_dict = lambda data, name: calls.append(("mlflow.dict", (data, name)))  # type: ignore[attr-defined]
    mlflow.end_run = lambda: calls.append(("mlflow.end_run", None))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return calls


def test_both_are_told_what_the_files_hold(said: list[tuple[str, Any]], tmp_path: Path):
    log = MetricsLog(tmp_path, first_step=1, trackers=Trackers(["wandb", "mlflow"], tmp_path, "my-run"))
    log.write(1, {"train_rollouts/rewards": 0.5, "train_rollouts/staleness_rows": {"0": 3}})
    log.close()
    settings = {"project": "rlhf-on-triton", "id": "my-run", "name": "my-run", "dir": str(tmp_path), "resume": "allow"}
    point = ({"train_rollouts/rewards": 0.5}, 1)  # a histogram is TensorBoard's alone
    assert said == [
        ("wandb.init", settings),
        ("mlflow.set_experiment", "rlhf-on-triton"),
        ("mlflow.start_run", "my-run"),
        ("wandb.log", point),
        ("mlflow.log", point),
        ("wandb.finish", None),
        ("mlflow.end_run", None),
    ]


def test_texts_are_a_table_everywhere(said: list[tuple[str, Any]], tmp_path: Path):
    log = MetricsLog(tmp_path, first_step=1, trackers=Trackers(["wandb", "mlflow"], tmp_path, "my-run"))
    rows = [[1, "Once", " upon a time", 0.5], [1, "Twice", "…", None]]
    columns = ["step", "prompt", "response", "reward"]
    log.add_texts([dict(zip(columns, row, strict=True)) for row in rows])
    log.add_texts([])
    log.close()
    assert ("wandb.log", ({"train_rollouts/table": (columns, rows)}, 1)) in said
    table = {"columns": columns, "data": rows}  # no log_table: it reads and writes all rows of the run each time
    assert ("mlflow.dict", (table, "train_rollouts/table/00000001.json")) in said
    assert [list(line.values()) for line in read_jsonl(tmp_path / "rollouts.jsonl")] == rows
    MetricsLog(tmp_path, first_step=1).close()  # a run that repeats step 1
    assert read_jsonl(tmp_path / "rollouts.jsonl") == []


def test_one_that_is_not_installed_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RlhfError, match=r"actor\.trackers: wandb is not installed .*pip install wandb"):
        Trackers(["wandb"], tmp_path, "run")


def test_one_that_fails_is_given_up_and_the_other_goes_on(
    said: list[tuple[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    def refuse(metrics: dict[str, float], step: int) -> None:
        raise ConnectionError("the tracking server is away")

    trackers = Trackers(["mlflow", "wandb"], tmp_path, "run")
    sys.modules["mlflow"].log_metrics = refuse  # type: ignore[attr-defined]
    for step in (1, 2):
        trackers.log({"x": 1.0}, step)
    trackers.finish()
    assert [call for call in said if call[0] == "wandb.log"] == [
        ("wandb.log", ({"x": 1.0}, 1)),
        ("wandb.log", ({"x": 1.0}, 2)),
    ]
    assert ("mlflow.end_run", None) not in said
    assert caplog.messages == [
        "mlflow is disabled, metrics.jsonl still has all metrics: ConnectionError: the tracking server is away"
    ]


def test_one_that_hangs_holds_nobody_up_and_gets_everything_in_order(
    said: list[tuple[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("actor.run.trackers.MOST_PENDING", 4)
    answer, threads = threading.Event(), set()

    def hang(metrics: dict[str, float], step: int) -> None:
        answer.wait(60)
        threads.add(threading.get_ident())
        said.append(("mlflow.log", (metrics, step)))

    sys.modules["mlflow"].log_metrics = hang  # type: ignore[attr-defined]
    trackers = Trackers(["mlflow"], tmp_path, "run")
    for step in range(6):
        trackers.log({"x": 1.0}, step)  # returns at once
    assert ("mlflow.log", ({"x": 1.0}, 0)) not in said
    answer.set()
    trackers.finish()
    assert [call[1][1] for call in said if call[0] == "mlflow.log"] == [0, 1, 2, 3]
    assert said[-1] == ("mlflow.end_run", None)
    assert len(threads) == 1
    assert caplog.messages == ["trackers are 4 calls behind: some metrics are in metrics.jsonl only"]


def test_one_that_hangs_does_not_keep_a_run_from_ending(
    said: list[tuple[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Neither one that ends as planned, nor a failed one, whose interpreter waits for no daemon."""
    monkeypatch.setattr("actor.run.trackers.FINISH_S", 0.1)
    answer, threads = threading.Event(), []

    def hang(metrics: dict[str, float], step: int) -> None:
        threads.append(threading.current_thread())
        answer.wait()

    sys.modules["mlflow"].log_metrics = hang  # type: ignore[attr-defined]
    trackers = Trackers(["mlflow"], tmp_path, "run")
    trackers.log({"x": 1.0}, 1)
    trackers.finish()
    assert caplog.messages == ["trackers have not taken everything after 0.1 s: the rest is in metrics.jsonl only"]
    assert all(thread.daemon for thread in threads)
    answer.set()
