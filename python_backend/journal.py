"""The training journal: what critic_train and critic_save accepted, in order, until the sidecar has done it.
Given: the journal's folder and the run it belongs to. Returns: tickets to the writers, entries to the sidecar.
numpy and the standard library only (and safetensors' numpy side): it is used inside tritonserver without torch.

    <root>/<run_id>/entries/<step>.train | <step>.save.<n> | <step>.rewind.<n>
    <root>/<run_id>/results/<entry>.json          written once the entry's outcome is served
    <root>/<run_id>/set_aside/<n>/                what a rewind took out, or a damaged entry
    <root>/{LOCK, EPOCH, heartbeat.json}

An entry's life: accepted (link(2) of a synced file) -> trained -> published -> served -> answered (result) -> covered
by a checkpoint -> removed; docs/live_critic.md has it state by state. Steps begin at 1 and have no gaps.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from python_backend.contract import STEP_AHEAD, StepConflict
from python_backend.durable import create_file, read_json, remove_folder, replace_file, write_json
from python_backend.journal_entry import (
    DamagedEntry,
    Entry,
    Kind,
    Result,
    digest_in,
    read_training_file,
)
from python_backend.journal_file import TrainingFile
from python_backend.training_payload import TrainPayload

KEPT_RESULTS = 1000
DAMAGED = "damaged"  # in place of a digest that nobody can tell


class JournalLocked(RuntimeError):
    """Another sidecar holds the journal."""


@dataclass(frozen=True)
class Heartbeat:
    """What the sidecar is doing; renewed at every micro-batch."""

    epoch: int
    step: int
    micro_batch: int
    state: str
    time: float  # unix seconds
    trouble: str | None = None  # why it cannot go on: what the disk refuses


class Journal:
    """The journal of one run."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.root = root
        self.run_id = run_id
        self._entries = root / run_id / "entries"
        self._results = root / run_id / "results"
        self._set_aside = root / run_id / "set_aside"

    # ---- writers: inside tritonserver ----

    def accept_training(
        self,
        payload: TrainPayload,
        *,
        run_id: str | None,
        step: int | None,
        check: Callable[[], None] = lambda: None,
    ) -> Entry:
        """Write a training step durably and return its entry (the existing one if it was sent before).

        `check` runs while the file is written; what it raises goes to the caller, and nothing was accepted.

        Raises:
            StepConflict: other run, other content under a known step, a gap, or a rewind under way.
            OSError: the disk refuses; nothing was accepted.
        """
        self._check_run(run_id)
        file = TrainingFile(payload, check)
        try:
            return self._accept(file, step)
        finally:
            file.close()  # what the check says counts more than a step that does not fit

    def _accept(self, file: TrainingFile, step: int | None) -> Entry:
        while True:
            last = self.last_step()
            if step is not None and step <= last:
                return self._known(step, file.digest, last)
            if step is not None and step > last + 1:
                raise StepConflict(
                    f"step: {step}, but the last step of run {self.run_id!r} is {last}; send step {last + 1} first"
                    f"{self._rewound(step)}"
                )
            self._refuse_during_rewind()
            entry = Entry(last + 1, 0, "train")
            try:
                self._create(entry, *file.parts(), first=file.header)
            except FileExistsError:  # another writer took the number: look again
                continue
            return entry

    def accept_save(
        self, *, run_id: str | None, step: int | None = None, keep_steps: Sequence[int] | None = None
    ) -> Entry:
        """Ask for a checkpoint of `step`, which may be on its way still; without it, of everything accepted so far.

        `keep_steps`: of the checkpoints up to that step, only these are needed still.
        Asked again for the same step while it is under way, the entry is the same: each costs a reload, and a caller
        that lost patience with a slow one must not make the queue longer.

        Raises StepConflict if `step` is further ahead than the next one, or a rewind is under way.
        """
        self._check_run(run_id)
        self._refuse_during_rewind()
        last = self.last_step()
        if step is not None and step > last + 1:
            raise StepConflict(f"step: {step}, but the last step of run {self.run_id!r} is {last}")
        wanted = None if keep_steps is None else list(keep_steps)
        content = {} if wanted is None else {"keep_steps": wanted}
        if step is None:
            return self._append("save", last, content=content)
        asked = (entry for entry in self.entries() if (entry.kind, entry.step) == ("save", step))
        pending = (entry for entry in asked if self.result(entry) is None)
        for entry in pending:
            with contextlib.suppress(DamagedEntry, FileNotFoundError):  # the latter: done just now
                if self.keep_steps(entry) == wanted:
                    return entry
        return self._append("save", step, content=content)

    def accept_rewind(self, *, run_id: str | None, target: int) -> Entry:
        """Ask that step `target` become the last one; asked again while it is under way, the entry is the same.

        Raises StepConflict if `target` lies ahead, or a rewind to another step is under way.
        """
        self._check_run(run_id)
        pending = self._rewind_under_way()
        if pending is not None and pending.target == target:
            return pending
        last = self.last_step()
        if target > last:
            raise StepConflict(f"rewind_to: {target}, {STEP_AHEAD} {self.run_id!r} is {last}")
        self._refuse_during_rewind()
        return self._append("rewind", last, target=target)

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
        data = read_json(self.root / "heartbeat.json")
        return None if data is None else Heartbeat(**data)

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

    # ---- the sidecar ----

    @contextlib.contextmanager
    def lock(self, *, patience_s: float = 2.0) -> Iterator[int]:
        """Be the journal's only sidecar; yields the epoch, one higher than any before. Raises JournalLocked."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "LOCK").open("a") as file:
            deadline = time.monotonic() + patience_s
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # perhaps only a server's glance (is_followed)
                    if time.monotonic() > deadline:
                        raise JournalLocked(
                            f"another sidecar follows the journal in {self.root}; one critic has one "
                            "sidecar: stop the other one first"
                        ) from None
                    time.sleep(0.02)
            epoch = int((read_json(self.root / "EPOCH") or {"epoch": 0})["epoch"]) + 1
            write_json(self.root / "EPOCH", {"epoch": epoch})
            yield epoch

    def entries(self) -> list[Entry]:
        """Entries on disk, in order."""
        return sorted(Entry.parse(name) for name in _names(self._entries))

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

    def finish(self, entry: Entry, result: Result) -> None:
        """Record the outcome, which answers the caller."""
        self._results.mkdir(parents=True, exist_ok=True)
        write_json(self._result_path(entry), asdict(result))

    def forget_covered(self, step: int, *, base: int | None = None) -> None:
        """Remove what a checkpoint at `step` covers, and results beyond the last 1,000 steps.

        Trainings after `base`, an older checkpoint, stay: from there they lead to every step up to `step`.
        """
        for entry in self.entries():
            leads_on = base is not None and entry.kind == "train" and entry.step > base
            if entry.step <= step and not leads_on and self.result(entry) is not None:
                (self._entries / entry.name).unlink()
        for name in _names(self._results):
            if _entry_of(name).step <= step - KEPT_RESULTS:
                (self._results / name).unlink()

    def set_aside_after(self, rewind: Entry) -> list[str]:
        """Take every entry and result after `rewind.target` out of the way; return their names.

        The newest go first: whatever is left when a crash comes between has no gap.
        """
        target = self._next_aside()
        moved = []
        for folder in (self._entries, self._results):
            for name in sorted(_names(folder), key=_entry_of, reverse=True):
                entry = _entry_of(name)
                if entry.step > rewind.target and entry != rewind:
                    target.mkdir(parents=True, exist_ok=True)
                    (folder / name).rename(target / name)
                    moved.append(name)
        return moved

    def set_aside_damaged(self, entry: Entry) -> None:
        """Keep a damaged file for whoever wants to see it; an empty one stays, so that its step is not missing."""
        path = self._entries / entry.name
        if path.stat().st_size == 0:
            return
        target = self._next_aside()
        target.mkdir(parents=True)
        shutil.copyfile(path, target / entry.name)
        replace_file(path, b"")

    def forget_aside(self, *, keep: int) -> None:
        """Remove all but the newest `keep` folders of what was set aside."""
        for number in sorted(map(int, _names(self._set_aside)))[:-keep]:
            remove_folder(self._set_aside / str(number))

    def drop(self, entry: Entry) -> None:
        """Remove an entry that has been done and needs no replay (save, rewind)."""
        (self._entries / entry.name).unlink(missing_ok=True)

    def results(self) -> list[Result]:
        """Outcomes on disk, in order of their entries."""
        found = [self.result(entry) for entry in sorted(map(_entry_of, _names(self._results)))]
        return [result for result in found if result is not None]

    def restore_results(self, saved: list[dict[str, Any]]) -> None:
        """Put back outcomes that a checkpoint remembers and the journal has lost."""
        for data in saved:
            result = Result(**data)
            if self.result(entry := Entry.parse(result.entry)) is None:
                self.finish(entry, result)

    def beat(self, heartbeat: Heartbeat) -> None:
        """Show progress."""
        write_json(self.root / "heartbeat.json", asdict(heartbeat), durable=False)

    # ---- inner ----

    def _check_run(self, run_id: str | None) -> None:
        if run_id is not None and run_id != self.run_id:
            raise StepConflict(
                f"run_id: {run_id!r}, but this critic belongs to run {self.run_id!r}; give the actor "
                "the same run.run_id, or start a critic of its own for it"
            )

    def _known(self, step: int, digest: str, last: int) -> Entry:
        entry = Entry(step, 0, "train")
        known = self._digest(entry)
        if known in (digest, DAMAGED):  # the sidecar's answer says that it is damaged
            return entry
        was = "was trained too long ago to compare" if known is None else "was already sent with other content"
        raise StepConflict(
            f"step: {step} of run {self.run_id!r} {was}; the last step is {last}: send step {last + 1}, "
            f"or ask critic_save once for rewind_to {step - 1}{self._rewound(step)}"
        )

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
        rewinds = [entry for entry in self._known_entries() if entry.kind == "rewind"]
        for entry in sorted(rewinds, reverse=True):
            if entry.target < step <= entry.step + 1 and entry.target < entry.step:
                return (
                    f"; the run was rewound from step {entry.step} to step {entry.target}: whoever asked for that last "
                    "owns the run, and other actors must stop"
                )
        return ""

    def _next_aside(self) -> Path:
        return self._set_aside / str(1 + max(map(int, _names(self._set_aside)), default=0))

    def _rewind_under_way(self) -> Entry | None:
        rewinds = (entry for entry in self.entries() if entry.kind == "rewind")
        return next((entry for entry in rewinds if self.result(entry) is None), None)

    def _refuse_during_rewind(self) -> None:
        pending = self._rewind_under_way()
        if pending is not None:
            raise StepConflict(
                f"a rewind of run {self.run_id!r} to step {pending.target} is under way; wait for its answer"
            )

    def _append(self, kind: Kind, step: int, *, target: int = -1, content: dict[str, Any] | None = None) -> Entry:
        while True:
            rank = 1 + max((entry.rank for entry in self._known_entries() if entry.step == step), default=0)
            entry = Entry(step, rank, kind, target)
            try:
                self._create(entry, json.dumps(content or {}).encode())
            except FileExistsError:  # another writer took the rank: look again
                continue
            return entry

    def _known_entries(self) -> list[Entry]:
        return [_entry_of(name) for name in [*_names(self._entries), *_names(self._results)]]

    def _create(self, entry: Entry, *parts: bytes | memoryview, first: Callable[[], bytes] | None = None) -> None:
        self._entries.mkdir(parents=True, exist_ok=True)
        create_file(self._entries / entry.name, *parts, first=first)

    def _result_path(self, entry: Entry) -> Path:
        return self._results / f"{entry.name}.json"


def _entry_of(name: str) -> Entry:
    """The entry that a file in `entries` or `results` belongs to."""
    return Entry.parse(name.removesuffix(".json"))


def _names(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if not name.startswith(".")]  # noqa: PTH208 - names, not paths
    except FileNotFoundError:
        return []
