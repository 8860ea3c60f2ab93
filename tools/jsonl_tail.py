"""Follows a JSONL file that another process is writing.
Given its path; the file may not be there yet, may be replaced, and its last line may be half written.
Returns the objects added since the last call.
"""

import json
import os
from pathlib import Path
from typing import Any


class JsonlTail:
    """Reads what was added to a JSONL file since the last call; a line without its end waits for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0

    def read_new(self) -> list[dict[str, Any]]:
        """Returns the new objects; a file that was replaced or cut is read from its start again."""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                size = file.seek(0, 2)
                if inode != self._inode or size < self._offset:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return []
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [row for line in whole.split(b"\n") if (row := _parsed(line)) is not None]


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The object, or None: a line torn by a crash must not stop a display, and the summary reports it."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
