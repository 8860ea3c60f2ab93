"""Process signals: an event that is set when a signal arrives, ending with the parent, and how a process ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def stop_event(*signals: signal.Signals) -> threading.Event:
    """Return an event that is set when one of `signals` arrives. Must be called from the main thread.

    Uses `signal.set_wakeup_fd`, which reports a signal immediately. A Python signal handler runs only between two
    bytecodes of the main thread. That is too late if the thread has just started to block, and a handler that runs
    inside `event.wait()` would deadlock on the lock that `event.set()` needs.
    """
    stop = threading.Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)  # required by `set_wakeup_fd`

    def pass_on() -> None:
        with reader, writer:  # stays open: signals may keep arriving until the process exits
            while reader.recv(1)[0] not in signals:
                pass
            stop.set()
            while reader.recv(1):
                pass

    threading.Thread(target=pass_on, name="stop-signal", daemon=True).start()
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, lambda *_: None)
    return stop


class StopRequested(KeyboardInterrupt):
    """SIGINT or SIGTERM was received; not an error."""


class StopSignals:
    """Counts SIGINT and SIGTERM; one that has arrived raises StopRequested, at the next `check` or inside `raising`.

    Elsewhere it raises nothing: between the start of a process and the assignment that makes someone responsible for
    it, an exception would leave the process running.
    """

    def __init__(self) -> None:
        self.count = 0
        self._is_pending = self._is_raising = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take)

    def check(self) -> None:
        """Raise StopRequested if a signal has arrived that has not raised it yet."""
        if self._is_pending:
            self._is_pending = self._is_raising = False
            raise StopRequested

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Raise StopRequested at any point of the block: for long calls that start nothing that outlives them."""
        self._is_raising = True
        try:
            self.check()
            yield
        finally:
            self._is_raising = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self._is_pending = True
        if self._is_raising:
            self.check()


def die_with_parent(parent: int) -> bool:
    """Let the kernel kill this process, whatever it is doing, when its parent ends.

    Returns whether the parent still is the process `parent`; if it is not, it has ended before this call.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def how_ended(code: int) -> str:
    """Return "ended with exit code N" or "was killed by SIGNAL" for an exit code (negative: killed by a signal)."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
