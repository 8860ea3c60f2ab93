"""The server's log: lines for a person, its tail for an error, and failures that Triton does not report."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

FOLLOW_INTERVAL_S = 0.1
BYTES_PER_LINE = 400

_TRITON_LINE = re.compile(r"([IWEF])\d{4} [\d:.]+ \d+ ([\w.]+):\d+\] ?(.*)")
# What a server without a GPU complains of, and what belongs to a table or a traceback.
_NOISE = re.compile(
    r"CudaDriverHelper has not been|CUDA driver version is insufficient|no pinned memory pool"
    r"|DCGM unable to start|Failed to initialize NVML|^Signal \(\d+\) received"
    r"|^[+|]|^At:$|^  \S.*\(\d+\): |^\s*$"
)
_TABLE = re.compile(r"^[+|]|\|$")
_PREFIX = {"I": "", "W": "warning: ", "E": "error: ", "F": "error: "}
_POLL_FAILURE = re.compile(
    r"Error parsing text-format \S+: (.*?)\.?$|Poll failed for model directory [^:]*: (.*)\"", re.MULTILINE
)
# After these lines Triton waits for the model for ever, and says nothing.
_STUB_FAILURES = (
    (
        re.compile(r"Python model file not found in '(.*)'"),
        "{} is missing: render the repository again (`python -m tools render`)",
    ),
    (
        re.compile(r"triton_python_backend_stub: (.*)|(Fatal Python error: .*)"),
        "the python backend's stub cannot start: {}; it must be the one for this Python: reinstall "
        "nvidia-pytriton in this virtual environment",
    ),
)


def follow(path: Path, ended: Callable[[], bool], log: Callable[[str], None]) -> None:
    """Pass on each line that a person wants to see; return when `ended` and the file is read to its end."""
    with path.open("rb") as file:
        pending = b""
        while True:
            last = ended()  # before reading: what is written until then is still read
            if os.fstat(file.fileno()).st_size < file.tell():  # it was set aside and begins anew
                file.seek(0)
            *lines, pending = (pending + file.read()).split(b"\n")
            for text in filter(None, map(readable, lines)):
                log(text)
            if last:
                return
            time.sleep(FOLLOW_INTERVAL_S)


def set_aside_if_large(path: Path, limit_bytes: int) -> None:
    """Begin a log anew that has grown beyond `limit_bytes`; its newest part is kept as `<name>.previous.log`.

    The process that writes goes on with the same open file: it must have it open for appending. What it writes in the
    moment between the copy and the cut is lost. A disk that refuses leaves the log as it is, for the next call.
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


def readable(line: bytes) -> str | None:
    """A line of the log as a person wants it; None for what only the full log needs."""
    text = line.decode("utf-8", "backslashreplace").rstrip()
    if _NOISE.search(text):
        return None
    parts = _TRITON_LINE.match(text)
    if parts is None:
        return f"  | {text}"  # printed by a model or a library
    level, source, message = parts.groups()
    if level == "I" and not source.endswith(".py"):
        return None
    first_line, _, _ = message.strip('"').partition(r"\n")
    return f"  | {_PREFIX[level]}{first_line}"


def tail(path: Path, num_lines: int = 12) -> str:
    """The last lines of the log, tables left out."""
    start = max(0, path.stat().st_size - num_lines * BYTES_PER_LINE)
    with path.open("rb") as file:
        file.seek(start)
        lines = file.read().decode("utf-8", "backslashreplace").splitlines()
    if start:
        del lines[0]  # cut in two
    return "\n".join([line for line in lines if not _TABLE.search(line)][-num_lines:])


def poll_failure(path: Path) -> str:
    """What the log says of a configuration that Triton could not read; empty if nothing."""
    reasons = ["".join(groups) for groups in _POLL_FAILURE.findall(tail(path, 100))]
    return ": ".join(reversed(reasons[-2:]))  # the parser's reason comes before the file's name


def stub_failure(path: Path) -> str | None:
    """A sentence on why a model's process cannot start, and the way out; None if the log shows none."""
    text = tail(path, 100)
    for pattern, sentence in _STUB_FAILURES:
        found = pattern.search(text)
        if found:
            return sentence.format(next(filter(None, found.groups())))
    return None
