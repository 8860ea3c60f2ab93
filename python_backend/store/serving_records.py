"""Records of a model's instances: which version each serves, and whether it is alive.

Each instance writes one small file in a folder that servers and sidecar share, so readers need no connection to the
servers.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from python_backend.store.durable import make_folder, read_json, write_json

REMOTE_SILENCE_S = 15.0  # an instance that is suspended, or whose process is not visible here, is dead after this
STOPPED = ("T", "t")  # process states: suspended by a signal, by a debugger


@dataclass(frozen=True)
class ServingRecord:
    """State of one instance of a model, written by the instance."""

    instance: str
    host: str
    place: str  # `this_place` of the instance: the scope in which `pid` is valid
    pid: int
    born: int  # process start in clock ticks since boot; detects reused process ids
    version: int | None  # the version that it serves; None until the first one is loaded
    time: float  # unix seconds of the last change
    previous: int | None = None
    swap_ms: float | None = None  # from noticing a new CURRENT to serving it
    loading: int | None = None  # version whose files it is reading
    rejected: int | None = None  # last version that it refused to serve
    error: str | None = None  # why it was rejected
    staged: int | None = None  # announced version that it has tried to load, if the version has a canary row
    staging_error: str | None = None  # why it could not, or must not serve it

    @classmethod
    def of_this_process(cls, instance: str, version: int | None, **more: object) -> ServingRecord:
        """Return a record of an instance in this process, with the current time."""
        pid = os.getpid()
        born = _process(pid)[1]
        return cls(instance, socket.gethostname(), this_place(), pid, born, version, time.time(), **more)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """Instance, host and pid, for messages."""
        return f"{self.instance} on {self.host} (pid {self.pid})"

    @property
    def file_name(self) -> str:
        """File name, unique across processes, machines and containers."""
        return f"{self.host}.{self.instance}.{self.pid}.{self.place}.json"


class ServingRecords:
    """The records in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, tuple[int, float]] = {}  # file name -> mtime (ns), when first seen (monotonic)

    def put(self, record: ServingRecord) -> None:
        """Write the record (called by the instance). Raises OSError if the write fails."""
        make_folder(self._folder)
        write_json(self._folder / record.file_name, asdict(record), durable=False)

    def touch(self, record: ServingRecord) -> None:
        """Renew the record's mtime as a sign of life; write the record again if it was removed."""
        try:
            os.utime(self._folder / record.file_name)
        except FileNotFoundError:  # another instance took this one for dead and removed it
            self.put(record)

    def withdraw(self, record: ServingRecord) -> None:
        """Remove the record of an instance that stops serving."""
        (self._folder / record.file_name).unlink(missing_ok=True)

    def alive(self) -> list[ServingRecord]:
        """Return the records of live instances, including those that are loading their first version.

        An instance on another host counts as alive until this object has seen its record unchanged for
        `REMOTE_SILENCE_S`: clocks of two hosts, or one that is set, do not make it look dead.
        """
        return [record for record, silence_s in self._all() if _is_alive(record, silence_s)]

    def last_sign(self, record: ServingRecord) -> float | None:
        """Return when an instance elsewhere last gave a sign of life, if that was not within `REMOTE_SILENCE_S`.

        For readers that look only once, as `alive` cannot tell them. In unix seconds of the file server's clock; None
        of an instance that is not silent, whose process is visible here, or whose record was removed meanwhile.
        """
        if record.place == this_place():
            return None
        try:
            renewed = (self._folder / record.file_name).stat().st_mtime
        except FileNotFoundError:
            return None
        return renewed if time.time() - renewed > REMOTE_SILENCE_S else None

    def died(self) -> list[ServingRecord]:
        """Return the records of dead instances whose process belongs to `this_place`."""
        return [
            record
            for record, silence_s in self._all()
            if record.place == this_place() and not _is_alive(record, silence_s)
        ]

    def forget_died(self, *, elsewhere: bool = False) -> None:
        """Remove the records of dead instances: of `this_place` (called by one that replaces them), or of others."""
        for record, silence_s in self._all():
            if (record.place != this_place()) == elsewhere and not _is_alive(record, silence_s):
                self.withdraw(record)

    def _all(self) -> list[tuple[ServingRecord, float]]:
        """Return every record, and for how many seconds this object has seen it unchanged."""
        found, seen, now = [], {}, time.monotonic()
        for path in sorted(self._folder.glob("*.json")):
            try:
                record, stamp = ServingRecord(**(read_json(path) or {})), path.stat().st_mtime_ns
            except (ValueError, TypeError, FileNotFoundError):
                continue  # removed meanwhile, another release's, or truncated by a crash: its instance writes it again
            known = self._seen.get(path.name)
            seen[path.name] = known if known is not None and known[0] == stamp else (stamp, now)
            found.append((record, now - seen[path.name][1]))
        self._seen = seen
        return found


def _is_alive(record: ServingRecord, silence_s: float) -> bool:
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
    """Return eight hex digits that are equal exactly for processes that share a boot and a pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = str(Path("/proc/self/ns/pid").readlink())  # containers of one pod share the host name but not this
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:8]


def _process(pid: int) -> tuple[str, int]:
    """Return the state letter and the start time (clock ticks since boot) of a process, from /proc/<pid>/stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
