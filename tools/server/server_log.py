"""Reads the server's log: readable lines, the tail for an error message, and failures that Triton does not report."""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from rlhf_triton.store.jsonl import NewLines

Log: TypeAlias = Callable[[str], None]
"""Receives the lines that a person reads."""

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

    The writing process keeps its file descriptor, which it must have opened in append mode. Lines that it writes
    between the copy and the truncation are lost. After a disk error, the log is left as it is until the next call.
    """
    with contextlib.suppress(OSError):
        size = path.stat().st_size
        if size <= limit_bytes:
            return
        copy = path.with_suffix(".copy")
        try:
            with path.open("rb") as log, copy.open("wb") as previous:
                log.seek(size - limit_bytes)
                shutil.copyfileobj(log, previous, 1 << 20)
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
        match = pattern.search(text)
        if match:
            return sentence.format(next(filter(None, match.groups())))
    return None
