"""The training journal: accepted critic_train and critic_save requests, in order, until the sidecar has processed them.

Imports numpy and safetensors but not torch, because processes of tritonserver use this module without torch.

    <root>/<run_id>/entries/<step>.train | <step>.save.<n> | <step>.rewind.<n>
    <root>/<run_id>/results/<entry>.json          outcome, written once the resulting weights are served
    <root>/<run_id>/archive/<step>.train          trained steps that are no longer needed, for later runs
    <root>/<run_id>/set_aside/<n>/                entries and results that a rewind removed, or a damaged entry
    <root>/<run_id>/ACCEPT                        flock held while an entry is linked
    <root>/{LOCK, EPOCH, heartbeat.json}

States of an entry: accepted (link(2) of a synced file) -> trained -> published -> served -> result recorded -> covered
by a checkpoint -> removed; docs/live-critic.md describes each state. Steps start at 1 and have no gaps.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_triton.errors import RlhfError, reason_of
from rlhf_triton.store import durable
from rlhf_triton.store.durable import changed_at, is_locked, read_json
from rlhf_triton.store.heartbeat import HEARTBEAT_FILE, Heartbeat
from rlhf_triton.store.journal_entry import (
    DIGEST,
    RESULT_SUFFIX,
    DamagedEntry,
    Entry,
    Kind,
    Result,
    entries_in,
    metadata_in,
    read_training_file,
    training_file,
)
from rlhf_triton.store.ownership import Sender, owners_after, refuse_superseded
from rlhf_triton.wire.contract import STEP_AHEAD, TRACEPARENT_HEADER, ContractError
from rlhf_triton.wire.training_payload import TrainPayload

DAMAGED = "damaged"  # placeholder for an unreadable digest


class JournalState:
    """Read-only view of the journal of one run, which writers inside tritonserver and the sidecar share."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.root = root
        self.run_id = run_id
        self._entries = root / run_id / "entries"
        self._results = root / run_id / "results"
        self._set_aside = root / run_id / "set_aside"
        self._archive = root / run_id / "archive"

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

    def training_files(self) -> list[Path]:
        """Return the files of all steps that have not failed, for `read_training_file`; archived steps first."""
        archived = [self._archive / entry.name for entry in sorted(entries_in(self._archive))]
        steps = [entry for entry in self.entries() if entry.kind == "train" and not self.has_failed(entry)]
        return archived + [self._entries / entry.name for entry in steps]

    def requested_keep_steps(self, entry: Entry) -> list[int] | None:
        """Return the steps whose checkpoints a save entry asks to keep; None if it has no such list.

        Raises DamagedEntry if the file is not JSON.
        """
        path = self._entries / entry.name
        try:
            return json.loads(path.read_bytes()).get("keep_steps")
        except ValueError as error:
            raise DamagedEntry(f"{path} is damaged: {reason_of(error)}") from error

    def owners(self, rewind: Entry | None = None) -> list[str]:
        """Return the owners of the run (`<session>/<n>`) after `rewind` (default: the newest), newest first."""
        newest = rewind or self._newest_rewind()
        if newest is None:
            return []
        result = read_json(self._result_path(newest))
        with contextlib.suppress(FileNotFoundError, ValueError):  # the entry has been finished since, or is damaged
            result = result or json.loads((self._entries / newest.name).read_bytes())
        return (result or {}).get("owners") or []

    def is_answered(self, entry: Entry) -> bool:
        """Return whether `entry` has a result."""
        return self._result_path(entry).exists()

    def answered(self) -> set[Entry]:
        """Return the entries that have a result, including entries that have been removed."""
        return entries_in(self._results, RESULT_SUFFIX)

    def results(self) -> list[Result]:
        """Return the results on disk, in the order of their entries."""
        found = [self.result(entry) for entry in sorted(self.answered())]
        return [result for result in found if result is not None]

    def result(self, entry: Entry) -> Result | None:
        """Return the result of `entry`; None while it is pending; an error result if a rewind has removed the entry."""
        data = read_json(self._result_path(entry))
        if data is None and (changed_at(self._entries) is None or not (self._entries / entry.name).exists()):
            data = read_json(self._result_path(entry))  # finished and removed between the two calls
            if data is None:
                return Result(
                    entry=entry.name,
                    weights_version=-1,
                    error=f"{entry.kind} at step {entry.step}: removed by a rewind",
                )
        return None if data is None else Result(**data)

    def has_failed(self, entry: Entry) -> bool:
        """Return whether a step has failed. A replay must then leave the weights unchanged."""
        result = self.result(entry)
        return result is not None and result.loss_mean is None

    def last_step(self) -> int:
        """Return the last accepted step; 0 before the first."""
        # Includes rewinds, because results of the steps before them may have been removed.
        steps = (entry.step if entry.kind == "train" else entry.target for entry in self._all_entries())
        return max([0, *steps])

    def traceparent(self, entry: Entry) -> str | None:
        """Return the trace context of a training entry's request; None if it had none or the file is damaged."""
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

    def _pending_rewind(self) -> Entry | None:
        rewinds = entries_in(self._entries, kind="rewind")
        return min((entry for entry in rewinds if self.result(entry) is None), default=None)

    def _digest(self, entry: Entry) -> str | None:
        """Return the digest of a step's content; DAMAGED if it is unreadable; None if it was removed long ago."""
        data = read_json(self._result_path(entry))
        if data is None:
            try:
                return metadata_in(self._entries / entry.name, DIGEST) or DAMAGED
            except FileNotFoundError:  # finished and removed since
                data = read_json(self._result_path(entry))
        return None if data is None else data["digest"] or DAMAGED

    def _rewind_hint(self, step: int) -> str:
        """Return the end of an error message that names the rewind that invalidated `step`; "" if there was none."""
        for entry in sorted(self._all_rewinds(), reverse=True):
            if entry.target < step <= entry.step + 1 and entry.target < entry.step:
                return (
                    f"; the run was rewound from step {entry.step} to step {entry.target}: unless this client did "
                    "that, another one owns the run now, so stop this one"
                )
        return ""

    def _newest_rewind(self) -> Entry | None:
        # By rank, not by step: after a rewind from step 9 to 5, one that is accepted at step 7 is newer.
        return max(self._all_rewinds(), key=lambda entry: (entry.rank, entry.step), default=None)

    def _all_rewinds(self) -> set[Entry]:
        return entries_in(self._entries, kind="rewind") | entries_in(self._results, RESULT_SUFFIX, "rewind")

    def _all_entries(self) -> list[Entry]:
        """Return the entries on disk and those with a result; an entry may occur twice."""
        return [*entries_in(self._entries), *self.answered()]

    def _result_path(self, entry: Entry) -> Path:
        return self._results / f"{entry.name}{RESULT_SUFFIX}"


