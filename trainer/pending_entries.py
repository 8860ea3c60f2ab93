"""The journal's entries that are yet to be processed: the next one, and how one is finished."""

from __future__ import annotations

import time

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.store.journal import Entry, Journal, Result
from trainer.progress import SidecarProgress

# An unchanged mtime of the journal means no new entry only once it has been unchanged for longer than the file system's
# timestamp resolution.
SETTLED_S = 1.0


class PendingEntries:
    """The pending entries of one journal, in order."""

    def __init__(self, journal: Journal, progress: SidecarProgress) -> None:
        self._journal = journal
        self._progress = progress
        self._none_pending: tuple[int | None, float] = (None, 0.0)  # journal mtime with nothing pending, since when

    def next(self, *, trained: int) -> Entry | None:
        """Return the next entry if all steps up to `trained` are trained; None if there is none yet.

        Raises CheckpointError if steps are missing between `trained` and the next one.
        """
        changed, (seen, since) = self._journal.changed_at(), self._none_pending
        if changed == seen and time.monotonic() - since > SETTLED_S:  # idle: do not list the journal at every call
            return None
        entry = self._first_pending(trained)
        if entry is not None or changed != seen:
            self._none_pending = (None if entry else changed, time.monotonic())
        return entry

    def finish(self, entry: Entry, result: Result) -> None:
        """Record the result, which answers the caller; remove the entry unless it is a training step.

        Training steps stay in the journal for replay until a checkpoint covers them.
        """
        self._progress.persist(f"recording the result of {entry.name}", lambda: self._journal.finish(entry, result))
        if entry.kind != "train":
            self._progress.persist(f"removing {entry.name}", lambda: self._journal.drop(entry))

    def _first_pending(self, trained: int) -> Entry | None:
        for entry in self._journal.entries():
            untrained = entry.kind == "train" and entry.step > trained
            if untrained and entry.step > trained + 1:
                raise CheckpointError(
                    f"the journal in {self._journal.root} continues with step {entry.step}, but the newest checkpoint "
                    f"and the steps after it end at {trained}: restore the missing checkpoint, or start a new run"
                )
            waits = entry.kind == "save" and entry.step > trained  # a save waits for its step
            if not waits and (untrained or not self._journal.is_answered(entry)):
                return entry
        return None
