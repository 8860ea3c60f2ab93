"""Writes checkpoints of the critic in training; removes checkpoints and journal entries that are no longer needed."""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_triton.store.journal import Entry, Journal, Result
from rlhf_triton.store.journal_entry import DamagedEntry
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.trainer.checkpoint import KEEP_SET_ASIDE, CheckpointFolder, CheckpointState, DamagedCheckpoint
from rlhf_triton.trainer.critic_state import CriticState
from rlhf_triton.trainer.progress import SidecarProgress

KEEP_ENTRIES = 200  # trained steps in the journal after the last critic_save, for rewinds
ARCHIVE_ENTRIES = 100  # trained steps for `critic.pretrain` of later runs, at 20 bytes a token
KEEP_REQUESTED = 3  # the newest checkpoints, if critic_save does not list those still needed


@dataclass(frozen=True, kw_only=True)
class CriticCheckpoints:
    """Writes the checkpoints of one critic; removes old ones, and the journal entries that they replace."""

    every: int
    """Number of steps between checkpoints that no client requests."""
    critic: CriticState
    folder: CheckpointFolder
    store: WeightsStore
    journal: Journal
    progress: SidecarProgress

    def write_periodically(self) -> None:
        """Write a checkpoint of the critic if its step is a multiple of `every`."""
        if self.critic.step % self.every == 0:
            self._write(requested=False)

    def write_last(self) -> None:
        """Write a checkpoint of the critic, unless the newest checkpoint has its step; step 0 needs none."""
        if self.folder.latest() != self.critic.step and self.critic.step:
            self._write(requested=False)

    def write_requested(self) -> None:
        """Write a checkpoint of the critic, marked as requested; step 0 needs none."""
        if self.critic.step:
            self._write(requested=True)

    def write_step(self, step: int) -> str | None:
        """Ensure that `step` has a checkpoint, marked as requested; return None, or the error if that is impossible."""
        if step == self.critic.step:
            self._write(requested=True)
            return None
        try:
            self.progress.persist("marking a checkpoint", lambda: self.folder.mark_requested(step))
        except DamagedCheckpoint:  # or missing: go back and replay up to it, write it, and restore the newest step
            error = self.critic.restore(step)
            if error is None:
                self._write(requested=True)
            self.critic.restore_newest()
            return error and f"step: {error}"
        return None

    def keep_only(self, keep_steps: Sequence[int], *, step: int) -> None:
        """Remove the checkpoints up to `step` that are not in `keep_steps`, and journal entries only they need."""

        def keep() -> None:
            self.folder.keep_only(keep_steps, step=step)
            self._prune()

        self.progress.persist("removing checkpoints", keep)

    def set_aside_after(self, rewind: Entry) -> Path:
        """Set aside the entries after `rewind.target`, remove the checkpoints after it; return the entries' folder."""
        aside = self.progress.persist("setting steps aside", lambda: self.journal.set_aside_after(rewind))
        self.journal.forget_aside(keep=KEEP_SET_ASIDE)
        self.progress.persist("removing checkpoints", lambda: self.folder.drop_after(rewind.target))
        return aside

    def lost_result(self, entry: Entry) -> Result:
        """Return the result of a step that is trained already but has no result in the journal.

        It is taken from the newest checkpoint if that has a result for the same content. Otherwise the result is an
        error, because the critic is past this step and cannot train it again.
        """
        newest = self.folder.latest()
        remembered: list[dict[str, Any]] = []
        if newest is not None:
            with contextlib.suppress(DamagedCheckpoint):
                remembered = self.folder.state(newest).results
        digest = None
        with contextlib.suppress(DamagedEntry), self.progress.working(f"reading step {entry.step}"):
            digest = self.journal.load(entry)[1]
        result = next((Result(**data) for data in remembered if data["entry"] == entry.name), None)
        if result is not None and result.digest == digest:
            return result
        return Result(
            entry=entry.name,
            weights_version=self.store.current() or 0,
            digest=digest,
            error=f"step {entry.step} was sent again after its result was lost, and the critic is at step "
            f"{self.critic.step}: resume the actor from its checkpoint, which rewinds the critic",
        )

    def _write(self, *, requested: bool) -> None:
        self.progress.renew_heartbeat("writing a checkpoint")
        critic, trained = self.critic, self.critic.update.trained
        results = [asdict(result) for result in self.journal.results() if result.entry.endswith(".train")]
        state = CheckpointState(
            run_id=self.journal.run_id,
            step=critic.step,
            optimizer_step=trained.optimizer_step,
            version=self.store.current() or 0,
            epoch=self.progress.epoch,
            requested=requested,
            settings=trained.settings,
            base_digest=critic.base_digest,
            results=results,
        )

        def write() -> None:
            self.folder.save(critic.update, state)
            self._prune()

        self.progress.persist(f"writing the checkpoint of step {critic.step}", write)

    def _prune(self) -> None:
        """Remove checkpoints that are no longer needed, and entries that no rewind to an actor's checkpoint needs.

        Entries since the newest requested checkpoint stay, because an actor may still request a rewind to a step after
        it. If there are more than KEEP_ENTRIES of them, the newest checkpoint replaces them.
        """
        self.folder.prune(keep=KEEP_REQUESTED, keep_damaged=KEEP_SET_ASIDE)
        covered = self.folder.latest() or 0
        base = max(self.folder.requested_steps(), default=0)
        if covered - base > KEEP_ENTRIES:
            base = covered
        self.journal.forget_covered(covered, base=base, archive=ARCHIVE_ENTRIES)
        self.journal.sweep()
