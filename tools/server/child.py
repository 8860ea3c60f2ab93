"""A child process of `tools run`: its output in a log file, stopped by a signal, never orphaned."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from python_backend.errors import RlhfError
from python_backend.stop_signal import how_ended
from tools.server.log import set_aside_if_large, tail

# prctl(PR_SET_PDEATHSIG): if the parent is killed outright, the kernel tells the child to stop. A small process does
# it, then becomes the child; Python code between fork and exec (preexec_fn) can deadlock with threads.
_STARTER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
_MESSAGE = re.compile(r"^[\d:]{8} (?:(?:WARNING|ERROR) |INFO (?=resuming ))(.*)", re.MULTILINE)


def start_bound(
    command: Sequence[str], log: IO[bytes], env: Mapping[str, str], *, inherits: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one, in a session of its own: a Ctrl-C in the terminal is ours to pass on.

    Must be called from a thread that lives as long as the child should: the kernel watches the thread. `inherits`:
    further open file descriptors that the child gets.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _STARTER, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=dict(env), start_new_session=True,
        pass_fds=inherits,
    )  # fmt: skip


class ChildDied(RlhfError):
    """A process of the run ended by itself; the message names it, how it ended, and what it said last."""


class Child:
    """One Python module of the run."""

    def __init__(self, name: str, arguments: Sequence[str], log_path: Path, env: Mapping[str, str]) -> None:
        """Start `python -m <arguments>`."""
        self.name = name
        self.log_path = log_path
        self._stopping = False
        self._reported_bytes = 0
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.write_bytes(b"")
        with log_path.open("ab") as log:  # appending: `bound_log` cuts it under the child's hands
            self.process = start_bound([sys.executable, "-u", "-m", *arguments], log, {**os.environ, **env})

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self.process.poll()

    def bound_log(self, limit_mb: int) -> None:
        """Set the log aside if it has grown beyond `limit_mb`."""
        set_aside_if_large(self.log_path, limit_mb << 20)

    def new_messages(self) -> list[str]:
        """Warnings, errors and where it resumes, as logged in whole lines since the last call."""
        with self.log_path.open("rb") as log:
            if log.seek(0, os.SEEK_END) < self._reported_bytes:  # `bound_log` has cut it
                self._reported_bytes = 0
            log.seek(self._reported_bytes)
            text, end, _ = log.read().rpartition(b"\n")
        self._reported_bytes += len(text) + len(end)
        return _MESSAGE.findall(text.decode(errors="replace"))

    def raise_if_failed(self) -> None:
        """Raise ChildDied if it ended with anything but 0."""
        code = self.poll()
        if code not in (None, 0):
            raise ChildDied(self.obituary())

    def obituary(self) -> str:
        """How it ended, and the last lines of its log."""
        how = how_ended(self.process.wait())
        return f"the {self.name} {how}; its log, {self.log_path}, ends with:\n{tail(self.log_path)}"

    def stop(self, signum: int, timeout_s: float, while_waiting: Callable[[], None] = lambda: None) -> int:
        """Ask it to stop, kill it if it does not; returns the exit code."""
        if self.poll() is None and not self._stopping:
            self._stopping = True
            self.process.send_signal(signum)
        waited = 0.0
        while self.poll() is None and waited < timeout_s:
            try:
                self.process.wait(0.2)
            except subprocess.TimeoutExpired:
                waited += 0.2
                while_waiting()
        if self.poll() is None:
            self.process.kill()
        return self.process.wait()
