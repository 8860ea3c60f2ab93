"""Long-lived processes: signals, ending with the parent, garbage collection, and memory kept between forward passes."""

import atexit
import contextlib
import ctypes
import gc
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
            signal.signal(number, self._handle_signal)

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

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
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


# Keeps Python's garbage collector away from the million objects that imports of torch and transformers create.
#
# They live until the process ends, so that examining them finds nothing: it costs half a second of such an import, one
# second at the end of the process, which a reload or a stop waits for, and 0.2 s in each full collection in between.


atexit.register(gc.freeze)  # the interpreter collects garbage when it ends, although the process is about to vanish


@contextlib.contextmanager
def long_lived_imports() -> Iterator[None]:
    """Collect no garbage inside the context, and never examine the objects that exist at its end.

    For imports only: whatever else is created inside is never freed if it becomes part of a reference cycle.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


# Makes glibc's allocator keep the memory of one forward pass for the next.
#
# By default glibc returns large freed blocks to the kernel, so every forward pass incurs the page faults again: 4 to 7
# % of its CPU time. With these settings, resident memory stays at its peak. The process makes them itself, because
# MALLOC_* environment variables would also change tritonserver's own threads and are left to the user who starts the
# server.


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
NEVER_TRIM = 2**31 - 1  # mallopt takes an int: the largest one
LARGEST_FROM_THE_HEAP = 1 << 30
LARGEST_IN_OLD_GLIBC = 1 << 25  # before 2.35


def keep_freed_memory() -> None:
    """Apply these settings to this process permanently; do nothing if the C library has no `mallopt`."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    if mallopt(M_MMAP_THRESHOLD, LARGEST_FROM_THE_HEAP) != 1:
        mallopt(M_MMAP_THRESHOLD, LARGEST_IN_OLD_GLIBC)
    mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)
    mallopt(M_ARENA_MAX, 1)  # because per-thread arenas release large blocks regardless of the thresholds
