"""Optional trackers, from accelerate. A tracker that fails is disabled with a warning.

Tracker calls may wait for a network, so one thread makes all of them, in order: MLflow binds its active run to a
thread.
"""

from __future__ import annotations

import functools
import importlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_triton.errors import RlhfError, reason_of

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


logger = logging.getLogger(__name__)
PROJECT = "rlhf-on-triton"
TEXTS_FILE = "rollouts.jsonl"
FINISH_S = 120.0  # time limit for the calls that are still queued when a run ends
MAX_PENDING = 1000  # queued calls to slow trackers; further calls are dropped


def _run_arguments(name: str, run_dir: Path, run_id: str) -> dict[str, Any]:
    """Return tracker `name`'s arguments that name its run `run_id` and, where possible, resume that run."""
    by_tracker = {
        "clearml": {"task_name": run_id},
        "mlflow": {"run_name": run_id},
        "swanlab": {"experiment_name": run_id},
        "trackio": {"name": run_id, "resume": "allow"},
        "wandb": {"name": run_id, "id": run_id, "resume": "allow", "dir": str(run_dir)},
    }
    return by_tracker.get(name, {})


class Trackers:
    """All configured trackers; a tracker that fails is disabled, and the run continues."""

    def __init__(self, names: Sequence[str], run_dir: Path, run_id: str, settings: Mapping[str, Any]) -> None:
        """Start each tracker with `settings`, {`section.key`: value}. Raises RlhfError if one cannot be imported."""
        self._open: dict[str, GeneralTracker] = {}
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._has_dropped = False
        self._run_dir = run_dir
        if names:
            importlib.import_module("accelerate.tracking")
        for name in dict.fromkeys(names):  # two of one kind would end each other
            try:
                importlib.import_module(name)  # here: a concurrent import in another thread would see a partial module
            except ImportError as error:
                raise RlhfError(f"actor.trackers: {name} cannot be imported: {error}; repair or remove it") from error
            start = functools.partial(self._start, name, run_id, settings)
            self._calls.put(functools.partial(self._guard, name, start))
        # A daemon: a tracker that hangs must not keep a run that has failed from ending.
        self._thread = threading.Thread(target=self._run_calls, name="trackers", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log scalars of `step` to every tracker."""
        self._call_all(lambda tracker: tracker.log(metrics, step))

    def add_texts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log rows of (step, prompt, response, reward) to every tracker that has tables."""
        columns = [*dict.fromkeys(name for row in rows for name in row)]  # not every row has all, such as `error`
        data = [[row.get(name) for name in columns] for row in rows]

        def add(tracker: Any) -> None:
            if hasattr(tracker, "log_table"):
                tracker.log_table("train_rollouts/table", columns=columns, data=data, step=rows[0]["step"])

        self._call_all(add)

    def finish(self) -> None:
        """Close every tracker after its queued calls; wait at most `FINISH_S` for them."""
        self._calls.put(functools.partial(self._call, self._finish))
        self._calls.put(None)
        self._thread.join(FINISH_S)
        if self._thread.is_alive():
            logger.warning("trackers are not done after %g s: the latest metrics are in metrics.jsonl only", FINISH_S)

    def _run_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _start(self, name: str, run_id: str, settings: Mapping[str, Any]) -> None:
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState()  # the trackers' log lines need it
        kind: Any = LOGGER_TYPE_TO_CLASS[name]
        folder = {"logging_dir": str(self._run_dir)} if kind.requires_logging_directory else {}
        tracker = kind(PROJECT, **folder, **_run_arguments(name, self._run_dir, run_id))
        tracker.start()
        tracker.store_init_configuration(dict(settings))
        self._open[name] = tracker

    def _finish(self, tracker: Any) -> None:
        texts = self._run_dir / TEXTS_FILE
        if hasattr(tracker, "log_artifact") and texts.is_file():  # in place of a table
            tracker.log_artifact(str(texts))
        tracker.finish()

    def _call_all(self, do: Callable[[GeneralTracker], None]) -> None:
        if self._calls.qsize() < MAX_PENDING:
            self._calls.put(functools.partial(self._call, do))
        elif not self._has_dropped:
            self._has_dropped = True
            logger.warning("trackers are %d calls behind: some metrics are in metrics.jsonl only", MAX_PENDING)

    def _call(self, do: Callable[[GeneralTracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            self._guard(name, functools.partial(do, tracker))

    def _guard(self, name: str, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # an unreachable dashboard must not end a long run
            self._open.pop(name, None)
            logger.warning(
                "%s is disabled after an error; metrics.jsonl still has all metrics: %s: %s",
                name,
                type(error).__name__,
                reason_of(error),
            )
