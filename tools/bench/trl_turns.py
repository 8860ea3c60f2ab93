"""Training steps in turns: two trainers stay loaded, and each takes a step when the driver says "go".

`Turns` is the trainer's end, `Contender` the driver's. TRL's interpreter imports this module too, so it needs nothing
but the standard library; what measures processes is imported where the driver uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

GO = "go\n"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOP_TIMEOUT_S = 20.0


class ContenderFailed(RuntimeError):
    """A trainer ended before the measurement did; the message holds the end of its log."""


class Turns:
    """Waits on standard input for the driver, answers on what was standard output; prints go to the log instead."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a driver that is killed takes a long step with it
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._start = 0.0
        self.phases: dict[str, float] = {}

    def begin(self) -> None:
        """Wait for the next turn; leave the process when the driver has no more of them."""
        if sys.stdin.readline() != GO:
            os._exit(0)  # nothing of a measured run is kept
        self.phases = {}
        self._start = time.monotonic()

    def end(self, **measured: Any) -> None:
        """Report the step: its seconds, those of its phases, and what else was measured."""
        answer = {"seconds": time.monotonic() - self._start, "phases": self.phases, **measured}
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - start

    def timed(self, owner: Any, method: str, name: Callable[[], str]) -> None:
        """Replace `owner.method` by itself, timed as the phase `name()`."""
        original = getattr(owner, method)

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name()):
                return original(*args, **kwargs)

        setattr(owner, method, measured)


class Contender:
    """A trainer in a process of its own, with the processes that serve it."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str], servers: Sequence[int] = ()
    ) -> None:
        """`servers`: ids of processes whose CPU time and memory count as the contender's."""
        self.name, self._log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
                env={**os.environ, **env}, start_new_session=True,
            )  # fmt: skip
        self._pids = [self._process.pid, *servers]

    def steps(self, count: int) -> dict[str, Any]:
        """Take `count` steps: means per step of seconds, CPU seconds and phases; tokens of one step; peak memory."""
        from tools.bench.usage import cpu_seconds, peak_rss_mb

        cpu = cpu_seconds(self._pids)
        answers = [self._step() for _ in range(count)]
        cpu = cpu_seconds(self._pids) - cpu
        phases = {name: sum(a["phases"].get(name, 0.0) for a in answers) / count for name in answers[0]["phases"]}
        return {
            "seconds_per_step": sum(answer["seconds"] for answer in answers) / count,
            "cpu_seconds_per_step": cpu / count, "steps": count, "tokens": answers[-1]["tokens"],
            "peak_rss_mb": peak_rss_mb(self._pids), "phases": phases,
        }  # fmt: skip

    def _step(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(GO)
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-12:])
            raise ContenderFailed(f"{self.name} ended with exit code {self._process.wait()}; {self._log} ends:\n{tail}")
        return dict(json.loads(line))

    def stop(self) -> None:
        """End the process: its input ends, and it leaves; killed if it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
