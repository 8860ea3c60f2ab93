"""The sidecar's progress reports: its heartbeat, by which the server judges its health, and critic_metrics.jsonl.

Long work renews the heartbeat: `working` for a `with` block, `persist` for a disk operation, `wait` for a server.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from python_backend.store.heartbeat import Heartbeat
from python_backend.store.journal import Journal
from python_backend.store.jsonl import append_jsonl
from trainer.critic_update import UpdateReport
from trainer.patience import Patience, StoppedWaiting
from trainer.publish import Reload

logger = logging.getLogger(__name__)
T = TypeVar("T")
BEAT_S = 0.5
STOP_PATIENCE_S = 20.0  # how long to keep waiting for a server after a stop was requested


class SidecarProgress:
    """The heartbeat and the metrics of one sidecar."""

    def __init__(self, journal: Journal, metrics_path: Path, *, epoch: int, stop: threading.Event) -> None:
        self._journal = journal
        self._metrics_path = metrics_path
        self.epoch = epoch
        self._stop = stop
        self._patience = Patience(stop, self.show_trouble)
        self._last_beat = 0.0
        self._state = "starting"
        self._give_up_at: float | None = None
        self.step = 0  # shown in the heartbeat

    def beat(self, state: str, micro_batch: int = 0) -> None:
        """Renew the heartbeat, at most every BEAT_S."""
        self._state = state
        if time.monotonic() - self._last_beat >= BEAT_S:
            self._beat(state, micro_batch, trouble=None)

    def show_trouble(self, state: str, trouble: str | None) -> None:
        """Write the error that blocks the sidecar to the heartbeat at once; None clears it."""
        self._beat(state, 0, trouble)

    @contextlib.contextmanager
    def working(self, state: str) -> Iterator[None]:
        """Renew the heartbeat from a background thread during a block that cannot do so itself.

        Use it only for work of bounded duration, such as file I/O: the heartbeat continues even if the block hangs.
        """
        done = threading.Event()
        self.beat(state)

        def beat() -> None:
            while not done.wait(BEAT_S):
                self.beat(self._state)

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def persist(self, what: str, action: Callable[[], T]) -> T:
        """Run a disk operation with a heartbeat and retries; return its result. Raises as `Patience.until_done`."""
        return self._patience.until_done(what, self.working(what)(action))  # a heartbeat around each attempt

    def wait(self, state: str) -> None:
        """Renew the heartbeat while waiting for a server.

        Raises:
            StoppedWaiting: a stop was requested more than STOP_PATIENCE_S ago.
        """
        self.beat(state)
        if not self._stop.is_set():
            return
        if self._give_up_at is None:
            self._give_up_at = time.monotonic() + STOP_PATIENCE_S
        if time.monotonic() > self._give_up_at:
            raise StoppedWaiting(f"stopped while {state}: the step is journalled and will be trained again")

    def log_update(self, step: int, version: int, report: UpdateReport, reload: Reload | None) -> None:
        """Write one line for a critic update; `version` is the one served now."""
        metrics = {
            "loss_mean": report.loss_mean, "train/loss": report.loss_mean, "train/grad_norm": report.grad_norm,
            "train/lr": report.lr, "train/step_time": report.seconds, "optimizer_steps": report.optimizer_steps,
            "skipped_steps": report.skipped_steps,
        }  # fmt: skip
        self._write({"step": step, **metrics, **_timing(reload), "weights_version": version})

    def log_failure(self, step: int, version: int, error: str, *, rejected: int) -> None:
        """Write one line for a failed critic update; `rejected` is the number of versions rejected so far."""
        self._write({"step": step, "error": error, "versions_rejected": rejected, "weights_version": version})

    def log_reload(self, step: int, reload: Reload, reason: str) -> None:
        """Write one line for a reload that is not part of a critic update."""
        self._write({"step": step, "reason": reason, **_timing(reload), "weights_version": reload.version})

    def _beat(self, state: str, micro_batch: int, trouble: str | None) -> None:
        self._last_beat = time.monotonic()
        with contextlib.suppress(OSError):  # a heartbeat that cannot be written must not stop the sidecar
            self._journal.beat(Heartbeat(self.epoch, self.step, micro_batch, state, time.time(), trouble))

    def _write(self, line: dict[str, object]) -> None:
        try:
            append_jsonl(self._metrics_path, [{"time": time.time(), **line}])
        except OSError as error:  # training continues without the line; the same numbers go to the log
            logger.error("a line of %s could not be written: %s", self._metrics_path.name, error)
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in line.items()}
        logger.info("%s", "  ".join(f"{key}={value}" for key, value in shown.items()))


def _timing(reload: Reload | None) -> dict[str, object]:
    if reload is None:
        return {}
    return {key: value for key, value in asdict(reload).items() if key != "version"}
