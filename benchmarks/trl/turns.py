"""Turns of a trainer process, which stays loaded and runs one step whenever the driver (`trainers`) sends "go".

TRL's environment runs this module too, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

GO = "go\n"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ContenderTurns:
    """Reads turns from standard input, reports on the original standard output, and sends all prints to the log."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # even a long step ends if the driver is killed
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._start = 0.0
        self.phases: dict[str, float] = {}

    def begin(self) -> None:
        """Wait for the next turn; exit the process when the driver closes the input."""
        if sys.stdin.readline() != GO:
            os._exit(0)  # skips cleanup, since no output of a measured run is kept
        self.phases = {}
        self._start = time.monotonic()

    def end(self, **measured: Any) -> None:
        """Report the step: its seconds, the seconds of each phase, and the measurements in `measured`."""
        answer = {"seconds": time.monotonic() - self._start, "phases": self.phases, **measured}
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the `with` block to the phase `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - start

    def timed(self, owner: Any, method: str, name: Callable[[], str]) -> None:
        """Wrap `owner.method` so that its time counts as the phase `name()`."""
        original = getattr(owner, method)

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name()):
                return original(*args, **kwargs)

        setattr(owner, method, measured)
