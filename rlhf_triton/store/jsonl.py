"""Writes, appends to, reads and follows JSONL files.

Readers yield one object at a time, because the files of a run of months do not fit in memory.
"""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_triton.errors import RlhfError, reason_of
from rlhf_triton.store.durable import replace_file


def each_line(path: Path, *, required: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file. Skips a last line that a crash has truncated.

    Args:
        required: raise FileNotFoundError if the file is missing; otherwise a missing file counts as empty.

    Raises:
        ValueError: any other line is not a JSON object; the message names the file and the line.
    """
    if required and not path.is_file():
        raise FileNotFoundError(f"{path} is missing; has the run written it yet?")
    for line, _ in _parsed_lines(path):
        yield line


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a small file as a list; see `each_line`."""
    return list(each_line(path))


def named_lines(path: Path, key: str, fields: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, object) for each non-empty line of a user's file.

    Args:
        key: configuration key of the file, for error messages.
        fields: expected keys of the objects, for error messages only.

    Raises:
        RlhfError: the file is unreadable, or a line is not an object in JSON and UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RlhfError(f"{key}: {path} cannot be read: {reason_of(error)}") from error
    # Not splitlines: JSON strings may contain its other separators.
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()  # raises on lone surrogates, which tokenizers reject
        except (ValueError, RecursionError) as error:
            raise RlhfError(f"{key}: {where} is not JSON in UTF-8: {reason_of(error)}") from error
        if not isinstance(row, dict):
            raise RlhfError(f"{key}: {where} is not an object with {' and '.join(f'`{name}`' for name in fields)}")
        yield where, row


def write_jsonl(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line to `path`, atomically replacing an existing file."""
    replace_file(path, map(_encoded, lines))


def append_jsonl(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Append one JSON object per line: all lines or none, because the next append would continue a partial line.

    Removes an incomplete last line that a machine crash has left. Processes that append to the same file wait for each
    other. Raises OSError if the disk is full.
    """
    data = b"".join(map(_encoded, lines))
    with path.open("a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        start = file.seek(0, os.SEEK_END)
        if start and os.pread(file.fileno(), 1, start - 1) != b"\n":
            start = path.read_bytes().rfind(b"\n") + 1
            file.truncate(start)
        if file.write(data) != len(data):
            file.truncate(start)
            raise OSError(errno.ENOSPC, "no space for all lines", str(path))


def drop_steps_from(first_step: int, path: Path) -> None:
    """Remove the lines with `step` >= `first_step`, which a resumed run writes again. Creates a missing file."""
    replace_file(path, (raw for line, raw in _parsed_lines(path) if line["step"] < first_step))


class NewLines:
    """Follows a file that another process appends to. The file may not exist yet, and may be replaced later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0

    def read(self) -> Iterator[bytes]:
        """Yield the complete lines added since the last call, including their newlines.

        Reads a replaced or truncated file from the start.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            inode = os.fstat(file.fileno()).st_ino
            size = file.seek(0, 2)
            if inode != self._inode or size < self._offset:
                self._inode = inode
                self._offset = 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line

    def read_objects(self) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects among the new lines; skip other lines."""
        for line in self.read():
            with contextlib.suppress(ValueError):
                if isinstance(row := json.loads(line), dict):
                    yield row


def _encoded(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def _parsed_lines(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield each object with its raw line, newline included."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                row = json.loads(raw)
            except ValueError as error:  # truncated, possibly within a UTF-8 character
                if file.read().strip():
                    raise ValueError(f"{path} line {number} is not JSON: {error}") from error
                return
            if not isinstance(row, dict):
                raise ValueError(f"{path} line {number} is not a JSON object: {raw[:60]!r}")
            yield row, raw if raw.endswith(b"\n") else raw + b"\n"
