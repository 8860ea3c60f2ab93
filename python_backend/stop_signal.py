"""Signals and processes: an event that is set when a signal comes, and how a process ended."""

from __future__ import annotations

import signal
import socket
import threading


def stop_event(*signals: signal.Signals) -> threading.Event:
    """An event that the first of `signals` sets. Must be called from the main thread.

    The interpreter's wake-up descriptor reports a signal at the moment it arrives. A Python handler would run between
    two steps of the main thread: too late where that thread has just begun to wait, and, inside the event's own `wait`,
    never able to take the lock that `set` needs.
    """
    stop = threading.Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)  # as `set_wakeup_fd` demands

    def pass_on() -> None:
        with reader, writer:  # kept open for as long as signals may come
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


def how_ended(code: int) -> str:
    """Return the predicate for an exit code, which is negative for a signal."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
