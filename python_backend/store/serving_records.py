"""Records of the critic's instances: which version each serves, and whether it is alive.

One small file per instance in a folder that servers and sidecar share; readers need no connection to any server.
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

REMOTE_SILENCE_S = 15.0  # an instance that is stopped, or cannot be looked at, counts as gone after this silence
STOPPED = ("T", "t")  # by a signal, by a debugger


@dataclass(frozen=True)
class ServingRecord:
    """What one critic instance says of itself."""

    instance: str
    host: str
    place: str  # where the process id means something: one boot of one machine, one container
    pid: int
    born: int  # start of the process in clock ticks since boot: process ids are used again
    version: int | None  # served; None until the first is loaded
    time: float  # unix seconds of the last change
    previous: int | None = None
    swap_ms: float | None = None  # from seeing CURRENT move to serving it
    loading: int | None = None  # version whose files it reads now
    rejected: int | None = None  # version that it refused
    error: str | None = None  # and why

    @classmethod
    def of_this_process(cls, instance: str, version: int | None, **more: object) -> ServingRecord:
        """A record of an instance in this process, as of now."""
        pid = os.getpid()
        born = _process(pid)[1]
        return cls(instance, socket.gethostname(), this_place(), pid, born, version, time.time(), **more)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """Instance and host, for people."""
        return f"{self.instance} on {self.host} (pid {self.pid})"

    @property
    def file_name(self) -> str:
        """No two processes share it, whatever machine or container they run in."""
        return f"{self.host}.{self.instance}.{self.pid}.{self.place}.json"


class ServingRecords:
    """The records in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._touched: dict[str, tuple[int, float]] = {}  # file name -> mtime, and when (monotonic) it was seen first

    def put(self, record: ServingRecord) -> None:
        """Say what an instance serves (called by the instance). Raises OSError if the disk refuses."""
        make_folder(self._folder)
        write_json(self._folder / record.file_name, asdict(record), durable=False)

    def touch(self, record: ServingRecord) -> None:
        """Say that the instance is still there; its record is written again where it was lost."""
        try:
            os.utime(self._folder / record.file_name)
        except FileNotFoundError:  # taken for dead, after a silence
            self.put(record)

    def withdraw(self, record: ServingRecord) -> None:
        """The instance serves no more."""
        (self._folder / record.file_name).unlink(missing_ok=True)

    def alive(self) -> list[ServingRecord]:
        """Records of the instances that are alive, those that still load their first version among them."""
        return [record for record, path in self._all() if self._is_alive(record, path)]

    def died(self) -> list[ServingRecord]:
        """Records of instances of this place whose process ended without withdrawing: killed, or crashed."""
        return [
            record for record, path in self._all() if record.place == this_place() and not self._is_alive(record, path)
        ]

    def forget_died(self) -> None:
        """Remove the records of instances that are not alive (called by an instance that takes their place)."""
        for record, path in self._all():
            if not self._is_alive(record, path):
                path.unlink(missing_ok=True)

    def _is_alive(self, record: ServingRecord, path: Path) -> bool:
        if record.place == this_place():
            try:
                state, born = _process(record.pid)
            except (FileNotFoundError, ProcessLookupError):
                return False
            if state == "Z" or born != record.born:  # tritonserver does not reap a stub that was killed
                return False
            if state not in STOPPED:
                return True
        try:
            return self._silence_s(path) < REMOTE_SILENCE_S
        except FileNotFoundError:
            return False

    def _silence_s(self, path: Path) -> float:
        """Seconds since a record was touched; one that says it was touched in the future, since this was seen first."""
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
            except (ValueError, TypeError):  # another release's, or cut short by a crash: its owner writes it again
                continue
        return found


@functools.cache
def this_place() -> str:
    """Eight digits that processes share if and only if they can look at each other's process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = str(Path("/proc/self/ns/pid").readlink())  # containers of one pod share the host's name, not this
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:8]


def _process(pid: int) -> tuple[str, int]:
    """State and start of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
