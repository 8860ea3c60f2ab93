"""Selects the journal's next pending entry, and records the results of processed ones."""

import time
from dataclasses import dataclass

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.store.journal import Entry, Journal, Result
from rlhf_triton.trainer.progress import SidecarProgress

# An unchanged mtime of the journal proves that there is no new entry only if it is older than the resolution of the
# file system's timestamps.
SETTLED_S = 1.0


@dataclass
class PendingEntries:
    """The pending entries of a journal, in order."""

    journal: Journal
    progress: SidecarProgress
    _none_pending: tuple[int | None, float] = (None, 0.0)
    """The journal's mtime when nothing was pending, and when it was first seen."""

    def next(self, *, trained: int) -> Entry | None:
        """Return the next entry to process, None if there is none yet. Steps up to `trained` count as trained.

        Raises CheckpointError if the journal's next step is not `trained + 1`.
        """
        changed = self.journal.changed_at()
        idle_at, since = self._none_pending
        if changed == idle_at and time.monotonic() - since > SETTLED_S:  # idle: do not list the journal at every call
            return None
        entry = self._first_pending(trained)
        if entry is not None or changed != idle_at:
            self._none_pending = (None if entry else changed, time.monotonic())
        return entry

    def finish(self, entry: Entry, result: Result) -> None:
        """Record the result, so that the server responds to the caller; remove the entry if it is not a training step.

        Training steps stay in the journal for replay until a checkpoint covers them.
        """
        self.progress.persist(f"recording the result of {entry.name}", lambda: self.journal.finish(entry, result))
        if entry.kind != "train":
            self.progress.persist(f"removing {entry.name}", lambda: self.journal.drop(entry))

    def _first_pending(self, trained: int) -> Entry | None:
        for entry in self.journal.entries():
            untrained = entry.kind == "train" and entry.step > trained
            if untrained and entry.step > trained + 1:
                raise CheckpointError(
                    f"the journal in {self.journal.root} continues with step {entry.step}, but the newest checkpoint "
                    f"and the steps after it end at {trained}: restore the missing checkpoint, or start a new run"
                )
            waits = entry.kind == "save" and entry.step > trained  # a save waits for its step
            if not waits and (untrained or not self.journal.is_answered(entry)):
                return entry
        return None
