"""Serving records: one file for each instance of a model, in a folder that servers and the sidecar share."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_triton.store.durable import make_folder, read_json, write_json

# After this silence, a suspended instance, or one whose process is not visible here, counts as dead.
REMOTE_SILENCE_S = 15.0
STOPPED = ("T", "t")  # process states: suspended by a signal or by a debugger


@dataclass(frozen=True, kw_only=True)
class ServingRecord:
    """State of one instance of a model: which version it serves, and whether it is alive.

    The instance writes the record to a folder that servers and sidecar share, so readers need no connection to the
    servers.
    """

    instance: str
    host: str
    place: str  # `this_place` of the instance: the scope in which `pid` is valid
    pid: int
    born: int  # process start in clock ticks since boot; detects reused process ids
    version: int | None  # the version that the instance serves; None until the first one is loaded
    time: float  # unix seconds of the last change
    previous: int | None = None
    swap_ms: float | None = None  # from noticing a new CURRENT to serving it
    loading: int | None = None  # version whose files the instance is reading
    rejected: int | None = None  # last version that the instance refused to serve
    error: str | None = None  # why it rejected that version
    staged: int | None = None  # announced version that the instance has tried to load, if it has a canary row
    staging_error: str | None = None  # why the instance cannot serve the staged version

    @classmethod
    def of_this_process(cls, instance: str, version: int | None, **more: Any) -> ServingRecord:
        """Return a record for an instance in this process, with the current time."""
        pid = os.getpid()
        born = _process(pid)[1]
        return cls(
            instance=instance,
            host=socket.gethostname(),
            place=this_place(),
            pid=pid,
            born=born,
            version=version,
            time=time.time(),
            **more,
        )

    @property
    def name(self) -> str:
        """Instance, host and pid, for messages."""
        return f"{self.instance} on {self.host} (pid {self.pid})"

    @property
    def file_name(self) -> str:
        """File name, unique across processes, machines and containers."""
        return f"{self.host}.{self.instance}.{self.pid}.{self.place}.json"


class ServingRecords:
    """The serving records in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._first_seen: dict[str, tuple[int, float]] = {}  # file name -> mtime (ns), when first seen (monotonic)

    def put(self, record: ServingRecord) -> None:
        """Write the record (called by the instance). Raises OSError if the write fails."""
        make_folder(self._folder)
        write_json(self._folder / record.file_name, asdict(record), durable=False)

    def touch(self, record: ServingRecord) -> None:
        """Update the record's mtime as a sign of life; write the record again if it was removed."""
        try:
            os.utime(self._folder / record.file_name)
        except FileNotFoundError:  # another instance considered this one dead and removed its record
            self.put(record)

    def withdraw(self, record: ServingRecord) -> None:
        """Remove the record of an instance that stops serving."""
        (self._folder / record.file_name).unlink(missing_ok=True)

    def alive(self) -> list[ServingRecord]:
        """Return the records of live instances, including those that are loading their first version.

        An instance on another host counts as alive until this object has seen its record unchanged for
        `REMOTE_SILENCE_S`, so differing or changed clocks do not matter.
        """
        return [record for record, is_alive in self._all() if is_alive]

    def last_sign(self, record: ServingRecord) -> float | None:
        """Return when a silent instance on another host last updated its record, in the file server's unix seconds.

        For readers that read the records only once, so that `alive` cannot detect silence. Returns None if the
        instance was active within `REMOTE_SILENCE_S`, its process is visible here, or its record has been removed.
        """
        if record.place == this_place():
            return None
        try:
            renewed = (self._folder / record.file_name).stat().st_mtime
        except FileNotFoundError:
            return None
        return renewed if time.time() - renewed > REMOTE_SILENCE_S else None

    def died(self) -> list[ServingRecord]:
        """Return the records of dead instances of `this_place`."""
        return [record for record, is_alive in self._all() if record.place == this_place() and not is_alive]

    def forget_died(self, *, elsewhere: bool = False) -> None:
        """Remove the records of dead instances of `this_place` or, with `elsewhere`, of all other places."""
        for record, is_alive in self._all():
            if (record.place != this_place()) == elsewhere and not is_alive:
                self.withdraw(record)

    def _all(self) -> list[tuple[ServingRecord, bool]]:
        """Return every record, and whether its instance is alive."""
        records = []
        first_seen = {}
        now = time.monotonic()
        for path in sorted(self._folder.glob("*.json")):
            try:
                record = ServingRecord(**(read_json(path) or {}))
                stamp = path.stat().st_mtime_ns
            except (ValueError, TypeError, FileNotFoundError):
                continue  # removed just now, or truncated by a crash: its instance writes it again
            earlier = self._first_seen.get(path.name)
            first_seen[path.name] = earlier if earlier is not None and earlier[0] == stamp else (stamp, now)
            records.append((record, _is_alive(record, now - first_seen[path.name][1])))
        self._first_seen = first_seen
        return records


def _is_alive(record: ServingRecord, silence_s: float) -> bool:
    """Return whether an instance is alive, given that its record has not changed for `silence_s`.

    A process of this place is looked up. An instance elsewhere, or a stopped process, counts as alive until its record
    has not changed for REMOTE_SILENCE_S.
    """
    if record.place == this_place():
        try:
            state, born = _process(record.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state == "Z" or born != record.born:  # zombie: tritonserver does not reap a killed stub
            return False
        if state not in STOPPED:
            return True
    return silence_s < REMOTE_SILENCE_S


@functools.cache
def this_place() -> str:
    """Return eight hex digits that identify the boot and the pid namespace of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = str(Path("/proc/self/ns/pid").readlink())  # containers of a pod share the host name but not this
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:8]


def _process(pid: int) -> tuple[str, int]:
    """Return the state letter and the start time (clock ticks since boot) of a process, from /proc/<pid>/stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
