"""The sidecar's heartbeat: what it is doing, and how long it has been silent, whatever the clocks say."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from python_backend.store.durable import read_json, write_json

FILE = "heartbeat.json"
LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class Heartbeat:
    """What the sidecar is doing; renewed at every micro-batch."""

    epoch: int
    step: int
    micro_batch: int
    state: str
    time: float  # unix seconds
    trouble: str | None = None  # why it cannot go on: what the disk refuses, which process is in its way


def read_heartbeat(root: Path) -> Heartbeat | None:
    """The last one written in `root`; None without one, or where a crash of the machine has emptied the file."""
    try:
        data = read_json(root / FILE)
        return None if data is None else Heartbeat(**data)
    except (ValueError, TypeError):
        return None


def write_heartbeat(root: Path, heartbeat: Heartbeat) -> None:
    """Replace the one in `root`; it is not made to survive a crash."""
    write_json(root / FILE, asdict(heartbeat), durable=False)


class HeartbeatWatch:
    """Measures silence by when a new heartbeat was seen: a clock that was set, here or there, changes nothing."""

    def __init__(self, read: Callable[[], Heartbeat | None]) -> None:
        self._read = read
        self.last: Heartbeat | None = None
        """The heartbeat seen last."""
        self._since = time.monotonic()
        self._look_at = 0.0

    def silence_s(self) -> float:
        """Seconds since a heartbeat was seen that was not `last`; looks at most every LOOK_EVERY_S."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            heartbeat = self._read()
            if heartbeat != self.last:
                self.last, self._since = heartbeat, now
        return now - self._since
