"""Ends the model's process if Triton has given up a request because the process did not run for a second.

Each process of a model has a thread of Triton's that wakes up every 0.3 s. If it has not done so for a second of the
wall clock while a request is handed over (the process is stopped or starved, the machine was paused, the clock was
set), server 2.51 fails the request and frees it, without telling the process. When the process runs on, the server
takes each of its replies for that to the next request, and an answer may reach another caller. So the process ends
instead: the supervisor replaces it (tools/server/health.py), and without one, the server answers every request with an
error. (A request that arrives while the process stands still is freed likewise, but then the server itself aborts.)
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

GIVEN_UP_S = 0.9  # just below Triton's second, because the time of a wake-up is known to a tenth of a second
TICK_S = 0.1
STUB = "triton_python_b"  # the first 15 characters of triton_python_backend_stub, of which the kernel keeps no more
WAKE_S = 0.3
SLOWEST_WAKE_S = 0.36  # on a busy machine
HANDED_OVER_S = 0.5  # a request that arrives this soon after a second without wake-ups has waited for its end
SWITCHES_OF_STOP = 2  # when a thread is stopped or frozen, and when it sleeps on
_SWITCHES = re.compile(rb"\nvoluntary_ctxt_switches:\s*(\d+)")


class Pulse:
    """Watches Triton's thread in this process, from a thread of its own once `start` was called."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._is_handing_over = False
        self._triton = self._sleeper = 0  # numbers of Triton's thread, and of one that always sleeps
        self._wakes = self._stops = 0  # how often each has been switched
        self._woke = 0.0  # time of the last wake-up that was seen, rather too early; wall clock, in seconds
        self._looked = 0.0
        self._missed = 0.0  # when a second without wake-ups was last seen
        self._watches = False

    def start(self) -> None:
        """Watch from now on, if this is a process of Triton's and the kernel counts how often its thread wakes up."""
        if Path("/proc/self/comm").read_text().startswith(STUB):
            threading.Thread(target=self._watch, name="pulse", daemon=True).start()

    @contextlib.contextmanager
    def handing_over(self) -> Iterator[None]:
        """Wrap what runs while Triton waits for this process."""
        self.check()
        if self._watches and time.time() - self._missed < HANDED_OVER_S:
            self._end()
        self._is_handing_over = True
        try:
            yield
        finally:
            self.check()
            self._is_handing_over = False

    def check(self) -> None:
        """End the process if Triton has given up the request that is being handed over."""
        now = time.time()
        if not self._watches or 0 <= now - self._looked < TICK_S:
            return
        with self._lock:
            silent_s = self._silent_s(now)
        if silent_s > GIVEN_UP_S:
            self._missed = now
            if self._is_handing_over:
                self._end()

    def _silent_s(self, now: float) -> float:
        """Return the longest time, up to now, for which Triton's thread may not have woken up, in seconds."""
        wakes, stops = _num_switches(self._triton), _num_switches(self._sleeper)
        new = wakes - self._wakes
        real = new - SWITCHES_OF_STOP if stops > self._stops else new
        silent_s = now - self._woke - max(real - 1, 0) * SLOWEST_WAKE_S
        if new:
            is_steady = now - self._looked < (real + 1) * SLOWEST_WAKE_S
            earliest = self._looked + max(real - 1, 0) * WAKE_S
            self._woke = max(earliest, now - WAKE_S / 2) if is_steady else earliest
        self._wakes, self._stops = wakes, stops
        self._looked = now
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
        self._wakes, self._stops = _num_switches(self._triton), _num_switches(self._sleeper)
        self._woke = self._looked = time.time()
        self._watches = self._wakes > before
        while self._watches:
            self.check()
            time.sleep(TICK_S)

    def _end(self) -> None:
        line = (
            f"{self._model}: this process did not run for a second, and the server has given up a request to it: it "
            "ends, because its answers would reach other callers\n"
        )
        os.write(2, line.encode())
        os._exit(1)


def _num_switches(thread: int) -> int:
    """Return how often a thread of this process has given the processor away; 0 if the kernel does not count that."""
    try:
        found = _SWITCHES.search(Path(f"/proc/self/task/{thread}/status").read_bytes())
    except OSError:
        return 0
    return int(found[1]) if found else 0
