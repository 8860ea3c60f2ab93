"""Files that survive a crash: written whole or not at all, and on disk when the call returns.
Given: paths and bytes. Returns: nothing; OSError when the disk refuses, with the old content untouched.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

MOST_PARTS = os.sysconf("SC_IOV_MAX")  # of one call of writev


def sync_directory(folder: Path) -> None:
    """Make renames and links inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes | Iterable[bytes], *, durable: bool = True) -> None:
    """Put `data`, or its parts one after the other, at `path`, replacing what was there in one step."""
    temporary = _write_beside(path, [data] if isinstance(data, bytes) else data, durable=durable)
    try:
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def create_file(path: Path, *parts: bytes | memoryview, first: Callable[[], bytes] | None = None) -> None:
    """Put `parts` at `path`, one after the other.

    Args:
        first: called when the parts are on the disk; what it returns replaces the first of them, and is as long.

    Raises:
        FileExistsError: something is there already (also in a race of two writers).
    """
    temporary = _write_beside(path, parts, durable=True, first=first)
    try:
        os.link(temporary, path)  # the one call that both publishes and refuses an existing name
    finally:
        temporary.unlink()
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Force what was written to `path` by others onto the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_tree(folder: Path) -> None:
    """Force everything below `folder`, its subfolders included, onto the disk."""
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync_file(Path(root, name))
        sync_directory(Path(root))


def make_folder(folder: Path) -> None:
    """Create `folder` and the parents it lacks, durably."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_directory(folder.parent)


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Put a folder with what `fill` writes at `folder`, replacing what was there: whole and on the disk, or not at all.

    A crash between the two renames leaves the old content under a `.removed-` name.
    """
    make_folder(folder.parent)
    staging, aside = (folder.with_name(f".{name}-{uuid.uuid4().hex}") for name in ("staging", "removed"))
    staging.mkdir()
    try:
        with disk_errors(folder):
            fill(staging)
        sync_tree(staging)
        if folder.exists():
            folder.rename(aside)
        staging.rename(folder)
        sync_directory(folder.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    shutil.rmtree(aside, ignore_errors=True)


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


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise the OSError that safetensors hides in an error of its own while it writes `path`."""
    try:
        yield
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def refusal(folder: Path) -> OSError | None:
    """Why nothing can be written in `folder`; None if something can. Tries it, with a file that is gone afterwards."""
    try:
        _write_beside(folder / "probe", [b"0" * 4096], durable=True).unlink()
    except OSError as error:
        return error
    return None


def _write_beside(
    path: Path, parts: Iterable[bytes | memoryview], *, durable: bool, first: Callable[[], bytes] | None = None
) -> Path:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb", buffering=0) as file:
            _write_all(file.fileno(), parts)
            if first is not None:
                os.fsync(file.fileno())  # what takes long; the one below has a single block left
                file.seek(0)
                _write_all(file.fileno(), [first()])
            if durable:
                os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _write_all(descriptor: int, parts: Iterable[bytes | memoryview]) -> None:
    """Write `parts` at the file's position, many at a time and without copying them into one piece."""
    not_empty = filter(len, parts)
    while left := [memoryview(part).cast("B") for part in itertools.islice(not_empty, MOST_PARTS)]:
        while left:
            written = os.writev(descriptor, left)
            done = 0
            while done < len(left) and written >= len(left[done]):
                written -= len(left[done])
                done += 1
            left = left[done:]
            if written:  # the disk took a part of one
                left[0] = left[0][written:]
