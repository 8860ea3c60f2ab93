"""The training journal: what critic_train and critic_save accepted, in order, until the sidecar has done it.

Imports numpy and the standard library (and safetensors' numpy side): tritonserver uses it without torch.

    <root>/<run_id>/entries/<step>.train | <step>.save.<n> | <step>.rewind.<n>
    <root>/<run_id>/results/<entry>.json          written once the entry's outcome is served
    <root>/<run_id>/set_aside/<n>/                what a rewind took out, or a damaged entry
    <root>/<run_id>/ACCEPT                        locked while an entry is linked
    <root>/{LOCK, EPOCH, heartbeat.json}

An entry's life: accepted (link(2) of a synced file) -> trained -> published -> served -> answered (result) -> covered
by a checkpoint -> removed; docs/live-critic.md has it state by state. Steps begin at 1 and have no gaps.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from python_backend.errors import RlhfError
from python_backend.store import durable
from python_backend.store.heartbeat import Heartbeat, write_heartbeat
from python_backend.store.journal_entry import RESULT_SUFFIX, DamagedEntry, Entry, Kind, Result, entries_in
from python_backend.store.journal_file import TrainingFile
from python_backend.store.journal_state import DAMAGED, JournalState
from python_backend.store.ownership import Sender, owners_after, refuse_superseded
from python_backend.wire.contract import STEP_AHEAD, StepConflict
from python_backend.wire.training_payload import TrainPayload

KEPT_RESULTS = 1000
ACCEPT_PATIENCE_S = 10.0  # the lock is held for milliseconds: a process that holds it longer was stopped


class JournalLocked(RlhfError):
    """Another sidecar holds the journal."""


class Journal(JournalState):
    """The journal of one run: what writers and the sidecar change."""

    # ---- writers: inside tritonserver ----

    def accept_training(
        self,
        payload: TrainPayload,
        *,
        run_id: str | None,
        step: int | None,
        sender: Sender | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Entry:
        """Write a training step durably and return its entry (the existing one if it was sent before).

        `check` runs while the file is written; what it raises goes to the caller, and nothing was accepted.

        Raises:
            StepConflict: other run, other content under a known step, a gap, a rewind under way, or another actor has
                rewound the run since.
            OSError: the disk refuses; nothing was accepted.
        """
        self._check_run(run_id)
        file = TrainingFile(payload, check)
        try:
            return self._accept(file, step, sender)
        finally:
            file.close()  # what the check says counts more than a step that does not fit

    def _accept(self, file: TrainingFile, step: int | None, sender: Sender | None) -> Entry:
        known = self._known_step(file, step)
        if known is not None:
            return known
        durable.make_folder(self._entries)
        with durable.staged_file(self._entries, file.parts(), first=file.header) as staged, self._accepting():
            refuse_superseded(sender, self.owners(), self.run_id)
            known = self._known_step(file, step)  # a large payload takes long: there may have been a rewind meanwhile
            if known is not None:
                return known
            entry = Entry(self.last_step() + 1, 0, "train")
            os.link(staged, self._entries / entry.name)
        durable.sync_directory(self._entries)
        return entry

    def _known_step(self, file: TrainingFile, step: int | None) -> Entry | None:
        """The entry of a step sent before; None where it is the next one. Raises StepConflict."""
        last = self.last_step()
        if step is not None and step <= last:
            return self._known(step, file.digest, last)
        if step is not None and step > last + 1:
            raise StepConflict(
                f"step: {step}, but the last step of run {self.run_id!r} is {last}; send step {last + 1} first"
                f"{self._rewound(step)}"
            )
        self._refuse_during_rewind()
        return None

    def accept_save(
        self,
        *,
        run_id: str | None,
        step: int | None = None,
        keep_steps: Sequence[int] | None = None,
        sender: Sender | None = None,
    ) -> Entry:
        """Ask for a checkpoint of `step`, which may be on its way still; without it, of everything accepted so far.

        `keep_steps`: of the checkpoints up to that step, only these are needed still.
        Asked again for the same step while it is under way, the entry is the same: each costs a reload, and a caller
        that lost patience with a slow one must not make the queue longer.

        Raises StepConflict if `step` is further ahead than the next one, a rewind is under way, or another actor has
        rewound the run since.
        """
        self._check_run(run_id)
        wanted = None if keep_steps is None else list(keep_steps)
        with self._accepting():
            self._refuse_during_rewind()
            refuse_superseded(sender, self.owners(), self.run_id)
            last = self.last_step()
            if step is not None and step > last + 1:
                raise StepConflict(f"step: {step}, but the last step of run {self.run_id!r} is {last}")
            pending = None if step is None else self._pending_save(step, wanted)
            content = {} if wanted is None else {"keep_steps": wanted}
            return pending or self._append("save", last if step is None else step, content=content)

    def _pending_save(self, step: int, keep_steps: list[int] | None) -> Entry | None:
        asked = (entry for entry in self.entries() if (entry.kind, entry.step) == ("save", step))
        for entry in asked:
            with contextlib.suppress(DamagedEntry, FileNotFoundError):  # the latter: done just now
                if self.result(entry) is None and self.keep_steps(entry) == keep_steps:
                    return entry
        return None

    def accept_rewind(self, *, run_id: str | None, target: int, sender: Sender | None = None) -> Entry:
        """Ask that step `target` become the last one; asked again while it is under way, the entry is the same.

        The same request may arrive once more when it is done, and `sender` has trained on: it changes nothing then.

        Raises StepConflict if `target` lies ahead, a rewind to another step is under way, or another actor has rewound
        the run since.
        """
        self._check_run(run_id)
        with self._accepting():
            owners = self.owners()
            refuse_superseded(sender, owners, self.run_id)
            if sender is not None and owners[:1] == [str(sender)]:
                newest = max(self._known_rewinds())
                if newest.target == target and not self._has_failed(newest):
                    return newest
            pending = self._rewind_under_way()
            if pending is not None and pending.target == target:
                return pending
            last = self.last_step()
            if target > last:
                raise StepConflict(f"rewind_to: {target}, {STEP_AHEAD} {self.run_id!r} is {last}")
            self._refuse_during_rewind()
            return self._append("rewind", last, target=target, content={"owners": owners_after(sender, owners)})

    def _has_failed(self, entry: Entry) -> bool:
        result = self.result(entry)
        return result is not None and result.error is not None

    # ---- the sidecar ----

    @contextlib.contextmanager
    def lock(self, *, patience_s: float = 2.0) -> Iterator[int]:
        """Be the journal's only sidecar; yields the epoch, one higher than any before. Raises JournalLocked."""
        durable.make_folder(self.root)
        with contextlib.ExitStack() as held:
            try:  # for a moment it may be only a server's glance (is_followed)
                held.enter_context(durable.exclusive_lock(self.root / "LOCK", patience_s=patience_s))
            except TimeoutError:
                raise JournalLocked(
                    f"another sidecar follows the journal in {self.root}; one critic has one "
                    "sidecar: stop the other one first"
                ) from None
            epoch = int((durable.read_json(self.root / "EPOCH") or {"epoch": 0})["epoch"]) + 1
            durable.write_json(self.root / "EPOCH", {"epoch": epoch})
            yield epoch

    def finish(self, entry: Entry, result: Result) -> None:
        """Record the outcome, which answers the caller."""
        durable.make_folder(self._results)
        durable.write_json(self._result_path(entry), asdict(result))

    def forget_covered(self, step: int, *, base: int | None = None) -> None:
        """Remove what a checkpoint at `step` covers, and results beyond the last 1,000 steps of entries that are gone.

        Trainings after `base`, an older checkpoint, stay: from there they lead to every step up to `step`.
        """
        for entry in self.entries():
            leads_on = base is not None and entry.kind == "train" and entry.step > base
            if entry.step <= step and not leads_on and self.result(entry) is not None:
                (self._entries / entry.name).unlink()
        for entry in self.answered().difference(self.entries()):
            if entry.step <= step - KEPT_RESULTS:
                self._result_path(entry).unlink()

    def set_aside_after(self, rewind: Entry) -> list[str]:
        """Take every entry and result after `rewind.target` out of the way; return their names.

        The newest go first: whatever is left when a crash comes between has no gap.
        """
        moved = []
        aside = self._next_aside()
        for folder, suffix in ((self._entries, ""), (self._results, RESULT_SUFFIX)):
            for entry in sorted(entries_in(folder, suffix), reverse=True):
                if entry.step > rewind.target and entry != rewind:
                    durable.make_folder(aside)
                    (folder / f"{entry.name}{suffix}").rename(aside / f"{entry.name}{suffix}")
                    moved.append(f"{entry.name}{suffix}")
        for folder in (aside, self._entries, self._results):  # a power failure must not bring them back
            if folder.is_dir():
                durable.sync_directory(folder)
        return moved

    def set_aside_damaged(self, entry: Entry) -> None:
        """Keep a damaged file for whoever wants to see it; an empty one stays, so that its step is not missing."""
        path = self._entries / entry.name
        if path.stat().st_size == 0:
            return
        target = self._next_aside()
        durable.make_folder(target)
        shutil.copyfile(path, target / entry.name)
        durable.sync_tree(target)
        durable.replace_file(path, b"")

    def forget_aside(self, *, keep: int) -> None:
        """Remove all but the newest `keep` folders of what was set aside."""
        for number in durable.numbers_in(self._set_aside)[:-keep]:
            durable.remove_folder(self._set_aside / str(number))

    def sweep(self) -> None:
        """Delete what killed writers left half-written: payloads above all."""
        durable.sweep(self._set_aside)
        for folder in (self.root, self._entries, self._results):
            durable.sweep_files(folder)

    def drop(self, entry: Entry) -> None:
        """Remove an entry that has been done and needs no replay (save, rewind)."""
        (self._entries / entry.name).unlink(missing_ok=True)

    def restore_results(self, saved: list[dict[str, Any]]) -> None:
        """Put back outcomes that a checkpoint remembers and the journal has lost.

        Not of a step that is in the journal (again): its content may be another.
        """
        present = {*self.answered(), *self.entries()}
        for data in saved:
            result = Result(**data)
            if (entry := Entry.parse(result.entry)) not in present:
                self.finish(entry, result)

    def beat(self, heartbeat: Heartbeat) -> None:
        """Show progress."""
        write_heartbeat(self.root, heartbeat)

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

    def _next_aside(self) -> Path:
        return self._set_aside / str(1 + max(durable.numbers_in(self._set_aside), default=0))

    def _refuse_during_rewind(self) -> None:
        pending = self._rewind_under_way()
        if pending is not None:
            raise StepConflict(
                f"a rewind of run {self.run_id!r} to step {pending.target} is under way; wait for its answer"
            )

    def _append(self, kind: Kind, step: int, *, target: int = -1, content: dict[str, Any] | None = None) -> Entry:
        rank = 1 + max((entry.rank for entry in self._known_entries() if entry.step == step), default=0)
        entry = Entry(step, rank, kind, target)
        durable.make_folder(self._entries)
        durable.create_file(self._entries / entry.name, json.dumps(content or {}).encode())
        return entry

    @contextlib.contextmanager
    def _accepting(self) -> Iterator[None]:
        """Let no other writer accept anything meanwhile, so that what was just found still holds when it is linked."""
        folder = self.root / self.run_id
        durable.make_folder(folder)
        with durable.exclusive_lock(folder / "ACCEPT", patience_s=ACCEPT_PATIENCE_S):
            yield
