"""The critic sidecar, top to bottom: follow the journal; train, publish, reload, answer; checkpoint; resume; rewind.
Given: the configuration. Returns: when told to stop, with a checkpoint of everything trained.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from dataclasses import asdict

from python_backend.config import RunConfig
from python_backend.journal import Entry, Heartbeat, Journal, Result
from python_backend.modeling import CheckpointError, load_critic
from python_backend.weights import WeightsStore
from trainer.checkpoint import CheckpointFolder, CheckpointState
from trainer.control_plane import ControlPlaneError
from trainer.critic_update import CriticUpdate, UpdateReport
from trainer.publish import Publisher, Reload, VersionRejected, initialise_store

logger = logging.getLogger(__name__)
IDLE_S = 0.005
BEAT_S = 0.5
STOP_PATIENCE_S = 20.0


class StoppedWaiting(RuntimeError):
    """A stop came while no server served the version; nothing is lost, the journal holds the step."""


class Sidecar:
    """One critic's trainer; `run` holds the journal's lock for its whole life."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._settings = config.trainer
        self._run_id = config.run.identity
        self._journal = Journal(config.run.journal_dir, self._run_id)
        self._store = WeightsStore(config.run.weights_dir)
        self._checkpoints = CheckpointFolder(config.run.dir / "checkpoints" / "critic")
        self._step = 0
        self._last_beat = 0.0
        self._reload: threading.Thread | None = None
        self._give_up_at: float | None = None

    def run(self, stop: threading.Event) -> None:
        """Follow the journal until `stop` is set. Raises JournalLocked if another sidecar does."""
        self._stop = stop
        with self._journal.lock() as self._epoch:
            initialise_store(self._store, self._config.critic.checkpoint, run_id=self._run_id)
            self._publisher = self._make_publisher()
            self._restore(at_most=None)
            logger.info("following run %s from step %d, epoch %d", self._run_id, self._step, self._epoch)
            while not stop.is_set():
                entry = self._next_entry()
                if entry is None:
                    self._beat("idle")
                    stop.wait(IDLE_S)
                    continue
                match entry.kind:
                    case "train":
                        self._train(entry)
                    case "save":
                        self._save(entry)
                    case "rewind":
                        self._rewind(entry)
            self._finish_reload()
            if self._checkpoints.latest() != self._step and self._step:
                self._write_checkpoint(asked=False)

    def _train(self, entry: Entry) -> None:
        replay = self._journal.result(entry) is not None  # answered before a crash: its version was served then
        payload, digest = self._journal.load(entry)
        report, reload, error = None, None, None
        try:
            report = self._update.train(payload, lambda n: self._beat("training", step=entry.step, micro_batch=n))
            if entry.step % self._settings.publish.every == 0 and not replay:
                reload = self._publisher.publish(self._update.critic, step=entry.step, beat=self._wait)
        except (FloatingPointError, VersionRejected) as trouble:  # the caller is told; the old version serves on
            error = str(trouble)
            logger.error("step %d: %s", entry.step, error)
        self._step = entry.step
        if not replay:
            version = reload.version if reload else self._current()
            loss = report.loss_mean if report else None
            self._journal.finish(entry, Result(entry.name, version, loss, digest, error))
            self._log_update(report, reload)
        if self._step % self._settings.checkpoint_every == 0:
            self._write_checkpoint(asked=False)

    def _save(self, entry: Entry) -> None:
        error = None
        if entry.step == self._step:
            self._write_checkpoint(asked=True)
        elif entry.step not in self._checkpoints.steps():
            error = (
                f"step: {entry.step}, but the critic stands at step {self._step}: no checkpoint of it can be written"
            )
        self._journal.finish(entry, Result(entry.name, self._current(), error=error))
        self._journal.drop(entry)
        if self._settings.reload_on_save == "triton":
            self._finish_reload()
            self._reload = threading.Thread(
                target=self._reload_through_triton, args=(self._step,), name="reload", daemon=True
            )
            self._reload.start()

    def _reload_through_triton(self, step: int) -> None:
        """Runs beside the training: the old process serves meanwhile, and the new one follows CURRENT too."""
        try:
            reload = self._publisher.triton_reload()
            self._log_metrics({**asdict(reload), "step": step, "reason": "save"})
        except ControlPlaneError as error:  # thread edge: the checkpoint is on disk, and the old process serves on
            logger.error("reload through Triton after the save: %s", error)

    def _finish_reload(self) -> None:
        while self._reload is not None and self._reload.is_alive():
            self._wait("waiting for a reload through Triton")
            self._reload.join(IDLE_S)

    def _rewind(self, entry: Entry) -> None:
        """Go back to step `entry.target`; later entries are set aside, the weights get a new number."""
        if entry.target == entry.step == self._step:  # a new or resumed run that agrees already
            self._journal.finish(entry, Result(entry.name, self._current()))
            self._journal.drop(entry)
            return
        error = self._restore(at_most=entry.target)
        if error is None:
            aside = self._journal.set_aside_after(entry)
            self._checkpoints.drop_after(entry.target)
            parent = max(m.version for m in map(self._store.manifest, self._store.versions()) if m.step <= self._step)
            try:
                self._publisher.publish(self._update.critic, step=self._step, beat=self._wait, parent=parent)
            except VersionRejected as trouble:  # the caller is told; the old version serves on
                error = str(trouble)
            logger.warning("rewound to step %d; set aside: %s", self._step, ", ".join(aside) or "nothing")
        else:
            self._restore(at_most=None)
        self._journal.finish(entry, Result(entry.name, self._current(), error=error))
        self._journal.drop(entry)

    def _restore(self, *, at_most: int | None) -> str | None:
        """Load the newest checkpoint up to `at_most` and train on from it up to there; a reason if that cannot be."""
        base = load_critic(self._store.folder(0), device=self._settings.device)
        self._update = CriticUpdate(base, self._settings)
        step = self._checkpoints.latest(at_most=at_most)
        self._step = 0 if step is None else self._checkpoints.load(step, self._update).step
        if at_most is None:
            return None  # the main loop replays
        for entry in self._journal.entries():
            if entry.kind == "train" and entry.step == self._step + 1 <= at_most:
                with contextlib.suppress(FloatingPointError):  # its caller was told then, and training went on
                    self._update.train(self._journal.load(entry)[0], lambda n: self._beat("replaying", micro_batch=n))
                self._step = entry.step
        if self._step != at_most:
            kept = ", ".join(map(str, self._checkpoints.steps())) or "none"
            return f"rewind_to: {at_most} cannot be reached: checkpoints are at steps {kept}"
        return None

    def _next_entry(self) -> Entry | None:
        for entry in self._journal.entries():
            due = entry.step > self._step if entry.kind == "train" else self._journal.result(entry) is None
            if due and entry.kind == "train" and entry.step != self._step + 1:
                raise CheckpointError(
                    f"the journal in {self._journal.root} goes on with step {entry.step}, but the newest checkpoint "
                    f"and the steps after it end at {self._step}: put the missing checkpoint back, or begin a new run"
                )
            if due and not (entry.kind == "save" and entry.step > self._step):  # its step is on the way still
                return entry
        return None

    def _write_checkpoint(self, *, asked: bool) -> None:
        self._beat("writing a checkpoint")
        results = [asdict(result) for result in self._journal.results() if result.digest is not None]
        state = CheckpointState(
            self._run_id, self._step, self._update.optimizer_step, self._current(), self._epoch, asked,
            self._settings.model_dump(mode="json"), results,
        )  # fmt: skip
        self._checkpoints.save(self._update, state)
        self._checkpoints.prune(keep=self._settings.keep_checkpoints)
        self._journal.forget_covered(self._step)

    def _make_publisher(self) -> Publisher:
        return Publisher(
            self._store, run_id=self._run_id, epoch=self._epoch, grpc_url=self._config.server.grpc_url,
            reload=self._config.critic.reload, timeout_s=self._settings.serve_timeout_s,
            keep=self._settings.publish.keep,
        )  # fmt: skip

    def _current(self) -> int:
        return self._store.current() or 0

    def _wait(self, state: str) -> None:
        """Beat while a server is waited for; give up STOP_PATIENCE_S after a stop was asked for."""
        self._beat(state)
        if not self._stop.is_set():
            return
        if self._give_up_at is None:
            self._give_up_at = time.monotonic() + STOP_PATIENCE_S
        if time.monotonic() > self._give_up_at:
            raise StoppedWaiting(f"stopped while {state}: the step is journalled and will be trained again")

    def _beat(self, state: str, *, step: int | None = None, micro_batch: int = 0) -> None:
        if time.monotonic() - self._last_beat >= BEAT_S:
            self._last_beat = time.monotonic()
            step = self._step if step is None else step
            self._journal.beat(Heartbeat(self._epoch, step, micro_batch, state, time.time()))

    def _log_update(self, report: UpdateReport | None, reload: Reload | None) -> None:
        if report is None:
            return
        timing = asdict(reload) if reload else {}
        self._log_metrics({
            "step": self._step, "loss_mean": report.loss_mean, "train/loss": report.loss_mean,
            "train/grad_norm": report.grad_norm, "train/lr": report.lr, "train/step_time": report.seconds,
            "optimizer_steps": report.optimizer_steps, "skipped_steps": report.skipped_steps, **timing,
        })  # fmt: skip

    def _log_metrics(self, line: dict[str, object]) -> None:
        line = {"time": time.time(), **line}
        line["weights_version"] = line.pop("version", self._current())
        with (self._config.run.dir / "critic_metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = {
            key: f"{value:.4g}" if isinstance(value, float) else value for key, value in line.items() if key != "time"
        }
        logger.info("%s", "  ".join(f"{key}={value}" for key, value in shown.items()))
