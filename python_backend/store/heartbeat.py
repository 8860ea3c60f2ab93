"""The sidecar's heartbeat file, and a watch that measures the time since its last change without wall clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

HEARTBEAT_FILE = "heartbeat.json"
LOOK_EVERY_S = 0.1  # minimum time between two reads of the file


@dataclass(frozen=True)
class Heartbeat:
    """Progress of the sidecar, written at every micro-batch."""

    epoch: int
    step: int
    micro_batch: int
    state: str
    time: float  # unix seconds
    trouble: str | None = None  # what blocks the sidecar, such as a full disk or a process that holds a lock


class HeartbeatWatch:
    """Measures the time since a sidecar's heartbeat last changed, with the local monotonic clock.

    Wall-clock changes on either machine do not affect the result: `Heartbeat.time` is compared for equality only.
    """

    def __init__(self, read: Callable[[], Heartbeat | None]) -> None:
        self._read = read
        self.last: Heartbeat | None = None
        """The heartbeat that was read last; None if there was none."""
        self._since = time.monotonic()
        self._look_at = 0.0

    def silence_s(self) -> float:
        """Return the seconds since the heartbeat last changed; reads the file at most every LOOK_EVERY_S."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            heartbeat = self._read()
            if heartbeat != self.last:
                self.last, self._since = heartbeat, now
        return now - self._since
