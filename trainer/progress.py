"""Reports the sidecar's progress: the heartbeat, from which the server judges its health, a JSONL file, and Prometheus.

Long work must renew the heartbeat: with `working` in a `with` block, `persist` for a disk operation, and `wait` while
waiting for a server.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TypeVar

from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.errors import RlhfError, reason_of
from rlhf_triton.models.out_of_memory import gpu_bytes
from rlhf_triton.monitoring.metrics import TRAINER, Exporter, Values
from rlhf_triton.store.heartbeat import Heartbeat
from rlhf_triton.store.journal import Journal
from rlhf_triton.store.jsonl import append_jsonl
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.trainer.critic_update import CriticUpdate, UpdateReport
from rlhf_triton.trainer.disk_retry import until_done
from rlhf_triton.trainer.publish import Published, Publisher

logger = logging.getLogger(__name__)
T = TypeVar("T")
BEAT_S = 0.5
STOP_PATIENCE_S = 20.0  # how long to keep waiting for a server after a stop was requested


class SidecarProgress:
    """The heartbeat and the metrics of one sidecar."""

    def __init__(self, config: RunConfig, journal: Journal, *, epoch: int, stop: threading.Event) -> None:
        self._journal = journal
        self._metrics_path = config.run.dir / "critic_metrics.jsonl"
        store = WeightsStore(config.run.weights_dir)

        def live() -> Values:
            pending = sum(not journal.is_answered(entry) for entry in journal.entries())
            values = {"journal_pending_entries": pending, "journal_last_step": journal.last_step()}
            version = store.current()
            return values if version is None else {**values, "weights_version": version}

        self._exporter = Exporter("rlhf_trainer_", TRAINER, config.run.dir, live=live)
        self._exporter.serve(config.monitoring.host, config.monitoring.trainer_port)
        self._rejected = 0
        self.epoch = epoch
        self._stop = stop
        self._last_beat = 0.0
        self._state = "starting"
        self._trouble: str | None = None  # what blocks the operation of `persist`
        self._give_up_at: float | None = None
        self.step = 0  # shown in the heartbeat

    def renew_heartbeat(self, state: str, micro_batch: int = 0) -> None:
        """Renew the heartbeat, at most every BEAT_S."""
        self._state = state
        if time.monotonic() - self._last_beat >= BEAT_S:
            self._write_heartbeat(state, micro_batch)

    def show_block(self, state: str, reason: str | None) -> None:
        """Write the error that blocks the sidecar to the heartbeat immediately; None clears it.

        It stays until the operation of `persist` ends, also while a retry is at work.
        """
        self._trouble = reason
        self._write_heartbeat(state, 0)

    @contextlib.contextmanager
    def working(self, state: str) -> Iterator[None]:
        """Renew the heartbeat from a background thread while the block runs.

        Only for work of bounded duration, such as file I/O: the heartbeat continues even if the block hangs.
        """
        done = threading.Event()
        self.renew_heartbeat(state)

        def renew() -> None:
            while not done.wait(BEAT_S):
                self.renew_heartbeat(self._state)

        thread = threading.Thread(target=renew, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def persist(self, operation: str, action: Callable[[], T]) -> T:
        """Run a disk operation with retries while renewing the heartbeat; return its result. Raises as `until_done`."""
        try:
            return until_done(operation, self.working(operation)(action), self._stop, self.show_block)
        finally:
            self._trouble = None

    def wait(self, state: str) -> None:
        """Renew the heartbeat with `state`; call this repeatedly while waiting for a server.

        Raises:
            RlhfError: a stop was requested more than STOP_PATIENCE_S ago.
        """
        self.renew_heartbeat(state)
        if not self._stop.is_set():
            return
        if self._give_up_at is None:
            self._give_up_at = time.monotonic() + STOP_PATIENCE_S
        if time.monotonic() > self._give_up_at:
            raise RlhfError(f"stopped while {state}; the next start repeats it")

    def log_update(self, step: int, version: int, report: UpdateReport, published: Published | None) -> None:
        """Write one line for a critic update; `version` is the one served now."""
        timing = {} if published is None else asdict(published)
        if published is not None:
            del timing["version"]
            timing["reload"] = timing.pop("mode")
        line = {
            "loss_mean": report.loss_mean,
            "train/loss": report.loss_mean,
            "train/grad_norm": report.grad_norm,
            "train/lr": report.lr,
            "train/step_time": report.seconds,
            "optimizer_steps": report.optimizer_steps,
            "skipped_steps": report.skipped_steps,
            **timing,
        }
        self._log(step, version, line, report.out_of_memory, report.memory)
        exporter = self._exporter
        exporter.count("updates")
        exporter.count("skipped_optimizer_steps", report.skipped_steps)
        exporter.show(
            {
                "loss": report.loss_mean,
                "grad_norm": report.grad_norm,
                "learning_rate": report.lr,
                "update_seconds": report.seconds,
            }
        )
        if published is not None:
            phases = {"write": published.publish_ms, "verify": published.verify_ms, "reload": published.reload_ms}
            exporter.show({"publish_seconds": {phase: ms / 1e3 for phase, ms in phases.items()}})

    def log_failure(self, step: int, version: int, error: str, publisher: Publisher, update: CriticUpdate) -> None:
        """Write one line for a critic update that failed, or whose version was rejected."""
        halved = update.trained.memory.new_halvings()
        memory = gpu_bytes(update.critic.model.device)
        self._log(step, version, {"error": error, "versions_rejected": publisher.rejected}, halved, memory)
        self._exporter.count("failed_updates")
        self._exporter.count("rejected_versions", publisher.rejected - self._rejected)
        self._rejected = publisher.rejected

    def _write_heartbeat(self, state: str, micro_batch: int) -> None:
        self._last_beat = time.monotonic()
        trouble = self._trouble
        shown = {"step": self.step, "heartbeat_timestamp_seconds": time.time(), "blocked": float(trouble is not None)}
        self._exporter.show(shown)
        with contextlib.suppress(OSError):  # a heartbeat that cannot be written must not stop the sidecar
            self._journal.write_heartbeat(
                Heartbeat(
                    epoch=self.epoch,
                    step=self.step,
                    micro_batch=micro_batch,
                    state=state,
                    time=time.time(),
                    trouble=trouble,
                )
            )

    def _log(self, step: int, version: int, line: dict[str, object], halved: int, memory: dict[str, int]) -> None:
        """Write and export the metrics of every update; `halved`: how often its micro-batches were halved."""
        self._exporter.show({"step": step, **memory})
        self._exporter.count("out_of_memory", halved)
        out_of_memory = {"out_of_memory/trainer.token_budget": halved}
        line = {"step": step, **line, **out_of_memory, **memory, "weights_version": version}
        try:
            append_jsonl(self._metrics_path, [{"time": time.time(), **line}])
        except OSError as error:  # training continues without the line; the same numbers go to the log
            logger.error("a line of %s could not be written: %s", self._metrics_path.name, reason_of(error))
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in line.items()}
        text = "  ".join(f"{key}={value}" for key, value in shown.items())
        logger.info("%s", text, extra={"step": step, "version": version})
