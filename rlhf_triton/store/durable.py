"""Crash-safe file writes: a file or folder is either complete or absent, and on disk when the call returns."""

import contextlib
import errno
import fcntl
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

TEMPORARY_SUFFIX = ".tmp"
REPLACED = ".replaced-"
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
    """Write `data` (bytes, or parts to concatenate) to `path`, atomically replacing an existing file."""
    with staged_file(path.parent, [data] if isinstance(data, bytes) else data, durable=durable) as staged:
        staged.replace(path)
    if durable:
        sync_directory(path.parent)


def create_file(path: Path, *parts: bytes | memoryview) -> None:
    """Write the concatenated `parts` to `path`, which must not exist.

    Raises:
        FileExistsError: `path` exists, or another writer created it first.
    """
    with staged_file(path.parent, parts) as staged:
        os.link(staged, path)  # unlike rename, link(2) fails if the name exists
    sync_directory(path.parent)


@contextlib.contextmanager
def staged_file(
    folder: Path,
    parts: Iterable[bytes | memoryview],
    *,
    durable: bool = True,
    mode: int = 0o666,
) -> Iterator[Path]:
    """Write `parts` to a temporary file in `folder` and yield its path; the `with` block can link or rename the file.

    The temporary file is deleted when the block ends. Until then it is locked (flock), so that `sweep_files` can
    distinguish a live writer's file from one that a crash left behind.

    Args:
        durable: whether to fsync the content.
        mode: permissions of the file, before the umask.
    """
    path, descriptor = _locked_temporary(folder, mode)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.writelines(parts)
        if durable:
            os.fsync(descriptor)
        yield path
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """fsync a file that other code has written."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_tree(folder: Path) -> None:
    """fsync every file and folder below `folder`, and `folder` itself."""
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync_file(Path(root, name))
        sync_directory(Path(root))


def make_folder(folder: Path) -> None:
    """Create `folder` and its missing parents durably."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_directory(folder.parent)


@contextlib.contextmanager
def staged_folder(parent: Path) -> Iterator[Path]:
    """Yield a new temporary folder in `parent`, which the `with` block fills and renames.

    A folder that the block does not rename is deleted when the block ends.
    """
    make_folder(parent)
    staging = parent / f".staging-{uuid.uuid4().hex}"
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_folder(folder: Path, fill: Callable[[Path], None], *, durable: bool = True) -> None:
    """Fill a temporary folder by calling `fill`, sync it, and rename it to `folder`, replacing an existing folder.

    Without `durable`, the folder is not synced and may be incomplete after a crash of the machine. After a crash
    between the two renames, `sweep` restores the old folder. (Linux can exchange two folders in one call, but NFS
    cannot.)
    """
    with staged_folder(folder.parent) as staging:
        with disk_errors(folder):
            fill(staging)
        for file in staging.rglob("*"):  # safetensors creates files that only their owner may read
            if file.is_file() and not file.is_symlink():  # do not change a link's target
                file.chmod(staging.stat().st_mode & 0o666)  # the permissions that the umask allows
        if durable:
            sync_tree(staging)
        _finish_replacement(folder)
        try:
            if folder.exists():
                folder.rename(_replaced(folder))
            staging.rename(folder)
            sync_directory(folder.parent)
        finally:
            _finish_replacement(folder)


def _replaced(folder: Path) -> Path:
    """Return the name of the old folder while `write_folder` replaces it."""
    return folder.with_name(f"{REPLACED}{folder.name}")


def _finish_replacement(folder: Path) -> None:
    """End a replacement of `folder`: delete the old folder, or rename it back if there is no new one."""
    old = _replaced(folder)
    if folder.exists():
        remove_folder(old)
    elif old.exists():
        old.rename(folder)


