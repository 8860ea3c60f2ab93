"""Child processes of `rlhf-triton run`, and their logs. They are stopped by a signal, and end when the parent dies."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeAlias

from rlhf_triton.errors import RlhfError
from rlhf_triton.monitoring.log_lines import as_text, parsed
from rlhf_triton.process import RUN_MODULE, how_ended
from rlhf_triton.store.jsonl import NewLines
from rlhf_triton.tools.server.server_log import tail

WaitCheck: TypeAlias = Callable[[], None]
"""Called repeatedly during a wait; raises an exception to end it."""


# prctl(PR_SET_PDEATHSIG): if the parent is killed, the kernel sends SIGTERM to the child. A small process sets this and
# then execs the child, because Python code between fork and exec (preexec_fn) can deadlock with threads. The parent may
# have died before the prctl, which the check of getppid() catches.
_STARTER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""
LIBRARY_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # OpenMP threads that spin while they wait, the default, made two threads on a shared machine seven times slower
    # than one.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TQDM_DISABLE": "1",  # a progress bar in a log file is noise
}
MAX_PAUSE_S = 60.0
_TEXT_LINE = re.compile(r"[\d:]{8} ([A-Z]+) (.*)")
_RELAYED = ("WARNING", "ERROR", "CRITICAL")
_RELAYED_STARTS = ("resuming ", "ended: ")


def start_bound(
    command: Sequence[str], log: IO[bytes], env: Mapping[str, str], *, inherits: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a process that receives SIGTERM when this process dies; in its own session, where Ctrl-C does not reach it.

    Call it from a thread that lives as long as the child should: the kernel signals the child when that *thread* ends.
    `inherits`: additional file descriptors to pass to the child.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _STARTER, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=dict(env),
        start_new_session=True,
        pass_fds=inherits,
    )


def restart_pause_s(short_lives: int) -> float:
    """Return the pause before the next start of a process: 0 s after at most one short life, then 1, 2, 4 … 60 s."""
    return min(MAX_PAUSE_S, 2.0 ** (short_lives - 2)) if short_lives > 1 else 0.0


class Child:
    """A Python module, or another program, that runs in its own process."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log_path: Path,
        env: Mapping[str, str],
        *,
        command: Sequence[str] = (sys.executable, "-u", RUN_MODULE),
        inherits: Sequence[int] = (),
    ) -> None:
        """Start `<command> <arguments>`, by default `python -m <arguments>`; `inherits` as in `start_bound`.

        An earlier log is kept as `<name>.previous.log`: it may say why an earlier process died.
        """
        self.name = name
        self.log_path = log_path
        self._stopping = False
        self._new_lines = NewLines(log_path)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        if log_path.exists():
            log_path.replace(log_path.with_suffix(".previous.log"))
        with log_path.open("ab") as log:  # append mode: `set_aside_if_large` truncates the file while the child writes
            self.process = start_bound([*command, *arguments], log, {**os.environ, **env}, inherits=inherits)

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self.process.poll()

    def new_messages(self, *more_levels: str) -> list[str]:
        """Return what was logged since the last call: warnings, errors, `_RELAYED_STARTS`, and all of `more_levels`."""
        levels = {*_RELAYED, *more_levels}
        lines = [_level_and_message(line.decode(errors="replace")) for line in self._new_lines.read()]
        return [message for level, message in lines if level in levels or message.startswith(_RELAYED_STARTS)]

    def raise_if_failed(self) -> None:
        """Raise RlhfError if the process ended with an exit code other than 0."""
        code = self.poll()
        if code not in (None, 0):
            raise RlhfError(self.exit_message())

    def exit_message(self) -> str:
        """Return how the process ended, with the last lines of its log."""
        code = self.process.wait()
        why = ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
        lines = map(as_text, tail(self.log_path).splitlines())
        return "\n".join(
            [f"the {self.name} {how_ended(code)}{why}; its log is {self.log_path}", "the log ends with:", *lines]
        )

    def stop(self, signum: int, timeout_s: float, while_waiting: WaitCheck = lambda: None) -> int:
        """Send `signum`, kill the process if it is still running after `timeout_s`, and return its exit code."""
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


def _level_and_message(line: str) -> tuple[str, str]:
    match = _TEXT_LINE.match(line)
    return (match[1], match[2]) if match else parsed(line) or ("", "")
