"""The training journal: what critic_train and critic_save accepted, in order, until the sidecar has done it.
Given: the journal's folder and the run it belongs to. Returns: tickets to the writers, entries to the sidecar.
numpy and the standard library only (and safetensors' numpy side): it is used inside tritonserver without torch.

    <root>/<run_id>/entries/<step>.train | <step>.save.<n> | <step>.rewind.<n>
    <root>/<run_id>/results/<entry>.json          written once the entry's outcome is served
    <root>/<run_id>/set_aside/<n>/                what a rewind took out
    <root>/{LOCK, EPOCH, heartbeat.json}

An entry's life: accepted (link(2) of a synced file) -> trained -> published -> served -> answered (result) -> covered
by a checkpoint -> removed. Steps begin at 1 and have no gaps.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from safetensors.numpy import save as safetensors_bytes

from python_backend.contract import (
    MASK,
    PREV_VALUES,
    RETURNS,
    SEQUENCE_LENGTHS,
    TOKENS,
    StepConflict,
    TrainPayload,
)
from python_backend.durable import create_file, read_json, write_json

Kind = Literal["train", "save", "rewind"]
KEPT_RESULTS = 1000


class JournalLocked(RuntimeError):
    """Another sidecar holds the journal."""


@dataclass(frozen=True, order=True)
class Entry:
    """One accepted request; entries are done in their order."""

    step: int  # train: its own; save: the one it is of; rewind: the last one accepted before
    rank: int  # 0 train, then 1, 2, … in order of acceptance
    kind: Kind
    target: int = -1  # rewind only: the step to go back to

    @property
    def name(self) -> str:
        """The file's name."""
        suffix = "" if self.kind == "train" else f".{self.rank}"
        target = f".{self.target}" if self.kind == "rewind" else ""
        return f"{self.step:08d}.{self.kind}{suffix}{target}"

    @classmethod
    def parse(cls, name: str) -> Entry:
        """The entry of a file name."""
        step, kind, *rest = name.split(".")
        numbers = [int(part) for part in rest]
        match kind:
            case "train":
                return cls(int(step), 0, "train")
            case "save":
                return cls(int(step), numbers[0], "save")
            case "rewind":
                return cls(int(step), numbers[0], "rewind", numbers[1])
        raise ValueError(f"{name!r} is no journal entry")


@dataclass(frozen=True)
class Result:
    """The outcome of an entry: what its caller is told."""

    entry: str
    weights_version: int
    loss_mean: float | None = None
    digest: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Heartbeat:
    """What the sidecar is doing; renewed at every micro-batch."""

    epoch: int
    step: int
    micro_batch: int
    state: str
    time: float  # unix seconds


