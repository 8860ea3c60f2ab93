"""Makes processes hang with SIGSTOP: for a while, permanently, or in the middle of a write."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import psutil

from chaos.points import VICTIMS
from chaos.system import ChaosSystem
from tools.server.health import is_alive

STOP_S = 3.0  # longest temporary stop: too short for the supervisor to replace the process
HUNG_S = 120.0  # time limit for a hung process to be replaced
LONGEST_FREEZE_S = 5.0
MODELS = tuple(victim for victim in VICTIMS if victim not in ("tritonserver", "sidecar"))
CATCH_S = 5.0  # longest wait for critic_train to write
CATCH_POLL_S = 0.0005
CAUGHT_S = 6.0  # longest stop in the middle of a write
GONE_POLL_S = 0.2


def ways_of(num_kills: int, *, hung: bool) -> list[str]:
    """Return how each victim is hit: one in four is stopped for a while and, with `hung`, one in four permanently."""
    return ["stopped" if i % 4 == 3 else "hung" if hung and i % 4 == 1 else "killed" for i in range(num_kills)]


def stop_for(process: psutil.Process, seconds: float, give_up: threading.Event) -> bool:
    """Stop the process for `seconds`; return False if it has ended."""
    try:
        process.send_signal(signal.SIGSTOP)
        give_up.wait(seconds)
        process.send_signal(signal.SIGCONT)
    except psutil.NoSuchProcess:
        return False
    return True


def stop_for_good(process: psutil.Process, give_up: threading.Event) -> bool:
    """Stop the process and wait until it has been replaced; return False if that takes longer than HUNG_S.

    In that case the process continues, so that the run can end.
    """
    deadline = time.monotonic() + HUNG_S
    _signal([process], signal.SIGSTOP)
    while is_alive(process):
        if time.monotonic() > deadline or give_up.wait(GONE_POLL_S):
            _signal([process], signal.SIGCONT)
            return give_up.is_set()
    return True


def freeze_models(system: ChaosSystem, num_freezes: int, generator: random.Random, give_up: threading.Event) -> None:
    """Stop processes of models for a few seconds while no request waits for them; a replacement is a trouble."""
    for _ in range(num_freezes):
        model, seconds = generator.choice(MODELS), generator.uniform(1.0, LONGEST_FREEZE_S)
        for process in system.processes_of(model)[-1:]:
            stop_for(process, seconds, give_up)
            if process not in system.processes_of(model):
                system.troubles.append(f"the process of {model} was replaced as it was stopped for {seconds:.1f} s")


def stop_accepting(system: ChaosSystem) -> Callable[[], None]:
    """Stop critic_train during a journal write, if one comes within CATCH_S; return a function that continues it."""
    folder = system.config.run.journal_dir / system.config.run.identity / "entries"
    stubs = system.processes_of("critic_train")
    deadline = time.monotonic() + CATCH_S
    while time.monotonic() < deadline:
        # The journal writes an entry to a hidden file and renames it.
        if any(name.startswith(".") for name in os.listdir(folder)):  # noqa: PTH208 - names, thousands of times
            _signal(stubs, signal.SIGSTOP)
            break
        time.sleep(CATCH_POLL_S)

    def resume() -> None:
        timer.cancel()
        _signal(stubs, signal.SIGCONT)

    timer = threading.Timer(CAUGHT_S, resume)  # a stopped process may hold the journal's lock
    timer.start()
    return resume


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
