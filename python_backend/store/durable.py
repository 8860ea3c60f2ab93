"""Files that survive a crash: written completely or not at all, and on disk when the call returns."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

MOST_PARTS = os.sysconf("SC_IOV_MAX")  # of one call of writev
TEMPORARY_SUFFIX = ".tmp"
INT64_MAX = (1 << 63) - 1
LOCK_POLL_S = 0.005


def sync_directory(folder: Path) -> None:
    """Make renames and links inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes | Iterable[bytes], *, durable: bool = True) -> None:
    """Put `data`, or its parts one after the other, at `path`, replacing what was there in one step."""
    with staged_file(path.parent, [data] if isinstance(data, bytes) else data, durable=durable) as staged:
        staged.replace(path)
    if durable:
        sync_directory(path.parent)


def create_file(path: Path, *parts: bytes | memoryview) -> None:
    """Put `parts` at `path`, one after the other.

    Raises:
        FileExistsError: something is there already (also in a race of two writers).
    """
    with staged_file(path.parent, parts) as staged:
        os.link(staged, path)  # the one call that both publishes and refuses an existing name
    sync_directory(path.parent)


@contextlib.contextmanager
def staged_file(
    folder: Path,
    parts: Iterable[bytes | memoryview],
    *,
    first: Callable[[], bytes] | None = None,
    durable: bool = True,
) -> Iterator[Path]:
    """Write `parts` to a temporary file in `folder`, to be linked or renamed within the block; gone at its end.

    The file is locked (flock) until then: `sweep` removes temporary files that no live process is writing.

    Args:
        first: called when the parts are on the disk; what it returns replaces the first of them, and is as long.
        durable: force the content onto the disk.
    """
    path, descriptor = _locked_temporary(folder)
    try:
        _write_all(descriptor, parts)
        if first is not None:
            os.fsync(descriptor)  # what takes long; the one below has a single block left
            os.lseek(descriptor, 0, os.SEEK_SET)
            _write_all(descriptor, [first()])
        if durable:
            os.fsync(descriptor)
        yield path
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


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


@contextlib.contextmanager
def staged_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder in `parent`, to be filled and renamed within the block; otherwise it is gone at its end."""
    make_folder(parent)
    staging = parent / f".staging-{uuid.uuid4().hex}"
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Put a folder with what `fill` writes at `folder`, replacing what was there: whole and on the disk, or not at all.

    A crash between the two renames leaves the old content under a `.removed-` name.
    """
    aside = folder.with_name(f".removed-{uuid.uuid4().hex}")
    with staged_folder(folder.parent) as staging:
        with disk_errors(folder):
            fill(staging)
        sync_tree(staging)
        if folder.exists():
            folder.rename(aside)
        staging.rename(folder)
        sync_directory(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Delete `folder`: at once out of sight, so that a crash leaves no half of it under its name."""
    aside = folder.with_name(f".removed-{uuid.uuid4().hex}")
    folder.rename(aside)
    sync_directory(folder.parent)
    shutil.rmtree(aside)


def sweep(root: Path) -> None:
    """Delete what a crash left in `root`: folders of unfinished writes and removals. For the only writer of folders.

    Temporary files go as well, unless a live process is writing them.
    """
    for pattern in (".staging-*", ".removed-*"):
        for folder in root.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)
    sweep_files(root)


@contextlib.contextmanager
def exclusive_lock(path: Path, *, patience_s: float) -> Iterator[None]:
    """Hold the lock (flock) of the file `path`, which is made.

    Raises:
        TimeoutError: another process has held it all of `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        errno.EBUSY, f"locked by another process for {patience_s:g} s; is it stopped?", str(path)
                    ) from None
                time.sleep(LOCK_POLL_S)
        yield


def sweep_files(folder: Path) -> None:
    """Delete temporary files that a killed writer left in `folder`; safe beside live writers."""
    for path in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def numbers_in(folder: Path) -> list[int]:
    """The numbers among the names in `folder`, ascending; names that int64 cannot hold, or as `007`, are not ours."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names, not paths
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if is_number(name))


def is_number(text: str) -> bool:
    """Whether `text` is a non-negative int64 as we write it."""
    return re.fullmatch(r"0|[1-9][0-9]{0,18}", text) is not None and int(text) <= INT64_MAX


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
        with staged_file(folder, [b"0" * 4096]):
            return None
    except OSError as error:
        return error


def _locked_temporary(folder: Path) -> tuple[Path, int]:
    """A new file in `folder` and its descriptor, locked by this process."""
    while True:
        path = folder / f".{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:  # otherwise swept before it was locked
                return path, descriptor
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(descriptor)


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
