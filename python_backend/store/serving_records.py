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
        self._touched: dict[str, tuple[int, float]] = {}  # file name -> mtime (ns), when first seen (monotonic)

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
        """Return the records of live instances, including those that are loading their first version."""
        return [record for record, path in self._all() if self._is_alive(record, path)]

    def died(self) -> list[ServingRecord]:
        """Return the records of dead instances whose process belongs to `this_place`."""
        return [
            record for record, path in self._all() if record.place == this_place() and not self._is_alive(record, path)
        ]

    def forget_died(self) -> None:
        """Remove the records of dead instances (called by an instance that replaces them)."""
        for record, path in self._all():
            if not self._is_alive(record, path):
                path.unlink(missing_ok=True)

    def _is_alive(self, record: ServingRecord, path: Path) -> bool:
        if record.place == this_place():
            try:
                state, born = _process(record.pid)
            except (FileNotFoundError, ProcessLookupError):
                return False
            if state == "Z" or born != record.born:  # zombie: tritonserver does not reap a killed stub
                return False
            if state not in STOPPED:
                return True
        try:
            return self._silence_s(path) < REMOTE_SILENCE_S
        except FileNotFoundError:
            return False

    def _silence_s(self, path: Path) -> float:
        """Return the seconds since a record was touched.

        If clock skew between hosts puts its mtime in the future, count from when this process first saw that mtime.
        """
        stamp, now = path.stat().st_mtime_ns, time.monotonic()
        if self._touched.get(path.name, (None, 0.0))[0] != stamp:
            self._touched[path.name] = (stamp, now)
        age_s = time.time() - stamp / 1e9
        return age_s if age_s >= 0 else now - self._touched[path.name][1]

    def _all(self) -> list[tuple[ServingRecord, Path]]:
        found = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                data = read_json(path)
                if data is not None:
                    found.append((ServingRecord(**data), path))
            except (ValueError, TypeError):  # another release's, or truncated by a crash: its instance writes it again
                continue
        return found


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
