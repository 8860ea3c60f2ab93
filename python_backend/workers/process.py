"""Parent's side of a worker process: start it, see whether it lives, kill it with everything that it has started."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlhf_triton.errors import RlhfError
from rlhf_triton.process import how_ended

# Of the run itself, so that user code inherits them only if its own option names them.
SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN")
START_LIMIT_S = 60.0  # for the interpreter and the imports of the user's code
KILL_LIMIT_S = 10.0  # for the watcher of a worker; programs that fork faster than it kills them could keep it busy


class WorkerDied(RlhfError):
    """The worker process has ended; the message says how."""


class WorkerProcess:
    """A process that runs `python -m MODULE SPEC FD MEMORY_MIB`, and `channel`, the socket to it (see `child.py`)."""

    def __init__(self, module: str, spec: str, *, memory_mib: int, environment: Mapping[str, str]) -> None:
        self.channel, theirs = socket.socketpair()
        self._killed = False
        with theirs:  # closes this process's copy; otherwise the socket would not report the worker's end
            self._process = subprocess.Popen(
                [interpreter(), "-m", module, spec, str(theirs.fileno()), str(memory_mib)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # a process group of its own, for `kill`
            )

    def is_alive(self) -> bool:
        """Return whether it has not ended; its socket may stay open longer, held by a process that it has forked."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process and everything it started, and wait until it has ended."""
        if self._killed:
            return  # another process may have the id now
        self._killed = True
        self.channel.close()  # its watcher kills and reaps everything then
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_LIMIT_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # for the case that the watcher was killed, or hangs
        self._process.wait()

    def obituary(self) -> str:
        """Return how the process ended; waits a second if it has not."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # the socket closes before the exit code is available
            self._process.wait(1.0)
        code = self._process.poll()
        if code is None:
            return "the worker process closed its socket"
        return f"the worker process {how_ended(code if code <= 128 else 128 - code)}"


def inherited_environment(hidden: Iterable[str], own: str | None) -> dict[str, str]:
    """Return this process's environment without `hidden` and `SECRETS`, but with the variable `own`."""
    without = {*hidden, *SECRETS} - {own}
    return {name: value for name, value in os.environ.items() if name not in without}


def interpreter() -> str:
    """Return the path of a Python for child processes.

    In Triton's stub process `sys.executable` may be the stub, or empty.
    """
    if sys.executable and Path(sys.executable).name.startswith("python"):
        return sys.executable
    found = shutil.which("python3")
    if found is None:
        raise RlhfError("child processes need a python3 on PATH, and there is none")
    return found
