"""Read-only view of a journal, shared by the writers inside tritonserver and the sidecar."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from python_backend.store.durable import changed_at, is_locked, read_json
from python_backend.store.heartbeat import HEARTBEAT_FILE, Heartbeat
from python_backend.store.journal_entry import (
    DIGEST,
    RESULT_SUFFIX,
    DamagedEntry,
    Entry,
    Result,
    entries_in,
    metadata_in,
    read_training_file,
)
from python_backend.wire.contract import TRACEPARENT_HEADER
from python_backend.wire.training_payload import TrainPayload

DAMAGED = "damaged"  # stands in for a digest that cannot be read


class JournalState:
    """The journal of one run, read-only."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.root = root
        self.run_id = run_id
        self._entries = root / run_id / "entries"
        self._results = root / run_id / "results"
        self._set_aside = root / run_id / "set_aside"

    def entries(self) -> list[Entry]:
        """Return the entries on disk, in processing order."""
        return sorted(entries_in(self._entries))

    def changed_at(self) -> int | None:
        """Return the mtime of entries/ in ns, which changes with every new or removed entry; None before the first."""
        return changed_at(self._entries)

    def load(self, entry: Entry) -> tuple[TrainPayload, str]:
        """Return a training entry's payload and digest.

        Raises DamagedEntry if the file is unreadable or its content does not match the digest.
        """
        return read_training_file(self._entries / entry.name)

    def keep_steps(self, entry: Entry) -> list[int] | None:
        """Return the steps whose checkpoints a save entry requests to keep; None if it has no such list.

        Raises DamagedEntry if the file is not JSON.
        """
        path = self._entries / entry.name
        try:
            return json.loads(path.read_bytes()).get("keep_steps")
        except ValueError as error:
            raise DamagedEntry(f"{path} is damaged: {error}") from error

    def owners(self, rewind: Entry | None = None) -> list[str]:
        """Return the owners of the run (`<session>/<n>`) as of `rewind` (default: the newest rewind), newest first."""
        newest = rewind or self._newest_rewind()
        if newest is None:
            return []
        result = read_json(self._result_path(newest))
        with contextlib.suppress(FileNotFoundError, ValueError):  # the entry was finished meanwhile, or is damaged
            result = result or json.loads((self._entries / newest.name).read_bytes())
        return (result or {}).get("owners") or []

    def is_answered(self, entry: Entry) -> bool:
        """Return whether `entry` has a result."""
        return self._result_path(entry).exists()

    def answered(self) -> set[Entry]:
        """Return the entries that have a result, including entries that were removed."""
        return entries_in(self._results, RESULT_SUFFIX)

    def results(self) -> list[Result]:
        """Return the results on disk, in order of their entries."""
        found = [self.result(entry) for entry in sorted(self.answered())]
        return [result for result in found if result is not None]

    def result(self, entry: Entry) -> Result | None:
        """Return the result of `entry`: None while it is pending, an error if a rewind has removed the entry."""
        data = read_json(self._result_path(entry))
        if data is None and (changed_at(self._entries) is None or not (self._entries / entry.name).exists()):
            data = read_json(self._result_path(entry))  # finished and removed between the two calls
            if data is None:
                return Result(entry.name, -1, error=f"{entry.kind} at step {entry.step}: removed by a rewind")
        return None if data is None else Result(**data)

    def last_step(self) -> int:
        """Return the last accepted step; 0 before the first."""
        known = self._known_entries()  # rewinds count, too: the results of the steps before them may have been removed
        return max([0, *(entry.step if entry.kind == "train" else entry.target for entry in known)])

    def traceparent(self, entry: Entry) -> str | None:
        """Return the trace context that a training entry's request had; None if it had none or the file is damaged."""
        return metadata_in(self._entries / entry.name, TRACEPARENT_HEADER)

    def heartbeat(self) -> Heartbeat | None:
        """Return the sidecar's newest heartbeat; None if there is none or a machine crash has truncated the file."""
        try:
            data = read_json(self.root / HEARTBEAT_FILE)
            return None if data is None else Heartbeat(**data)
        except (ValueError, TypeError):
            return None

    def is_followed(self) -> bool:
        """Return whether a sidecar on this host holds the journal's lock."""
        return is_locked(self.root / "LOCK")

    def _rewind_under_way(self) -> Entry | None:
        rewinds = entries_in(self._entries, kind="rewind")
        return min((entry for entry in rewinds if self.result(entry) is None), default=None)

    def _digest(self, entry: Entry) -> str | None:
        """Return the digest of a step's content, DAMAGED if it is unreadable, or None if it was removed long ago."""
        data = read_json(self._result_path(entry))
        if data is None:
            try:
                return metadata_in(self._entries / entry.name, DIGEST) or DAMAGED
            except FileNotFoundError:  # finished and removed meanwhile
                data = read_json(self._result_path(entry))
        return None if data is None else data["digest"] or DAMAGED

    def _rewound(self, step: int) -> str:
        """Return a clause for an error message, naming the rewind that made `step` invalid; "" if there was none."""
        for entry in sorted(self._known_rewinds(), reverse=True):
            if entry.target < step <= entry.step + 1 and entry.target < entry.step:
                return (
                    f"; the run was rewound from step {entry.step} to step {entry.target}: the actor that requested "
                    "the last rewind owns the run, and all others must stop"
                )
        return ""

    def _newest_rewind(self) -> Entry | None:
        # By rank: after a rewind from step 9 to 5, one that is accepted at step 7 is newer.
        return max(self._known_rewinds(), key=lambda entry: (entry.rank, entry.step), default=None)

    def _known_rewinds(self) -> set[Entry]:
        return entries_in(self._entries, kind="rewind") | entries_in(self._results, RESULT_SUFFIX, "rewind")

    def _known_entries(self) -> list[Entry]:
        return [*entries_in(self._entries), *self.answered()]

    def _result_path(self, entry: Entry) -> Path:
        return self._results / f"{entry.name}{RESULT_SUFFIX}"
