"""Follows a JSONL file that another process is writing.
Given its path; the file may not be there yet, may be replaced, and its last line may be half written.
Returns the objects added since the last call.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class JsonlTail:
    """Reads what was added to a JSONL file since the last call; a line without its end waits for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0

    def read_new(self) -> Iterator[dict[str, Any]]:
        """Yields the new objects, one by one: a run of months has written more than memory should hold.

        A file that was replaced or cut is read from its start again.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            inode = os.fstat(file.fileno()).st_ino
            size = file.seek(0, 2)
            if inode != self._inode or size < self._offset:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if (row := _parsed(line)) is not None:
                    yield row


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The object, or None: a line torn by a crash must not stop a display, and the summary reports it."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
