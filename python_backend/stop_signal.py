"""Being told to stop: an event that is set when a signal comes.
Given: signals. Returns: a `threading.Event`, safe to wait on in a loop.
"""

from __future__ import annotations

import queue
import signal
import threading


def stop_event(*signals: signal.Signals) -> threading.Event:
    """An event that the first of `signals` sets. Must be called from the main thread.

    A handler runs between two steps of the main thread. Were it to set the event itself while that thread is inside the
    event's own `wait`, which holds the event's lock, it would wait for that lock forever; `SimpleQueue.put` alone is
    made for handlers.
    """
    stop = threading.Event()
    came: queue.SimpleQueue[None] = queue.SimpleQueue()

    def pass_on() -> None:
        came.get()
        stop.set()

    threading.Thread(target=pass_on, name="stop-signal", daemon=True).start()
    for number in signals:
        signal.signal(number, lambda *_: came.put(None))
    return stop
