"""The critic in training: weights, optimizer and step, restored from checkpoints and journal.

If a damaged checkpoint can be recomputed from the journal, the damage is logged and training continues.
"""

import logging

import numpy as np

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.digests import brief
from rlhf_triton.errors import NotFinite
from rlhf_triton.models.canary import canary_outputs
from rlhf_triton.models.out_of_memory import OutOfMemory
from rlhf_triton.monitoring.log_lines import set_log_position
from rlhf_triton.monitoring.tracing import is_tracing, span
from rlhf_triton.store.journal import Journal
from rlhf_triton.store.journal_entry import DamagedEntry, Entry, Result
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.trainer.checkpoint import KEEP_SET_ASIDE, CheckpointFolder, CheckpointState, DamagedCheckpoint
from rlhf_triton.trainer.critic_update import CriticUpdate, UpdateReport, load_update
from rlhf_triton.trainer.progress import SidecarProgress
from rlhf_triton.training_engine.ranks import ALONE, AnyRanks
from rlhf_triton.wire.training_payload import TrainPayload

logger = logging.getLogger(__name__)


class CriticState:
    """The critic after one step of the journal."""

    update: CriticUpdate
    step: int

    def __init__(
        self,
        config: RunConfig,
        store: WeightsStore,
        journal: Journal,
        checkpoints: CheckpointFolder,
        progress: SidecarProgress,
        ranks: AnyRanks = ALONE,
    ) -> None:
        """Restore the newest checkpoint, and results missing from the journal; warn of changed settings.

        Args:
            ranks: the processes that train the critic, of which this is rank 0.

        Raises: as `restore_newest`.
        """
        self._config = config
        self._ranks = ranks
        self._store = store
        self._journal = journal
        self._checkpoints = checkpoints
        self._progress = progress
        self.traceparent: str | None = None  # trace context of the last trained request
        self.base_digest = store.manifest(0).digest  # digest of version 0's weights
        state = self.restore_newest()
        if state is None:
            return
        if changes := self.update.trained.changes(state.settings):
            logger.warning(
                "the critic was trained up to step %d under other settings (%s); the new ones apply from here on",
                state.step,
                "; ".join(changes),
            )
        progress.persist("restoring results", lambda: journal.restore_results(state.results))

    def train(self, entry: Entry) -> tuple[UpdateReport | None, Result]:
        """Train on the next step unless its journal result is a failure; return the report, if trained, and the result.

        Raises:
            CheckpointError: the journal entry is damaged, but its step has already been trained and acknowledged; or
                the step made the weights non-finite, and the previous state cannot be restored.
            OutOfMemory, NotFinite: a replayed step, which was trained and acknowledged, now fails.
        """
        report = None
        digest = None
        error = None
        self._progress.step = entry.step
        set_log_position(step=entry.step)
        self.traceparent = self._journal.traceparent(entry) if is_tracing() else None
        recorded = self._journal.result(entry)
        try:
            if recorded is None or recorded.loss_mean is not None:
                with self._progress.working(f"reading step {entry.step}"):
                    payload, digest = self._journal.load(entry)
                with span("train", parent=self.traceparent, step=entry.step):
                    report, error = self._train_payload(payload, "training", recorded)
        except DamagedEntry as damage:
            if recorded is not None:
                raise CheckpointError(
                    f"{damage}; step {entry.step} has already been trained and acknowledged, so the weights cannot be "
                    "reproduced without it; restore the file, or start a new run"
                ) from damage
            self._journal.set_aside_damaged(entry)
            self._journal.forget_aside(keep=KEEP_SET_ASIDE)
            error = f"step {entry.step} was not trained; training continues with the next step: {damage}"
        self.step = entry.step  # also after a failed step: its caller gets the error and continues with the next step
        return report, recorded or Result(
            entry=entry.name,
            weights_version=-1,
            loss_mean=report.loss_mean if report else None,
            digest=digest,
            error=error,
            skipped_batches=report.skipped_batches if report else [],
        )

    def restore_newest(self, *, at_most: int | None = None) -> CheckpointState | None:
        """Load the newest checkpoint up to `at_most`; the main loop replays the steps after it.

        Returns the checkpoint's state; None if there is no checkpoint: the critic then starts from version 0.

        Raises:
            WeightsError: version 0, which has the weights that training does not change, is damaged.
            CheckpointError: as `_load_newest`.
        """
        with self._progress.working("verifying version 0"):
            self._store.verify_hashes(self._store.manifest(0))
        with self._progress.working("loading a checkpoint"):
            config = self._config
            folder = self._store.folder(0)
            dtype = config.critic.dtype
            seed = config.run.seed
            self.update = load_update(folder, config.trainer, seed=seed, dtype=dtype, ranks=self._ranks)
            state = self._load_newest(at_most)
        self.step = state.step if state else 0
        set_log_position(step=self.step)
        self.traceparent = None
        return state

    def restore(self, step: int) -> str | None:
        """Load the newest checkpoint up to `step` and replay the steps after it; return an error message or None.

        Step 0 needs no checkpoint, but is refused if the run has requested checkpoints, which it would discard. After
        an error, call `restore_newest`. Raises WeightsError if version 0 is damaged.
        """
        if step == 0 and (saved := [kept for kept in self._checkpoints.requested_steps() if kept > 0]):
            return (
                f"0 would discard the saved checkpoints of steps {', '.join(map(str, saved))}; resume at one of them, "
                "or start over with another run.dir"
            )
        try:
            self.restore_newest(at_most=step)
            self._replay(end=step)
        except (CheckpointError, DamagedEntry) as error:  # the caller gets the error, and training continues
            return f"{step} cannot be reached: {error}"
        if self.step != step:
            steps = ", ".join(map(str, self._checkpoints.steps())) or "none"
            return f"{step} cannot be reached: there are checkpoints of steps {steps}"
        return None

    def _load_newest(self, at_most: int | None) -> CheckpointState | None:
        """Load the newest intact checkpoint and return its state; set newer, damaged checkpoints aside.

        Raises:
            CheckpointError: the checkpoint belongs to another run; or a newer one is damaged, and a step that is needed
                to recompute it is missing from the journal.
        """
        damaged: list[tuple[int, DamagedCheckpoint]] = []
        newest = None
        for step in reversed([step for step in self._checkpoints.steps() if at_most is None or step <= at_most]):
            try:
                self._check_origin(self._checkpoints.state(step))
                newest = self._checkpoints.load(step, self.update)
                break
            except DamagedCheckpoint as error:
                damaged.append((step, error))
        start = newest.step if newest else 0
        for step, damage in damaged:
            missing = self._first_missing(start, step)
            if missing is not None:
                raise CheckpointError(
                    f"{damage}; it cannot be recomputed from step {start}, because the journal no longer has step "
                    f"{missing}; restore the file, or start a new run"
                ) from damage
        for step, damage in damaged:
            aside = self._checkpoints.set_aside(step)
            logger.warning(
                "%s; training is repeated from step %d; the damaged checkpoint was moved to %s", damage, start, aside
            )
        return newest

    def _check_origin(self, state: CheckpointState) -> None:
        if state.run_id != self._journal.run_id:
            raise CheckpointError(
                f"run.run_id: {self._journal.run_id!r}, but the checkpoint of step {state.step} belongs to run "
                f"{state.run_id!r}; restore the run_id, or give the run its own folder (run.dir)"
            )
        if state.base_digest != self.base_digest:
            raise CheckpointError(
                f"the checkpoint of step {state.step} was trained from another initial critic: version 0 had "
                f"digest {brief(state.base_digest)}, but in the weights store it has {brief(self.base_digest)}; "
                "restore the original store, or start a new run (run.dir)"
            )

    def _train_payload(
        self, payload: TrainPayload, state: str, earlier: Result | None
    ) -> tuple[UpdateReport | None, str | None]:
        """Train on the payload; return the report, or None and why the weights are unchanged. Raises as `train`."""
        try:
            report = self.update.train(
                payload,
                lambda n: self._progress.renew_heartbeat(state, n),
                earlier.skipped_batches if earlier else None,
            )
        except (NotFinite, OutOfMemory) as error:
            if earlier is not None:
                raise  # the step succeeded before, so the replayed weights would be wrong without it
            return None, str(error)
        if report.is_finite and (earlier is not None or np.isfinite(canary_outputs(self.update.critic)).all()):
            return report, None
        cause = f"the update made {'values' if report.is_finite else 'weights'} of the critic non-finite"
        before = self.step
        unreachable = self.restore(before)
        if unreachable is not None:
            raise CheckpointError(f"{cause}, and the previous step, {unreachable}")
        return None, f"{cause}; the critic of step {before} was restored; lower trainer.optimizer.lr"

    def _replay(self, *, end: int) -> None:
        """Train on the journal's steps up to `end`. Raises DamagedEntry if an entry to replay is damaged."""
        for entry in self._journal.entries():
            if entry.kind == "train" and entry.step == self.step + 1 <= end:
                if not self._journal.has_failed(entry):
                    with self._progress.working(f"reading step {entry.step}"):
                        payload, _ = self._journal.load(entry)
                    self._train_payload(payload, "replaying", self._journal.result(entry))
                self.step = entry.step

    def _first_missing(self, start: int, end: int) -> int | None:
        """Return the first step after `start`, up to `end`, that the journal cannot replay; None if there is none."""
        entries = {entry.step: entry for entry in self._journal.entries() if entry.kind == "train"}
        for step in range(start + 1, end + 1):
            try:
                if not self._journal.has_failed(entries[step]):
                    self._journal.load(entries[step])
            except (KeyError, DamagedEntry):
                return step
        return None
