"""The sidecar's progress: its heartbeat, by which waiting callers judge it, and critic_metrics.jsonl."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from python_backend.store.heartbeat import Heartbeat
from python_backend.store.journal import Journal
from python_backend.store.jsonl import append_jsonl
from trainer.critic_update import UpdateReport
from trainer.patience import StoppedWaiting
from trainer.publish import Reload

logger = logging.getLogger(__name__)
BEAT_S = 0.5
STOP_PATIENCE_S = 20.0


class SidecarProgress:
    """The heartbeat and the metrics of one sidecar."""

    def __init__(self, journal: Journal, metrics_path: Path, *, epoch: int, stop: threading.Event) -> None:
        self._journal = journal
        self._metrics_path = metrics_path
        self._epoch = epoch
        self._stop = stop
        self._last_beat = 0.0
        self._state = "starting"
        self._give_up_at: float | None = None
        self.step = 0  # what the heartbeat names

    def beat(self, state: str, micro_batch: int = 0) -> None:
        """Show that something is done; written at most every BEAT_S."""
        self._state = state
        if time.monotonic() - self._last_beat >= BEAT_S:
            self._beat(state, micro_batch, trouble=None)

    def show_trouble(self, state: str, trouble: str | None) -> None:
        """Show at once what keeps the sidecar from going on; None: nothing does any more."""
        self._beat(state, 0, trouble)

    @contextlib.contextmanager
    def working(self, state: str) -> Iterator[None]:
        """Beat from a thread of its own while a block runs that is bounded but cannot beat: files, loads by servers."""
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

    def wait(self, state: str) -> None:
        """Beat while a server is waited for. Raises StoppedWaiting STOP_PATIENCE_S after a stop was asked for."""
        self.beat(state)
        if not self._stop.is_set():
            return
        if self._give_up_at is None:
            self._give_up_at = time.monotonic() + STOP_PATIENCE_S
        if time.monotonic() > self._give_up_at:
            raise StoppedWaiting(f"stopped while {state}: the step is journalled and will be trained again")

    def log_update(self, step: int, version: int, report: UpdateReport, reload: Reload | None) -> None:
        """One line per critic update; `version` is the one served now."""
        metrics = {
            "loss_mean": report.loss_mean, "train/loss": report.loss_mean, "train/grad_norm": report.grad_norm,
            "train/lr": report.lr, "train/step_time": report.seconds, "optimizer_steps": report.optimizer_steps,
            "skipped_steps": report.skipped_steps,
        }  # fmt: skip
        self._write({"step": step, **metrics, **_timing(reload), "weights_version": version})

    def log_failure(self, step: int, version: int, error: str, *, rejected: int) -> None:
        """One line per critic update that failed; the caller was told the same. `rejected`: versions, so far."""
        self._write({"step": step, "error": error, "versions_rejected": rejected, "weights_version": version})

    def log_reload(self, step: int, reload: Reload, reason: str) -> None:
        """One line per reload that no update asked for."""
        self._write({"step": step, "reason": reason, **_timing(reload), "weights_version": reload.version})

    def _beat(self, state: str, micro_batch: int, trouble: str | None) -> None:
        self._last_beat = time.monotonic()
        with contextlib.suppress(OSError):  # a sign of life that cannot be written must not end the life
            self._journal.beat(Heartbeat(self._epoch, self.step, micro_batch, state, time.time(), trouble))

    def _write(self, line: dict[str, object]) -> None:
        try:
            append_jsonl(self._metrics_path, [{"time": time.time(), **line}])
        except OSError as error:  # training goes on without it; the log has the figures
            logger.error("a line of %s is lost: %s", self._metrics_path.name, error)
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in line.items()}
        logger.info("%s", "  ".join(f"{key}={value}" for key, value in shown.items()))


def _timing(reload: Reload | None) -> dict[str, object]:
    if reload is None:
        return {}
    return {key: value for key, value in asdict(reload).items() if key != "version"}
