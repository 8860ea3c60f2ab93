"""Shared-memory regions of tritonserver's stubs: named after their server, removed once all its processes have ended.

A lock on a file beside the regions shows whether they are in use. The server and its stubs inherit the lock, so the
kernel keeps it until the last of these processes has ended, no matter how they end or in which process namespace.
"""

import contextlib
import fcntl
import os
import re
import secrets
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_OWNER_FILE = re.compile(r"\.(?P<prefix>rlhf-\d+-[0-9a-f]{8}-)owner")


class Regions:
    """The regions of one server; their names begin with `prefix`."""

    def __init__(self) -> None:
        self.prefix = f"rlhf-{os.getpid()}-{secrets.token_hex(4)}-"
        self._lock: int | None = None

    def lock(self) -> int:
        """Mark the regions as in use; return the file descriptor of the lock, which the server must inherit."""
        path = SHARED_MEMORY / f".{self.prefix}owner"
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        self._lock = os.open(fresh, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(path)  # no process sees it unlocked
        return self._lock

    def remove(self) -> None:
        """Remove the regions and the lock; the server must have ended."""
        _remove(self.prefix)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_abandoned() -> list[str]:
    """Remove the regions that this user's ended servers left behind; return the prefixes of their names."""
    return [match["prefix"] for path in SHARED_MEMORY.glob(".rlhf-*-owner") if (match := _abandoned(path))]


def _abandoned(path: Path) -> re.Match[str] | None:
    """Remove the regions of an owner file and return its name's match; None if they are in use or another user's."""
    match = _OWNER_FILE.fullmatch(path.name)
    with contextlib.suppress(OSError):  # a concurrent start has removed them, or they are not ours
        if match is None or path.lstat().st_uid != os.getuid():
            return None
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(match["prefix"])
            return match
    return None


def _remove(prefix: str) -> None:
    for path in (*SHARED_MEMORY.glob(f"{prefix}*"), SHARED_MEMORY / f".{prefix}owner"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                path.unlink()
