"""Heartbeat of the sidecar: its progress, which servers and commands read to see whether it is alive."""

import time
from collections.abc import Callable
from dataclasses import dataclass

HEARTBEAT_FILE = "heartbeat.json"
READ_EVERY_S = 0.1  # minimum time between two reads of the file
HEARTBEAT_TIMEOUT_S = 15.0  # time without progress of the sidecar after which callers of critic_train get a 503


@dataclass(frozen=True, kw_only=True)
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

    Wall-clock changes on either machine do not affect the result, because `Heartbeat.time` is only compared for
    equality.
    """

    def __init__(self, read: Callable[[], Heartbeat | None]) -> None:
        self._read = read
        self.last: Heartbeat | None = None
        """The heartbeat from the last read; None if there was none."""
        self._since = time.monotonic()
        self._read_at = 0.0

    def silence_s(self) -> float:
        """Return the seconds since the heartbeat last changed; reads the file at most every READ_EVERY_S."""
        now = time.monotonic()
        if now >= self._read_at:
            self._read_at = now + READ_EVERY_S
            heartbeat = self._read()
            if heartbeat != self.last:
                self.last = heartbeat
                self._since = now
        return now - self._since
