"""A signal sets the event whatever the main thread does at that moment."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from python_backend.stop_signal import StopRequested, StopSignals

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


JUST_BEFORE_WAIT = """
import os, signal, threading
from python_backend.stop_signal import stop_event
stop = stop_event(signal.SIGINT, signal.SIGTERM)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.{name}])  # as if it came just before the wait: that is not interrupted
def elsewhere():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.{name}])
    os.kill(os.getpid(), signal.{name})
timer = threading.Timer(0.2, elsewhere)
timer.start()
assert stop.wait(20)
"""


def test_a_signal_that_does_not_interrupt_the_wait_ends_it() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        subprocess.run([sys.executable, "-c", JUST_BEFORE_WAIT.format(name=number.name)], check=True, timeout=60)


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield StopSignals()
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_a_signal_raises_once_and_only_where_the_caller_is_ready_for_it(signals: StopSignals) -> None:
    signals.check()
    signal.raise_signal(signal.SIGTERM)  # as between the start of a process and its assignment
    with pytest.raises(StopRequested), signals.raising():
        pytest.fail("it arrived before")
    signals.check()
    with pytest.raises(StopRequested), signals.raising():
        signal.raise_signal(signal.SIGINT)
    with signals.raising():
        pass
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(StopRequested):
        signals.check()
    assert signals.count == 3
