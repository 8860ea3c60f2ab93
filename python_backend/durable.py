"""Files that survive a crash: written whole or not at all, and on disk when the call returns.
Given: paths and bytes. Returns: nothing; OSError when the disk refuses, with the old content untouched.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def sync_directory(folder: Path) -> None:
    """Make renames and links inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Put `data` at `path`, replacing what was there in one step."""
    temporary = _write_beside(path, data, durable=durable)
    temporary.replace(path)
    if durable:
        sync_directory(path.parent)


def create_file(path: Path, data: bytes) -> None:
    """Put `data` at `path`. Raises FileExistsError if something is there already (also in a race of two writers)."""
    temporary = _write_beside(path, data, durable=True)
    try:
        os.link(temporary, path)  # the one call that both publishes and refuses an existing name
    finally:
        temporary.unlink()
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Force what was written to `path` by others onto the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def remove_folder(folder: Path) -> None:
    """Delete `folder`: at once out of sight, so that a crash leaves no half of it under its name."""
    aside = folder.with_name(f".removed-{uuid.uuid4().hex}")
    folder.rename(aside)
    shutil.rmtree(aside)


def sweep(root: Path) -> None:
    """Delete what a crash left in `root`: folders of unfinished writes and removals. For the only writer."""
    for pattern in (".staging-*", ".removed-*"):
        for folder in root.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)


def write_json(path: Path, value: Mapping[str, Any], *, durable: bool = True) -> None:
    """Replace `path` by a JSON object."""
    replace_file(path, json.dumps(value).encode(), durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object at `path`; None if there is no such file."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def _write_beside(path: Path, data: bytes, *, durable: bool) -> Path:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