class Journal:
    """The journal of one run."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.root = root
        self.run_id = run_id
        self._entries = root / run_id / "entries"
        self._results = root / run_id / "results"
        self._set_aside = root / run_id / "set_aside"

    # ---- writers: inside tritonserver ----

    def accept_training(self, payload: TrainPayload, *, run_id: str | None, step: int | None) -> Entry:
        """Write a training step durably and return its entry (the existing one if it was sent before).

        Raises:
            StepConflict: other run, other content under a known step, a gap, or a rewind under way.
            OSError: the disk refuses; nothing was accepted.
        """
        self._check_run(run_id)
        digest = payload.digest()
        data = safetensors_bytes(payload.arrays(), metadata={"digest": digest})
        while True:
            last = self.last_step()
            if step is not None and step <= last:
                return self._known(step, digest, last)
            if step is not None and step > last + 1:
                raise StepConflict(
                    f"step: {step}, but the last step of run {self.run_id!r} is {last}; send step {last + 1} first"
                )
            self._refuse_during_rewind()
            entry = Entry(last + 1, 0, "train")
            try:
                self._create(entry, data)
            except FileExistsError:  # another writer took the number: look again
                continue
            return entry

    def accept_save(self, *, run_id: str | None, step: int | None = None) -> Entry:
        """Ask for a checkpoint of `step`, which may be on its way still; without it, of everything accepted so far.

        Raises StepConflict if `step` is further ahead than the next one, or a rewind is under way.
        """
        self._check_run(run_id)
        self._refuse_during_rewind()
        last = self.last_step()
        if step is not None and step > last + 1:
            raise StepConflict(f"step: {step}, but the last step of run {self.run_id!r} is {last}")
        return self._append("save", last if step is None else step)

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
            raise StepConflict(f"rewind_to: {target}, but the last step of run {self.run_id!r} is {last}")
        self._refuse_during_rewind()
        return self._append("rewind", last, target)

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

    def load(self, entry: Entry) -> tuple[TrainPayload, str]:
        """A training entry's payload and digest."""
        with safe_open(self._entries / entry.name, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            digest = file.metadata()["digest"]
        payload = TrainPayload(
            arrays[TOKENS], arrays[SEQUENCE_LENGTHS], arrays[RETURNS], arrays[PREV_VALUES], arrays[MASK]
        )
        return payload, digest

    def finish(self, entry: Entry, result: Result) -> None:
        """Record the outcome, which answers the caller."""
        self._results.mkdir(parents=True, exist_ok=True)
        write_json(self._result_path(entry), asdict(result))

    def forget_covered(self, step: int) -> None:
        """Remove what a checkpoint at `step` covers, and results beyond the last 1,000 steps."""
        for entry in self.entries():
            if entry.step <= step and self.result(entry) is not None:
                (self._entries / entry.name).unlink()
        for name in _names(self._results):
            if Entry.parse(name.removesuffix(".json")).step <= step - KEPT_RESULTS:
                (self._results / name).unlink()

    def set_aside_after(self, rewind: Entry) -> list[str]:
        """Take every entry and result after `rewind.target` out of the way; return their names."""
        target = self._set_aside / str(1 + len(_names(self._set_aside)))
        moved = []
        for folder in (self._entries, self._results):
            for name in _names(folder):
                entry = Entry.parse(name.removesuffix(".json"))
                if entry.step > rewind.target and entry != rewind:
                    target.mkdir(parents=True, exist_ok=True)
                    (folder / name).rename(target / name)
                    moved.append(name)
        return moved

    def drop(self, entry: Entry) -> None:
        """Remove an entry that has been done and needs no replay (save, rewind)."""
        (self._entries / entry.name).unlink(missing_ok=True)

    def results(self) -> list[Result]:
        """Outcomes on disk, in order of their entries."""
        names = sorted((name.removesuffix(".json") for name in _names(self._results)), key=Entry.parse)
        found = [self.result(Entry.parse(name)) for name in names]
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
        if known == digest:
            return entry
        was = "was trained too long ago to compare" if known is None else "was already sent with other content"
        raise StepConflict(
            f"step: {step} of run {self.run_id!r} {was}; the last step is {last}: send step {last + 1}, "
            f"or ask critic_save once for rewind_to {step - 1}"
        )

    def _digest(self, entry: Entry) -> str | None:
        result = self.result(entry)
        if result is None:
            try:
                with safe_open(self._entries / entry.name, framework="numpy") as file:
                    return file.metadata()["digest"]
            except FileNotFoundError:  # done just now
                result = self.result(entry)
        return result.digest if result else None

    def _rewind_under_way(self) -> Entry | None:
        rewinds = (entry for entry in self.entries() if entry.kind == "rewind")
        return next((entry for entry in rewinds if self.result(entry) is None), None)

    def _refuse_during_rewind(self) -> None:
        pending = self._rewind_under_way()
        if pending is not None:
            raise StepConflict(
                f"a rewind of run {self.run_id!r} to step {pending.target} is under way; wait for its answer"
            )

    def _append(self, kind: Kind, step: int, target: int = -1) -> Entry:
        while True:
            rank = 1 + max((entry.rank for entry in self._known_entries() if entry.step == step), default=0)
            entry = Entry(step, rank, kind, target)
            try:
                self._create(entry, json.dumps({"target": target}).encode())
            except FileExistsError:  # another writer took the rank: look again
                continue
            return entry

    def _known_entries(self) -> list[Entry]:
        names = [*_names(self._entries), *(name.removesuffix(".json") for name in _names(self._results))]
        return [Entry.parse(name) for name in names]

    def _create(self, entry: Entry, data: bytes) -> None:
        self._entries.mkdir(parents=True, exist_ok=True)
        create_file(self._entries / entry.name, data)

    def _result_path(self, entry: Entry) -> Path:
        return self._results / f"{entry.name}.json"


def _names(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if not name.startswith(".")]  # noqa: PTH208 - names, not paths
    except FileNotFoundError:
        return []
