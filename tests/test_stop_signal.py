"""A signal sets the event whatever the main thread does at that moment."""

from __future__ import annotations

import signal
import subprocess
import sys

INSIDE_WAIT = """
import signal
from python_backend.stop_signal import stop_event
stop = stop_event(signal.SIGINT, signal.SIGTERM)
with stop._cond:  # as the main thread does for a moment in each stop.wait()
    signal.raise_signal(signal.{name})
assert stop.wait(20)
"""


def test_a_signal_within_a_wait_is_not_a_deadlock() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        subprocess.run([sys.executable, "-c", INSIDE_WAIT.format(name=number.name)], check=True, timeout=60)
