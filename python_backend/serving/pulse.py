"""Ends the model's process if it did not run for a second while Triton handed it a request.

In each process of a model, a Triton thread wakes up every 0.3 s. If it does not for one second of wall-clock time while
the server hands over a request (the process is stopped or starved, the machine was paused, the clock was set), server
2.51 fails and frees the request without notifying the process. If the process then continues, the server matches each
of its replies to the following request, so an answer may reach the wrong caller. This module therefore ends the
process. The supervisor replaces it (tools/server/health.py); without a supervisor, the server answers every request
with an error. (If a request arrives while the process is stopped, the server frees it as well, but then the server
aborts.)
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

GIVEN_UP_S = 0.9  # just below Triton's timeout of 1 s, because wake-up times are known to 0.1 s
TICK_S = 0.1
STUB = "triton_python_b"  # triton_python_backend_stub, which the kernel truncates to 15 characters
WAKE_S = 0.3
MAX_WAKE_S = 0.36  # on a busy machine
HANDED_OVER_S = 0.5  # a request that arrives this soon after a stall arrived during it
SWITCHES_OF_STOP = 2  # context switches of a sleeping thread that is stopped and continued
_SWITCHES = re.compile(rb"\nvoluntary_ctxt_switches:\s*(\d+)")


class Pulse:
    """Watches Triton's thread in this process; `start` starts the watching thread."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._is_handing_over = False
        self._triton = self._sleeper = 0  # thread ids of Triton's thread and of a thread that always sleeps
        self._wakes = self._stops = 0  # number of context switches of each
        self._woke_at = 0.0  # lower bound of the last wake-up's time; wall clock, in seconds
        self._checked_at = 0.0
        self._stalled_at = 0.0  # when a stall was last detected
        self._watches = False

    def start(self) -> None:
        """Start watching, if this is a Triton process and the kernel counts its threads' context switches."""
        if Path("/proc/self/comm").read_text().startswith(STUB):
            threading.Thread(target=self._watch, name="pulse", daemon=True).start()

    @contextlib.contextmanager
    def handing_over(self) -> Iterator[None]:
        """Wrap code that runs while Triton waits for this process to accept requests."""
        self.check()
        if self._watches and time.time() - self._stalled_at < HANDED_OVER_S:
            self._end()
        self._is_handing_over = True
        try:
            yield
        finally:
            self.check()
            self._is_handing_over = False

    def check(self) -> None:
        """End the process if Triton may have given up the request that it is handing over."""
        now = time.time()
        if not self._watches or 0 <= now - self._checked_at < TICK_S:
            return
        with self._lock:
            silent_s = self._silent_s(now)
        if silent_s > GIVEN_UP_S:
            self._stalled_at = now
            if self._is_handing_over:
                self._end()

    def _silent_s(self, now: float) -> float:
        """Return an upper bound in seconds of how long Triton's thread has not woken up."""
        wakes = _num_switches(self._triton)
        stops = _num_switches(self._sleeper)
        new = wakes - self._wakes
        real = new - SWITCHES_OF_STOP if stops > self._stops else new
        silent_s = now - self._woke_at - max(real - 1, 0) * MAX_WAKE_S
        if new:
            is_steady = now - self._checked_at < (real + 1) * MAX_WAKE_S
            earliest = self._checked_at + max(real - 1, 0) * WAKE_S
            self._woke_at = max(earliest, now - WAKE_S / 2) if is_steady else earliest
        self._wakes = wakes
        self._stops = stops
        self._checked_at = now
        return silent_s

    def _watch(self) -> None:
        sleeper = threading.Thread(target=threading.Event().wait, name="sleeper", daemon=True)
        sleeper.start()
        self._sleeper = sleeper.native_id or 0
        self._triton = min(
            int(task.name) for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()
        )
        before = _num_switches(self._triton)
        time.sleep(1.0)
        self._wakes = _num_switches(self._triton)
        self._stops = _num_switches(self._sleeper)
        self._woke_at = self._checked_at = time.time()
        self._watches = self._wakes > before
        while self._watches:
            self.check()
            time.sleep(TICK_S)

    def _end(self) -> None:
        line = (
            f"{self._model}: this process did not run for a second, so the server has given up a request to it; it "
            "ends now, because its answers could reach the wrong callers\n"
        )
        os.write(2, line.encode())
        os._exit(1)


def _num_switches(thread: int) -> int:
    """Return how often a thread of this process has yielded the CPU; 0 if the kernel does not count that."""
    try:
        match = _SWITCHES.search(Path(f"/proc/self/task/{thread}/status").read_bytes())
    except OSError:
        return 0
    return int(match[1]) if match else 0
