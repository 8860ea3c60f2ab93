"""Processes that hang instead of dying: stopped by SIGSTOP for a while, for good, or just while they write."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

import psutil

from chaos.system import ChaosSystem

WAYS = ("killed", "stopped", "hung")
STOP_S = 3.0  # at most: a supervisor is to notice, and not to act
HUNG_S = 120.0  # by then a hung process must have been replaced
CATCH_S = 5.0  # how long a payload is waited for
CATCH_POLL_S = 0.0005
CAUGHT_S = 6.0  # at most
GONE_POLL_S = 0.2


def ways_of(num_kills: int, *, hung: bool) -> list[str]:
    """How each victim of a plan is hit: every fourth is stopped for a while; with `hung`, every fourth for good."""
    return ["stopped" if i % 4 == 3 else "hung" if hung and i % 4 == 1 else "killed" for i in range(num_kills)]


def stop_for(process: psutil.Process, seconds: float, give_up: threading.Event) -> bool:
    """Stop the process for so long; False if it had gone already."""
    try:
        process.send_signal(signal.SIGSTOP)
        give_up.wait(seconds)
        process.send_signal(signal.SIGCONT)
    except psutil.NoSuchProcess:
        return False
    return True


def stop_for_good(process: psutil.Process, give_up: threading.Event) -> bool:
    """Stop the process and wait until it has been replaced; False if nothing replaces it within HUNG_S.

    It goes on then, so that the run can end.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + HUNG_S
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline or give_up.wait(GONE_POLL_S):
                process.send_signal(signal.SIGCONT)
                return give_up.is_set()
    return True


def stop_accepting(system: ChaosSystem) -> Callable[[], None]:
    """Stop critic_train while it writes an entry's file, where that can be caught; returns what lets it go on."""
    folder = system.config.run.journal_dir / system.config.run.identity / "entries"
    stubs = system.processes_of("critic_train")
    deadline = time.monotonic() + CATCH_S
    while time.monotonic() < deadline:
        if any(name.startswith(".") for name in os.listdir(folder)):  # noqa: PTH208 - names, thousands of times
            _signal(stubs, signal.SIGSTOP)
            break
        time.sleep(CATCH_POLL_S)

    def resume() -> None:
        timer.cancel()
        _signal(stubs, signal.SIGCONT)

    timer = threading.Timer(CAUGHT_S, resume)  # it may have been caught with the journal's lock in its hands
    timer.start()
    return resume


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
