"""The critic sidecar, top to bottom: follow the journal; train, publish, reload, answer; checkpoint; resume; rewind.
Given: the configuration. Returns: when told to stop, with a checkpoint of everything trained.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import asdict

from python_backend.checkpoints import CheckpointError
from python_backend.config import RunConfig
from python_backend.journal import Entry, Journal, Result
from python_backend.modeling import load_critic
from python_backend.weights import WeightsStore
from trainer.checkpoint import CheckpointFolder, CheckpointState
from trainer.control_plane import ControlPlaneError
from trainer.critic_update import CriticUpdate
from trainer.progress import Progress
from trainer.publish import Publisher, VersionRejected, initialise_store

logger = logging.getLogger(__name__)
IDLE_S = 0.005


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
        self._reload: threading.Thread | None = None

    def run(self, stop: threading.Event) -> None:
        """Follow the journal until `stop` is set. Raises JournalLocked if another sidecar does."""
        with self._journal.lock() as self._epoch:
            metrics = self._config.run.dir / "critic_metrics.jsonl"
            self._progress = Progress(self._journal, metrics, epoch=self._epoch, stop=stop)
            initialise_store(self._store, self._config.critic, run_id=self._run_id)
            self._publisher = self._make_publisher()
            self._restore(at_most=None)
            logger.info("following run %s from step %d, epoch %d", self._run_id, self._step, self._epoch)
            while not stop.is_set():
                entry = self._next_entry()
                if entry is None:
                    self._progress.beat("idle")
                    self._publisher.heal()
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
        self._progress.step = entry.step
        replay = self._journal.result(entry) is not None  # answered before a crash: its version was served then
        payload, digest = self._journal.load(entry)
        report, reload, error = None, None, None
        try:
            report = self._update.train(payload, lambda n: self._progress.beat("training", n))
            if entry.step % self._settings.publish.every == 0 and not replay:
                reload = self._publisher.publish(self._update.critic, step=entry.step, beat=self._progress.wait)
        except (FloatingPointError, VersionRejected) as trouble:  # the caller is told; the old version serves on
            error = str(trouble)
            logger.error("step %d: %s", entry.step, error)
        self._step = entry.step
        if not replay:
            version = reload.version if reload else self._current()
            loss = report.loss_mean if report else None
            self._journal.finish(entry, Result(entry.name, version, loss, digest, error))
            if report is not None:
                self._progress.log_update(entry.step, version, report, reload)
        if self._step % self._settings.checkpoint_every == 0:
            self._write_checkpoint(asked=False)

    def _save(self, entry: Entry) -> None:
        error = None
        if entry.step == self._step:
            self._write_checkpoint(asked=True)
            error = self._publish_remainder()
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

    def _publish_remainder(self) -> str | None:
        """With `publish.every` above 1 the last updates may not be served yet; the cause if they cannot be."""
        if self._settings.publish.every > 1 and self._store.manifest(self._current()).step < self._step:
            try:
                self._publisher.publish(self._update.critic, step=self._step, beat=self._progress.wait)
            except VersionRejected as trouble:  # the checkpoint is on disk, and the old version serves on
                return str(trouble)
        return None

    def _reload_through_triton(self, step: int) -> None:
        """Runs beside the training: the old process serves meanwhile, and the new one follows CURRENT too."""
        try:
            reload = self._publisher.triton_reload()
            self._progress.log_reload(step, reload, "save")
        except ControlPlaneError as error:  # thread edge: the checkpoint is on disk, and the old process serves on
            logger.error("reload through Triton after the save: %s", error)

    def _finish_reload(self) -> None:
        while self._reload is not None and self._reload.is_alive():
            self._progress.wait("waiting for a reload through Triton")
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
                self._publisher.publish(self._update.critic, step=self._step, beat=self._progress.wait, parent=parent)
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
        if at_most is None:  # the main loop replays
            if step is not None:
                self._journal.restore_results(self._checkpoints.state(step).results)
            return None
        for entry in self._journal.entries():
            if entry.kind == "train" and entry.step == self._step + 1 <= at_most:
                with contextlib.suppress(FloatingPointError):  # its caller was told then, and training went on
                    self._update.train(self._journal.load(entry)[0], lambda n: self._progress.beat("replaying", n))
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
        self._progress.beat("writing a checkpoint")
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
