"""The critic sidecar, top to bottom: follow the journal; train, publish, reload, answer; checkpoint; resume; rewind."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TypeVar

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.config import RunConfig
from python_backend.errors import NotFinite
from python_backend.models.modeling import load_critic
from python_backend.store.journal import Entry, Journal, Result
from python_backend.store.journal_entry import DamagedEntry
from python_backend.store.weights import WeightsStore
from trainer.checkpoint import CheckpointFolder, CheckpointState
from trainer.control_plane import ControlPlaneError
from trainer.critic_update import CriticUpdate
from trainer.fingerprint import deciding_settings, fingerprint
from trainer.patience import Patience, StoppedWaiting
from trainer.progress import SidecarProgress
from trainer.publish import Publisher, Reload, VersionRejected, initialise_store
from trainer.resume import Origin, give_up, load_newest, replay, warn_of_changes
from trainer.verification import holds_weights

logger = logging.getLogger(__name__)
T = TypeVar("T")
IDLE_S = 0.005
SETTLED_S = 1.0  # far above the grain of a file system's clock


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
        self._nothing_due: tuple[int | None, float] = (None, 0.0)  # the journal as it was, and since when

    def run(self, stop: threading.Event) -> None:
        """Follow the journal until `stop` is set. Raises JournalLocked if another sidecar does."""
        with contextlib.ExitStack() as held:
            unseen = Patience(stop, lambda *_: None)  # before the lock, the heartbeat may be another sidecar's
            self._epoch = unseen.until_done("starting", lambda: held.enter_context(self._journal.lock()))
            metrics = self._config.run.dir / "critic_metrics.jsonl"
            self._progress = SidecarProgress(self._journal, metrics, epoch=self._epoch, stop=stop)
            self._patiently = Patience(stop, self._progress.show_trouble).until_done
            self._persist("tidying up the journal", self._journal.sweep)
            section = self._config.critic
            self._persist("making version 0", lambda: initialise_store(self._store, section, run_id=self._run_id))
            self._publisher = self._make_publisher()
            self._origin = Origin(
                self._run_id, self._store.manifest(0).sha256, deciding_settings(self._settings), self._config.run.seed
            )
            self._restore_newest(starting=True)
            logger.info("following run %s from step %d, epoch %d", self._run_id, self._step, self._epoch)
            while not stop.is_set():
                entry = self._next_entry()
                if entry is None:
                    self._progress.beat("idle")
                    self._publisher.look()
                    stop.wait(IDLE_S)
                    continue
                match entry.kind:
                    case "train" if entry.step <= self._step:
                        self._answer_again(entry)
                    case "train":
                        self._train(entry)
                    case "save":
                        self._save(entry)
                    case "rewind":
                        self._rewind(entry)
            if self._checkpoints.latest() != self._step and self._step:
                self._write_checkpoint(asked=False)
            with contextlib.suppress(StoppedWaiting):  # all is on disk: the server ends a slow reload without us
                self._finish_reload()

    def _train(self, entry: Entry) -> None:
        self._progress.step = entry.step
        answered = self._journal.result(entry) is not None  # before a crash: its version was served then
        report, reload, digest, error = None, None, None, None
        try:
            with self._progress.working(f"reading step {entry.step}"):
                payload, digest = self._journal.load(entry)
            report = self._update.train(payload, lambda n: self._progress.beat("training", n))
            if entry.step % self._settings.publish.every == 0 and not answered:
                reload = self._publish(entry.step)
        except (NotFinite, VersionRejected) as trouble:  # the caller is told; the old version serves on
            error = str(trouble)
        except DamagedEntry as damage:
            error = give_up(self._journal, entry, damage)
            self._journal.forget_aside(keep=self._settings.keep_set_aside)
        self._step = entry.step
        if not answered:
            version = reload.version if reload else self._current()
            loss = report.loss_mean if report else None
            self._finish(entry, Result(entry.name, version, loss, digest, error))
            if report is not None:
                self._progress.log_update(entry.step, version, report, reload)
            if error is not None:
                self._progress.log_failure(entry.step, version, error, rejected=self._publisher.rejected)
        if self._step % self._settings.checkpoint_every == 0:
            self._write_checkpoint(asked=False)

    def _answer_again(self, entry: Entry) -> None:
        """Answer a step that is trained already and has lost its result; the newest checkpoint may remember it."""
        newest = self._checkpoints.latest()
        remembered = [] if newest is None else self._checkpoints.state(newest).results
        digest = None
        with contextlib.suppress(DamagedEntry), self._progress.working(f"reading step {entry.step}"):
            digest = self._journal.load(entry)[1]
        known = next((Result(**data) for data in remembered if data["entry"] == entry.name), None)
        if known is None or known.digest != digest:
            known = Result(
                entry.name, self._current(), digest=digest,
                error=f"step {entry.step} was sent again after its result was lost, and the critic stands at step "
                f"{self._step}: resume the actor from its checkpoint, which rewinds the critic",
            )  # fmt: skip
        self._finish(entry, known)

    def _save(self, entry: Entry) -> None:
        try:
            keep_steps = self._journal.keep_steps(entry)
        except DamagedEntry as damage:  # the caller is told
            error: str | None = str(damage)
        else:
            error = self._checkpoint_of(entry.step) or self._publish_remainder()
            if error is None and keep_steps is not None:
                self._persist("removing checkpoints", lambda: self._keep_only(keep_steps, entry.step))
        self._finish(entry, Result(entry.name, self._current(), error=error))
        under_way = self._reload is not None and self._reload.is_alive()  # it loads what CURRENT names as well
        if self._settings.reload_on_save == "triton" and not under_way:
            self._reload = threading.Thread(
                target=self._reload_through_triton, args=(self._step,), name="reload", daemon=True
            )
            self._reload.start()

    def _checkpoint_of(self, step: int) -> str | None:
        """Have a checkpoint of `step` that an actor's may name; the cause if that cannot be."""
        if step == self._step:
            self._write_checkpoint(asked=True)
        elif step in self._checkpoints.steps():
            self._persist("marking a checkpoint", lambda: self._checkpoints.mark_asked(step))
        else:  # the request came late: go back for it
            error = self._restore(at_most=step)
            if error is None:
                self._write_checkpoint(asked=True)
            self._restore_newest()
            return error and f"step: {error}"
        return None

    def _publish_remainder(self) -> str | None:
        """With `publish.every` above 1 the last updates may not be served yet; the cause if they cannot be."""
        if self._settings.publish.every > 1 and self._store.manifest(self._current()).step < self._step:
            try:
                self._publish(self._step)
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
        owners = self._journal.owners(entry)
        if entry.target == entry.step == self._step:  # a new or resumed run that agrees already
            if self._step:
                self._write_checkpoint(asked=True)
            error = self._serve_these_weights()  # the answer names the weights of this step, not of another one
            self._finish(entry, Result(entry.name, self._current(), error=error, owners=owners))
            return
        error = self._restore(at_most=entry.target)
        if error is None:
            aside = self._persist("setting steps aside", lambda: self._journal.set_aside_after(entry))
            self._journal.forget_aside(keep=self._settings.keep_set_aside)
            self._persist("removing checkpoints", lambda: self._checkpoints.drop_after(entry.target))
            error = self._publish_again()
            logger.warning("rewound to step %d; set aside: %s", self._step, ", ".join(aside) or "nothing")
            if self._step:
                self._write_checkpoint(asked=True)
        else:
            error, owners = f"rewind_to: {error}", owners[1:]  # whoever owned the run still does
            self._restore_newest()
        self._finish(entry, Result(entry.name, self._current(), error=error, owners=owners))

    def _serve_these_weights(self) -> str | None:
        """Publish the weights unless they are served: a version of this step may have been refused or skipped, or a
        person may have rolled back; the cause if they cannot be served."""
        with self._progress.working("comparing what is served"):
            served = holds_weights(self._store, self._current(), self._update.critic)
        return None if served else self._publish_again()

    def _publish_again(self) -> str | None:
        """Publish weights that may have had a number before under a new one; the cause if they cannot be served."""
        parent = max(manifest.version for manifest in self._store.manifests() if manifest.step <= self._step)
        try:
            self._publish(self._step, parent)
        except VersionRejected as trouble:  # the caller is told; the old version serves on
            return str(trouble)
        return None

    def _publish(self, step: int, parent: int | None = None) -> Reload:
        """Publish the critic as of `step`; a version that an attempt before has written is not written again."""
        newest = self._store.versions()[-1]

        def attempt() -> Reload:
            written = self._store.versions()[-1] > newest
            return self._publisher.publish(
                self._update.critic, step=step, beat=self._progress.wait, parent=None if written else parent
            )

        return self._persist(f"publishing step {step}", attempt)

    def _persist(self, what: str, action: Callable[[], T]) -> T:
        """Do what needs the disk, with a heartbeat beside it, as often as the disk refuses."""

        def attempt() -> T:
            with self._progress.working(what):
                return action()

        return self._patiently(what, attempt)

    def _finish(self, entry: Entry, result: Result) -> None:
        """Answer the caller; only trainings are kept, until a checkpoint covers them."""
        self._persist(f"recording the result of {entry.name}", lambda: self._journal.finish(entry, result))
        if entry.kind != "train":
            self._persist(f"removing {entry.name}", lambda: self._journal.drop(entry))

    def _restore(self, *, at_most: int) -> str | None:
        """Load the newest checkpoint up to `at_most` and train on from it up to there; a reason if that cannot be."""
        try:
            self._load_newest(at_most=at_most)
            self._step = replay(self._update, self._journal, self._progress, start=self._step, end=at_most)
        except (CheckpointError, DamagedEntry) as trouble:  # the caller is told, and training goes on
            return f"{at_most} cannot be reached: {trouble}"
        if self._step != at_most:
            kept = ", ".join(map(str, self._checkpoints.steps())) or "none"
            return f"{at_most} cannot be reached: checkpoints are at steps {kept}"
        return None

    def _restore_newest(self, *, starting: bool = False) -> None:
        """Load the newest checkpoint; the main loop replays what follows it. Raises CheckpointError."""
        state = self._load_newest(at_most=None)
        if starting and state is not None:
            warn_of_changes(state, self._origin.settings)
            self._persist("restoring results", lambda: self._journal.restore_results(state.results))

    def _load_newest(self, *, at_most: int | None) -> CheckpointState | None:
        with self._progress.working("loading a checkpoint"):
            base = load_critic(self._store.folder(0), device=self._settings.device)
            self._update = CriticUpdate(base, self._settings)
            state = load_newest(self._update, self._checkpoints, self._journal, self._origin, at_most=at_most)
        self._step = state.step if state else 0
        return state

    def _next_entry(self) -> Entry | None:
        changed, (seen, since) = self._journal.changed_at(), self._nothing_due
        if changed == seen and time.monotonic() - since > SETTLED_S:  # idle for long: spare the CPU
            return None
        entry = self._due_entry()
        if entry is not None or changed != seen:
            self._nothing_due = (None if entry else changed, time.monotonic())
        return entry

    def _due_entry(self) -> Entry | None:
        for entry in self._journal.entries():
            due = (entry.kind == "train" and entry.step > self._step) or not self._journal.is_answered(entry)
            if due and entry.kind == "train" and entry.step > self._step + 1:
                raise CheckpointError(
                    f"the journal in {self._journal.root} goes on with step {entry.step}, but the newest checkpoint "
                    f"and the steps after it end at {self._step}: put the missing checkpoint back, or begin a new run"
                )
            if due and not (entry.kind == "save" and entry.step > self._step):  # its step is on the way still
                return entry
        return None

    def _write_checkpoint(self, *, asked: bool) -> None:
        self._progress.beat("writing a checkpoint")
        results = [asdict(result) for result in self._journal.results() if result.entry.endswith(".train")]
        state = CheckpointState(
            self._run_id, self._step, self._update.optimizer_step, self._current(), self._epoch, asked,
            self._origin.settings, fingerprint(self._origin.settings), self._origin.base_sha256, results,
        )  # fmt: skip

        def write() -> None:
            self._checkpoints.save(self._update, state)
            self._forget()

        self._persist(f"writing the checkpoint of step {self._step}", write)

    def _keep_only(self, keep_steps: Sequence[int], step: int) -> None:
        self._checkpoints.keep_only(keep_steps, step=step)
        self._forget()

    def _forget(self) -> None:
        """Remove checkpoints that nobody needs, and entries that no way back to an actor's checkpoint needs."""
        self._checkpoints.prune(keep=self._settings.keep_checkpoints, keep_damaged=self._settings.keep_set_aside)
        covered = self._checkpoints.latest() or 0
        base = max(self._checkpoints.asked_steps(), default=0)
        if covered - base > self._settings.keep_entries:
            base = covered
        self._journal.forget_covered(covered, base=base)
        self._journal.sweep()

    def _make_publisher(self) -> Publisher:
        servers = self._settings.servers or [self._config.server.grpc_url]
        return Publisher(
            self._store, run_id=self._run_id, epoch=self._epoch, servers=servers, reload=self._config.critic.reload,
            timeout_s=self._settings.serve_timeout_s, keep=self._settings.publish.keep,
            show_trouble=self._progress.show_trouble,
        )  # fmt: skip

    def _current(self) -> int:
        return self._store.current() or 0