KEPT_RESULTS = 1000  # results of this many steps are kept after their entries, to answer late repeated requests
ACCEPT_PATIENCE_S = 10.0  # the lock is held for milliseconds; a process that holds it longer is suspended


class Journal(JournalState):
    """The journal of one run: tritonserver calls the `accept_...` methods, the sidecar the other writing ones."""

    def accept_training(
        self,
        payload: TrainPayload,
        *,
        run_id: str | None,
        step: int | None,
        sender: Sender | None = None,
        traceparent: str | None = None,
    ) -> Entry:
        """Write a training step durably and return its entry (the existing one if the step was sent before).

        `traceparent` is stored with the entry but is not part of its content, so a request may be repeated with another
        trace.

        Raises:
            ContractError: `run_id` is another run's; `step` was accepted with other content or would leave a gap; a
                rewind is in progress; or the run was rewound after the request was sent.
            OSError: the write failed; nothing was accepted.
        """
        self._check_run(run_id)
        digest = payload.digest()
        existing = self._existing_entry(digest, step)
        if existing is not None:
            return existing
        self._make_folders()
        trace = {TRACEPARENT_HEADER: traceparent} if traceparent else {}
        file = training_file(payload, {DIGEST: digest, **trace})
        with durable.staged_file(self._entries, [file]) as staged, self._accepting(sender):
            # Checked again under the lock: another request or a rewind may have arrived while the payload was written.
            existing = self._existing_entry(digest, step)
            if existing is not None:
                return existing
            entry = Entry(self.last_step() + 1, 0, "train")
            os.link(staged, self._entries / entry.name)
        durable.sync_directory(self._entries)
        return entry

    def _existing_entry(self, digest: str, step: int | None) -> Entry | None:
        """Return the existing entry if `step` was already accepted with the same content; None if it is the next step.

        Raises ContractError for all other steps, and for the next step while a rewind is in progress.
        """
        last = self.last_step()
        if step is not None and step <= last:
            entry = Entry(step, 0, "train")
            accepted = self._digest(entry)
            if accepted in (DAMAGED, digest):  # the sidecar's result reports the damage
                return entry
            was = "was trained too long ago to compare" if accepted is None else "was already sent with other content"
            raise ContractError(
                f"step: {step} of run {self.run_id!r} {was}; the last step is {last}: send step {last + 1}, "
                f"or rewind to step {step - 1} first{self._rewind_hint(step)}"
            )
        if step is not None and step > last + 1:
            raise ContractError(
                f"step: {step}, {STEP_AHEAD} {self.run_id!r} is {last}; send step {last + 1} first"
                f"{self._rewind_hint(step)}"
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
        """Request a checkpoint of `step`, by default of the last accepted step.

        `step` may be the next one, whose critic_train is still in flight. `keep_steps` lists the checkpoints up to
        `step` that the caller still needs. A repeated request for a step whose save is pending returns the same entry:
        a caller that retries after a timeout must not lengthen the queue.

        Raises ContractError if `run_id` names another run, `step` is beyond the next one, a rewind is in progress, or
        the run was rewound after the request was sent.
        """
        self._check_run(run_id)
        wanted = None if keep_steps is None else list(keep_steps)
        with self._accepting(sender):
            self._refuse_during_rewind()
            last = self.last_step()
            if step is not None and step > last + 1:
                raise ContractError(f"step: {step}, {STEP_AHEAD} {self.run_id!r} is {last}")
            pending = None if step is None else self._pending_save(step, wanted)
            content = {} if wanted is None else {"keep_steps": wanted}
            return pending or self._append("save", last if step is None else step, content=content)

    def _pending_save(self, step: int, keep_steps: list[int] | None) -> Entry | None:
        saves = (entry for entry in self.entries() if (entry.kind, entry.step) == ("save", step))
        for entry in saves:
            with contextlib.suppress(DamagedEntry, FileNotFoundError):  # FileNotFoundError: finished meanwhile
                if self.result(entry) is None and self.requested_keep_steps(entry) == keep_steps:
                    return entry
        return None

    def accept_rewind(self, *, run_id: str | None, target: int, sender: Sender | None = None) -> Entry:
        """Request a rewind, after which `target` is the last step. A repeated request returns the pending entry.

        A duplicate may arrive after the rewind is done and `sender` has trained further. It returns the old entry and
        changes nothing.

        Raises ContractError if `run_id` names another run, `target` is beyond the last step, a rewind to another step
        is in progress, or the run was rewound after the request was sent.
        """
        self._check_run(run_id)
        with self._accepting(sender) as owners:
            # Same session and count as the newest rewind: a duplicate, because a new request increments the count.
            if sender is not None and owners[:1] == [str(sender)]:
                newest = self._newest_rewind()
                result = newest and self.result(newest)
                if newest and newest.target == target and not (result and result.error):
                    return newest
            pending = self._pending_rewind()
            if pending is not None and pending.target == target:
                return pending
            last = self.last_step()
            if target > last:
                raise ContractError(f"rewind_to: {target}, {STEP_AHEAD} {self.run_id!r} is {last}")
            self._refuse_during_rewind()
            return self._append("rewind", last, target=target, content={"owners": owners_after(sender, owners)})

    @contextlib.contextmanager
    def lock(self, *, patience_s: float = 2.0) -> Iterator[int]:
        """Hold the journal's exclusive lock; yield the new epoch, the previous one plus 1.

        Raises RlhfError if another sidecar holds the lock for all of `patience_s`.
        """
        self._make_folders()
        with contextlib.ExitStack() as held:
            try:  # waits, because `is_followed` in a server holds the lock briefly
                held.enter_context(durable.exclusive_lock(self.root / "LOCK", patience_s=patience_s))
            except TimeoutError:
                raise RlhfError(
                    f"another sidecar follows the journal in {self.root}, but a critic can have only one; stop the "
                    "other one first"
                ) from None
            epoch = int((durable.read_json(self.root / "EPOCH") or {"epoch": 0})["epoch"]) + 1
            durable.write_json(self.root / "EPOCH", {"epoch": epoch})
            yield epoch

    def finish(self, entry: Entry, result: Result) -> None:
        """Write the entry's result durably; the server that waits for it then responds to the caller."""
        self._make_folders()
        durable.write_json(self._result_path(entry), asdict(result))

    def forget_covered(self, step: int, *, base: int | None = None, archive: int = 0) -> None:
        """Remove entries up to `step` that have a result, and results at least `KEPT_RESULTS` steps older than `step`.

        The newest rewind's result stays.

        Args:
            step: the step of a checkpoint.
            base: the step of an older checkpoint. Training entries after it are kept, so that replaying them from that
                checkpoint can restore every step up to `step`.
            archive: number of newest trained steps to archive instead of removing them.
        """
        for entry in self.entries():
            leads_on = base is not None and entry.kind == "train" and entry.step > base
            if entry.step <= step and not leads_on and (result := self.result(entry)) is not None:
                if archive and result.loss_mean is not None:
                    durable.make_folder(self._archive)
                    (self._entries / entry.name).replace(self._archive / entry.name)
                else:
                    (self._entries / entry.name).unlink()
        for entry in sorted(entries_in(self._archive))[: -archive or None]:
            (self._archive / entry.name).unlink()
        newest = self._newest_rewind()  # its result names the owners of the run
        for entry in self.answered().difference(self.entries()):
            if entry != newest and entry.step <= step - KEPT_RESULTS:
                self._result_path(entry).unlink()

    def set_aside_after(self, rewind: Entry) -> Path:
        """Move every entry and result after `rewind.target` to a new folder in set_aside/; return the folder.

        Moves the newest first, so that a crash halfway leaves no gap between the remaining entries. Creates the folder
        only if there is something to move.
        """
        aside = self._next_aside()
        for folder, suffix in ((self._archive, ""), (self._entries, ""), (self._results, RESULT_SUFFIX)):
            for entry in sorted(entries_in(folder, suffix), reverse=True):
                if entry.step > rewind.target and entry != rewind:
                    durable.make_folder(aside)
                    (folder / f"{entry.name}{suffix}").rename(aside / f"{entry.name}{suffix}")
        for folder in (aside, self._entries, self._results):  # otherwise a power failure could undo the renames
            if folder.is_dir():
                durable.sync_directory(folder)
        return aside

    def set_aside_damaged(self, entry: Entry) -> None:
        """Copy a damaged entry to set_aside/ for inspection and truncate the original.

        The empty file stays as the step's entry, because steps must not have gaps.
        """
        path = self._entries / entry.name
        if path.stat().st_size == 0:
            return
        target = self._next_aside()
        durable.make_folder(target)
        shutil.copyfile(path, target / entry.name)
        durable.sync_tree(target)
        durable.replace_file(path, b"")

    def forget_aside(self, *, keep: int) -> None:
        """Remove all folders in set_aside/ except the newest `keep`."""
        for number in durable.numbers_in(self._set_aside)[:-keep]:
            durable.remove_folder(self._set_aside / str(number))

    def sweep(self) -> None:
        """Delete temporary files of killed writers; finish interrupted removals in set_aside/."""
        durable.sweep(self._set_aside)
        for folder in (self.root, self._entries, self._results):
            durable.sweep_files(folder)

    def drop(self, entry: Entry) -> None:
        """Remove a finished entry that needs no replay (save, rewind)."""
        (self._entries / entry.name).unlink(missing_ok=True)

    def restore_results(self, saved: list[dict[str, Any]]) -> None:
        """Restore results that are in a checkpoint but missing from the journal.

        Skips steps with an entry in the journal: they may have been sent again with other content.
        """
        present = {*self.answered(), *self.entries()}
        for data in saved:
            result = Result(**data)
            if (entry := Entry.parse(result.entry)) not in present:
                self.finish(entry, result)

    def write_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Write the heartbeat, without fsync: the next one replaces a lost one."""
        durable.write_json(self.root / HEARTBEAT_FILE, asdict(heartbeat), durable=False)

    def _make_folders(self) -> None:
        for folder in (self._entries, self._results):  # both at once: an NFS client may cache that one is missing
            durable.make_folder(folder)

    def _check_run(self, run_id: str | None) -> None:
        if run_id is not None and run_id != self.run_id:
            raise ContractError(
                f"run_id: {run_id!r}, but this critic belongs to run {self.run_id!r}; give the actor the same "
                "run.run_id, or start a separate critic for it"
            )

    def _next_aside(self) -> Path:
        return self._set_aside / str(1 + max(durable.numbers_in(self._set_aside), default=0))

    def _refuse_during_rewind(self) -> None:
        pending = self._pending_rewind()
        if pending is not None:
            raise ContractError(
                f"a rewind of run {self.run_id!r} to step {pending.target} is in progress; wait for its result"
            )

    def _append(self, kind: Kind, step: int, *, target: int = -1, content: dict[str, Any] | None = None) -> Entry:
        # Ranks start at 1, because the training entry of the step has rank 0 and is processed first.
        same = {entry for entry in self._all_entries() if entry.step == step}
        earlier = same | self._all_rewinds() if kind == "rewind" else same  # a rewind ranks above all earlier entries
        rank = 1 + max((entry.rank for entry in earlier), default=0)
        entry = Entry(step, rank, kind, target)
        self._make_folders()
        durable.create_file(self._entries / entry.name, json.dumps(content or {}).encode())
        return entry

    @contextlib.contextmanager
    def _accepting(self, sender: Sender | None) -> Iterator[list[str]]:
        """Serialise writers, so that conditions checked in the `with` block still hold when it links the entry.

        Yields the owners of the run. Raises ContractError if `sender` is no longer one.
        """
        folder = self.root / self.run_id
        durable.make_folder(folder)
        with durable.exclusive_lock(folder / "ACCEPT", patience_s=ACCEPT_PATIENCE_S):
            owners = self.owners()
            refuse_superseded(sender, owners, self.run_id)
            yield owners
