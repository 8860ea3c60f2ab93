"""Optional trackers: Weights & Biases and MLflow. A tracker that fails is disabled with a warning.

Their calls may wait for a network, so one thread makes all of them, in order: MLflow's active run belongs to a thread.
"""

from __future__ import annotations

import functools
import importlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from python_backend.errors import RlhfError

logger = logging.getLogger(__name__)
PROJECT = "rlhf-on-triton"
TABLE = "train_rollouts/table"
FINISH_S = 120.0  # for what is still queued when a run ends
MOST_PENDING = 1000  # calls that wait for a slow tracker; later ones are dropped


class WandbTracker:
    """A Weights & Biases run whose id is the run's identity, so that a resumed run continues it."""

    def __init__(self, wandb: Any, run_dir: Path, run_id: str) -> None:
        self._table = wandb.Table
        self._run = wandb.init(project=PROJECT, id=run_id, name=run_id, dir=str(run_dir), resume="allow")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log scalars of `step`."""
        self._run.log(dict(metrics), step=step)

    def add_texts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log these rows as a table; W&B joins the tables of all steps under one name."""
        columns = list(rows[0])
        table = self._table(columns=columns, data=[[row[name] for name in columns] for row in rows])
        self._run.log({TABLE: table}, step=rows[0]["step"])

    def finish(self) -> None:
        """Flush pending data and close the run."""
        self._run.finish()


class MlflowTracker:
    """An MLflow run; its tracking server is set by MLflow's own environment variables."""

    def __init__(self, mlflow: Any, run_dir: Path, run_id: str) -> None:
        self._mlflow = mlflow
        mlflow.set_experiment(PROJECT)
        mlflow.start_run(run_name=run_id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log scalars of `step`."""
        self._mlflow.log_metrics(dict(metrics), step=step)

    def add_texts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log these rows as a table, one file per step: `log_table` would rewrite the run's whole table each time."""
        table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        self._mlflow.log_dict(table, f"{TABLE}/{rows[0]['step']:08d}.json")

    def finish(self) -> None:
        """Close the run."""
        self._mlflow.end_run()


KINDS: dict[str, type[WandbTracker] | type[MlflowTracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker}


class Trackers:
    """All configured trackers; a tracker that fails is disabled, and the run continues."""

    def __init__(self, names: Sequence[str], run_dir: Path, run_id: str) -> None:
        """Start each tracker. Raises RlhfError if one is not installed."""
        self._open: dict[str, WandbTracker | MlflowTracker] = {}
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(MOST_PENDING)
        self._has_dropped = False
        for name in names:
            try:
                module = importlib.import_module(name)
            except ImportError as error:
                raise RlhfError(
                    f"actor.trackers: {name} is not installed ({error}); pip install {name}, or remove it"
                ) from error
            start = functools.partial(self._start, name, module, run_dir, run_id)
            self._calls.put(functools.partial(self._try, name, start))
        # A daemon: a tracker that hangs must not keep a run that has failed from ending.
        self._thread = threading.Thread(target=self._work, name="trackers", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log scalars of `step` to every tracker."""
        self._each(lambda tracker: tracker.log(metrics, step))

    def add_texts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log rows of (step, prompt, response, reward) to every tracker."""
        self._each(lambda tracker: tracker.add_texts(rows))

    def finish(self) -> None:
        """Close every tracker, after all calls before; wait at most `FINISH_S` for that."""
        self._calls.put(functools.partial(self._call, lambda tracker: tracker.finish()))
        self._calls.put(None)
        self._thread.join(FINISH_S)
        if self._thread.is_alive():
            logger.warning("trackers have not taken everything after %g s: the rest is in metrics.jsonl only", FINISH_S)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _start(self, name: str, module: Any, run_dir: Path, run_id: str) -> None:
        self._open[name] = KINDS[name](module, run_dir, run_id)

    def _each(self, do: Callable[[WandbTracker | MlflowTracker], None]) -> None:
        if self._room.acquire(blocking=False):
            self._calls.put(functools.partial(self._call, do))
        elif not self._has_dropped:
            self._has_dropped = True
            logger.warning("trackers are %d calls behind: some metrics are in metrics.jsonl only", MOST_PENDING)

    def _call(self, do: Callable[[WandbTracker | MlflowTracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            self._try(name, functools.partial(do, tracker))
        self._room.release()

    def _try(self, name: str, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # an unreachable dashboard must not end a long run
            self._open.pop(name, None)
            logger.warning(
                "%s is disabled, metrics.jsonl still has all metrics: %s: %s", name, type(error).__name__, error
            )
