"""Child processes of `rlhf-triton run`, and their logs. They are stopped by a signal, and end when the parent dies."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeAlias

from rlhf_triton.errors import RlhfError
from rlhf_triton.monitoring.log_lines import as_text, parsed
from rlhf_triton.process import how_ended
from rlhf_triton.store.jsonl import NewLines

Log: TypeAlias = Callable[[str], None]
"""Receives the lines that a person reads."""
Check: TypeAlias = Callable[[], None]
"""Called repeatedly during a wait; raises an exception to end it."""

# Reads the server's log: readable lines, the tail for an error message, and failures that Triton does not report.

FOLLOW_INTERVAL_S = 0.1
BYTES_PER_LINE = 400
LOG_LIMIT_BYTES = 64 << 20  # per process: weeks of messages, but small compared with its checkpoints

_TRITON_LINE = re.compile(r"([IWEF])\d{4} [\d:.]+ \d+ ([\w.]+):\d+\] ?(.*)")
# Warnings of a server without a GPU, and lines of tables and tracebacks.
_NOISE = re.compile(
    r"CudaDriverHelper has not been|CUDA driver version is insufficient|no pinned memory pool"
    r"|DCGM unable to start|Failed to initialize NVML|^Signal \(\d+\) received"
    r"|^[+|]|^At:$|^  \S.*\(\d+\): |^\s*$"
    r"|\[OTLP HTTP Client\]"  # a collector that is away; the actor and the sidecar warn of it once
)
# Of each model that does not load, several; `load_and_probe` and the health check load it again, and report why.
_LOAD_ERRORS = re.compile(r"Failed to create instance|failed to load (all models|')")
_TABLE = re.compile(r"^[+|]|\|$")
_PREFIX = {"I": "", "W": "warning: ", "E": "error: ", "F": "error: "}
_POLL_FAILURE = re.compile(
    r"Error parsing text-format \S+: (.*?)\.?$|Poll failed for model directory [^:]*: (.*)\"", re.MULTILINE
)
# After these lines Triton waits for the model indefinitely, and reports nothing.
_STUB_FAILURES = (
    (
        re.compile(r"Python model file not found in '(.*)'"),
        "{} is missing: render the repository again with tools/render_configs.py",
    ),
    (
        re.compile(r"triton_python_backend_stub: (.*)|(Fatal Python error: .*)"),
        "the python backend's stub cannot start: {}; it must match this Python version: reinstall "
        "nvidia-pytriton in this virtual environment",
    ),
)


def relay_lines(path: Path, ended: Callable[[], bool], log: Log) -> None:
    """Pass each readable line of the file to `log`; return once `ended()` is true and the whole file has been read."""
    lines = NewLines(path)
    while True:
        last = ended()  # before reading, so that nothing written up to the end is missed
        for text in filter(None, map(readable, lines.read())):
            log(text)
        if last:
            return
        time.sleep(FOLLOW_INTERVAL_S)


def set_aside_if_large(path: Path, limit_bytes: int = LOG_LIMIT_BYTES) -> None:
    """Rotate a log larger than `limit_bytes`: keep its newest part as `<name>.previous.log` and truncate the file.

    The writing process keeps its file descriptor, which it must have opened in append mode. What it writes between the
    copy and the truncation is lost. After a disk error, the log is left as it is until the next call.
    """
    with contextlib.suppress(OSError):
        size = path.stat().st_size
        if size <= limit_bytes:
            return
        copy = path.with_suffix(".copy")
        try:
            with path.open("rb") as log, copy.open("wb") as kept:
                log.seek(size - limit_bytes)
                shutil.copyfileobj(log, kept, 1 << 20)
            copy.replace(path.with_suffix(".previous.log"))
        finally:
            copy.unlink(missing_ok=True)
        os.truncate(path, 0)


def is_noise(line: str) -> bool:
    """Return whether a line of the server's log needs no attention."""
    return _NOISE.search(line) is not None


def readable(line: bytes) -> str | None:
    """Return a line of the log in readable form; None if only the full log should contain it."""
    text = line.decode("utf-8", "backslashreplace").rstrip()
    if is_noise(text):
        return None
    parts = _TRITON_LINE.match(text)
    if parts is None:
        return f"  | {text}"  # printed by a model or a library
    level, source, message = parts.groups()
    if (level == "I" and not source.endswith(".py")) or _LOAD_ERRORS.search(message):
        return None
    first_line, _, _ = message.strip('"').partition(r"\n")
    return f"  | {_PREFIX[level]}{first_line}"


def tail(path: Path, num_lines: int = 12) -> str:
    """Return the last `num_lines` lines of the log that are not part of a table."""
    lines = last_lines(path, num_lines * BYTES_PER_LINE)
    return "\n".join([line for line in lines if not _TABLE.search(line)][-num_lines:])


def last_lines(path: Path, num_bytes: int) -> list[str]:
    """Return the complete lines in the last `num_bytes` of a file, invalid UTF-8 escaped; [] if there is no file."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - num_bytes)
        file.seek(start)
        lines = file.read().decode("utf-8", "backslashreplace").splitlines()
    return lines[1:] if start else lines


def error_in(path: Path) -> str | None:
    """Return the error that a command reported last in its output; None if it reported none."""
    text = "\n" + path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return text.rpartition("\nerror: ")[2].strip() if "\nerror: " in text else None


def poll_failure(path: Path) -> str:
    """Return the reason in the log why Triton could not read a model's configuration; "" if there is none."""
    reasons = ["".join(groups) for groups in _POLL_FAILURE.findall(tail(path, 100))]
    return ": ".join(reversed(reasons[-2:]))  # the parser's reason comes before the file's name


def stub_failure(path: Path) -> str | None:
    """Return why a model's process cannot start and what to do about it; None if the log shows no such failure."""
    text = tail(path, 100)
    for pattern, sentence in _STUB_FAILURES:
        found = pattern.search(text)
        if found:
            return sentence.format(next(filter(None, found.groups())))
    return None


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
LONGEST_PAUSE_S = 60.0
_TEXT_LINE = re.compile(r"[\d:]{8} ([A-Z]+) (.*)")
_RELAYED = ("WARNING", "ERROR", "CRITICAL")


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
    return min(LONGEST_PAUSE_S, 2.0 ** (short_lives - 2)) if short_lives > 1 else 0.0


class Child:
    """A Python module, or another program, that runs in its own process."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log_path: Path,
        env: Mapping[str, str],
        *,
        command: Sequence[str] = (sys.executable, "-u", "-m"),
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

    def new_messages(self) -> list[str]:
        """Return the warnings, errors and "resuming ..." messages that were logged since the last call."""
        lines = [_level_and_message(line.decode(errors="replace")) for line in self._new_lines.read()]
        return [message for level, message in lines if level in _RELAYED or message.startswith("resuming ")]

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

    def stop(self, signum: int, timeout_s: float, while_waiting: Check = lambda: None) -> int:
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
    found = _TEXT_LINE.match(line)
    return (found[1], found[2]) if found else parsed(line) or ("", "")
