"""Setup of long-lived processes: signals, ending with the parent, garbage collection, and freed memory."""

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1  # linux/prctl.h
RUN_MODULE = str(Path(__file__).with_name("run_module.py"))
"""For child processes: `python RUN_MODULE MODULE` is `python -m MODULE` that a user's files do not shadow."""


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
    """Counts SIGINT and SIGTERM; a received signal raises StopRequested at the next `check` or inside `raising`.

    Elsewhere it raises nothing: an exception between the start of a child process and the assignment of its object
    would leave the child running.
    """

    def __init__(self) -> None:
        self.count = 0
        self._is_pending = self._is_raising = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle_signal)

    def check(self) -> None:
        """Raise StopRequested if a signal has arrived since the last one was raised."""
        if self._is_pending:
            self._is_pending = self._is_raising = False
            raise StopRequested

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Let signals raise StopRequested at any point of the block: for long calls that start no other process."""
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
    """Make the kernel kill this process when its parent ends.

    Returns whether `parent` is still the parent; otherwise it ended before this call.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def how_ended(code: int) -> str:
    """Return "ended with exit code N" or "was killed by SIGNAL" for an exit code (negative: killed by a signal)."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


# Imports of torch and transformers create a million objects that live until the process ends. Examining them for
# garbage costs half a second of the import, one second at the end of the process, and 0.2 s per full collection.
atexit.register(gc.freeze)  # otherwise the interpreter collects garbage when the process ends


@contextlib.contextmanager
def long_lived_imports() -> Iterator[None]:
    """Collect no garbage inside the context, and permanently exclude the objects that exist at its end from collection.

    For imports only: other objects created inside are never freed if they become part of a reference cycle.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


# Settings with which glibc's allocator keeps the memory of one forward pass for the next. By default it returns large
# freed blocks to the kernel, so every forward pass incurs the page faults again: 4 to 7 % of its CPU time. With these
# settings, resident memory stays at its peak. MALLOC_* environment variables would also affect tritonserver's own
# threads and are left to the user.


# malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
NEVER_TRIM = 2**31 - 1  # the largest int, which is mallopt's argument type
MAX_HEAP_BYTES = 1 << 30
MAX_HEAP_BYTES_IN_OLD_GLIBC = 1 << 25  # limit before glibc 2.35


def keep_freed_memory() -> None:
    """Make the allocator keep freed memory in this process; do nothing if the C library has no `mallopt`."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    if mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BYTES) != 1:
        mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BYTES_IN_OLD_GLIBC)
    mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)
    mallopt(M_ARENA_MAX, 1)  # per-thread arenas release large blocks regardless of the thresholds
