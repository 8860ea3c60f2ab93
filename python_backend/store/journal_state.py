"""What a journal's folder says, for the writers inside tritonserver and for the sidecar alike; changes nothing."""

from __future__ import annotations

import contextlib
import fcntl
import json
from pathlib import Path

from python_backend.store.durable import read_json
from python_backend.store.heartbeat import Heartbeat, read_heartbeat
from python_backend.store.journal_entry import (
    RESULT_SUFFIX,
    DamagedEntry,
    Entry,
    Result,
    digest_in,
    entries_in,
    read_training_file,
)
from python_backend.wire.training_payload import TrainPayload

DAMAGED = "damaged"  # in place of a digest that cannot be read


class JournalState:
    """The journal of one run, read-only."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.root = root
        self.run_id = run_id
        self._entries = root / run_id / "entries"
        self._results = root / run_id / "results"
        self._set_aside = root / run_id / "set_aside"

    def entries(self) -> list[Entry]:
        """Entries on disk, in order."""
        return sorted(entries_in(self._entries))

    def changed_at(self) -> int | None:
        """When entries came or went last, in the file system's own nanoseconds; None before the first."""
        try:
            return self._entries.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def load(self, entry: Entry) -> tuple[TrainPayload, str]:
        """A training entry's payload and digest. Raises DamagedEntry if the file is not what was accepted."""
        return read_training_file(self._entries / entry.name)

    def keep_steps(self, entry: Entry) -> list[int] | None:
        """The steps that a save entry says are needed still; None if it does not say. Raises DamagedEntry."""
        path = self._entries / entry.name
        try:
            return json.loads(path.read_bytes()).get("keep_steps")
        except ValueError as error:
            raise DamagedEntry(f"{path} is damaged: {error}") from error

    def owners(self, rewind: Entry | None = None) -> list[str]:
        """Who owns the run after `rewind`, by default the newest one, and who did before; newest first."""
        newest = rewind or max(self._known_rewinds(), default=None)
        if newest is None:
            return []
        result = read_json(self._result_path(newest))
        with contextlib.suppress(FileNotFoundError, ValueError):  # done just now; damaged
            result = result or json.loads((self._entries / newest.name).read_bytes())
        return (result or {}).get("owners") or []

    def is_answered(self, entry: Entry) -> bool:
        """Whether `entry` has an outcome."""
        return self._result_path(entry).exists()

    def answered(self) -> set[Entry]:
        """Entries with an outcome, removed ones included."""
        return entries_in(self._results, RESULT_SUFFIX)

    def results(self) -> list[Result]:
        """Outcomes on disk, in order of their entries."""
        found = [self.result(entry) for entry in sorted(self.answered())]
        return [result for result in found if result is not None]

    def result(self, entry: Entry) -> Result | None:
        """The outcome of `entry`; None while it is not done, an error if a rewind took it out."""
        data = read_json(self._result_path(entry))
        if data is None and not (self._entries / entry.name).exists():
            data = read_json(self._result_path(entry))  # it may have been done just now
            if data is None:
                return Result(entry.name, -1, error=f"{entry.kind} at step {entry.step}: set aside by a rewind")
        return None if data is None else Result(**data)

    def last_step(self) -> int:
        """The last accepted step; 0 before the first."""
        known = self._known_entries()  # a rewind outlives the results of the steps before it
        return max([0, *(entry.step if entry.kind == "train" else entry.target for entry in known)])

    def heartbeat(self) -> Heartbeat | None:
        """The sidecar's last sign of life."""
        return read_heartbeat(self.root)

    def is_followed(self) -> bool:
        """Whether a sidecar holds the journal (on this host)."""
        try:
            with (self.root / "LOCK").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def _rewind_under_way(self) -> Entry | None:
        rewinds = sorted(entries_in(self._entries, kind="rewind"))
        return next((entry for entry in rewinds if self.result(entry) is None), None)

    def _digest(self, entry: Entry) -> str | None:
        """Of the content of a step; None: too long ago."""
        data = read_json(self._result_path(entry))
        if data is None:
            try:
                return digest_in(self._entries / entry.name) or DAMAGED
            except FileNotFoundError:  # done just now
                data = read_json(self._result_path(entry))
        return None if data is None else data["digest"] or DAMAGED

    def _rewound(self, step: int) -> str:
        """Why a step that once fitted fits no more, where a rewind is the reason."""
        for entry in sorted(self._known_rewinds(), reverse=True):
            if entry.target < step <= entry.step + 1 and entry.target < entry.step:
                return (
                    f"; the run was rewound from step {entry.step} to step {entry.target}: whoever asked for that last "
                    "owns the run, and other actors must stop"
                )
        return ""

    def _known_rewinds(self) -> set[Entry]:
        return entries_in(self._entries, kind="rewind") | entries_in(self._results, RESULT_SUFFIX, "rewind")

    def _known_entries(self) -> list[Entry]:
        return [*entries_in(self._entries), *self.answered()]

    def _result_path(self, entry: Entry) -> Path:
        return self._results / f"{entry.name}{RESULT_SUFFIX}"