def remove_folder(folder: Path) -> None:
    """Delete `folder` if it exists. Renames it first, so that a crash cannot leave a partial folder under its name.

    Files that NFS keeps while processes have them open (`.nfs...`) stay until a later `sweep`.
    """
    for doomed in (_replaced(folder), folder):  # in this order: otherwise `sweep` would restore the replaced folder
        if doomed.exists():
            aside = folder.with_name(f".removed-{uuid.uuid4().hex}")
            doomed.rename(aside)
            sync_directory(folder.parent)
            shutil.rmtree(aside, ignore_errors=True)


def sweep(root: Path) -> None:
    """Finish operations on `root` that a crash interrupted: writes, replacements, removals, temporary files.

    Folders are not locked, so only the process that writes them may call this. Temporary files of live writers are
    locked and kept.
    """
    for old in root.glob(f"{REPLACED}*"):
        _finish_replacement(root / old.name.removeprefix(REPLACED))
    for pattern in (".staging-*", ".removed-*"):
        for folder in root.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)
    sweep_files(root)


def read_if_there(path: Path) -> bytes | None:
    """Return the content of `path`, or None if there is no such file.

    If the file seems to be missing, opens the folder and tries again: otherwise an NFS client may cache the miss for a
    minute.
    """
    try:
        return path.read_bytes() if path.exists() or changed_at(path.parent) else None
    except FileNotFoundError:
        return None


def changed_at(folder: Path) -> int | None:
    """Return the mtime of `folder` in ns, which changes with every new or removed name; None if it does not exist.

    Opens the folder, because otherwise an NFS client may cache its mtime and missing names for a minute.
    """
    try:
        with os.scandir(folder):
            return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def exclusive_lock(path: Path, *, patience_s: float) -> Iterator[None]:
    """Hold an exclusive lock (flock) on the file `path`; create the file if it is missing.

    Raises:
        TimeoutError: another process held the lock for all of `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    with path.open("a") as file:
        while True:  # polls, because a blocking flock has no timeout
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        errno.EBUSY,
                        f"locked by another process for {patience_s:g} s; is that process suspended?",
                        str(path),
                    ) from None
                time.sleep(LOCK_POLL_S)
        yield


def is_locked(path: Path) -> bool:
    """Return whether a process on this host, or on one that shares file locks, holds `exclusive_lock` on `path`."""
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def sweep_files(folder: Path) -> None:
    """Delete temporary files that killed writers left in `folder`; keep the files that live writers have locked."""
    for path in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def numbers_in(folder: Path) -> list[int]:
    """Return the file names in `folder` that pass `is_number`, as ascending integers; other names are ignored."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names, not paths
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if is_number(name))


def is_number(text: str) -> bool:
    """Return whether `text` is a non-negative int64 in canonical form (no sign, no leading zeros)."""
    return re.fullmatch(r"0|[1-9][0-9]{0,18}", text) is not None and int(text) <= INT64_MAX


def write_json(path: Path, value: Mapping[str, Any], *, durable: bool = True) -> None:
    """Write a JSON object to `path`, atomically replacing an existing file."""
    replace_file(path, json.dumps(value).encode(), durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in `path`, or None if there is no such file."""
    data = read_if_there(path)
    return None if data is None else json.loads(data)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert the SafetensorError of a failed write to `path` into the OSError that caused it."""
    try:
        yield
    except SafetensorError as error:
        number = errno_of(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def errno_of(error: BaseException) -> int | None:
    """Return the errno of an error, None if it has none. Errors from Rust contain it only in their text."""
    match = re.search(r"os error (\d+)", str(error))
    return error.errno if isinstance(error, OSError) else int(match[1]) if match else None


def refusal(folder: Path) -> OSError | None:
    """Try to write a 4 KiB temporary file in `folder`; return the error, or None if it succeeded."""
    try:
        with staged_file(folder, [b"0" * 4096]):
            return None
    except OSError as error:
        return error


def _locked_temporary(folder: Path, mode: int) -> tuple[Path, int]:
    """Create a temporary file in `folder`, lock it, and return its path and descriptor."""
    while True:
        path = folder / f".{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:  # 0: another process swept it between open and flock, so try again
                return path, descriptor
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(descriptor)
