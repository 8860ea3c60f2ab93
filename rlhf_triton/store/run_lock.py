"""Locks on a run's and a server's folder, because two processes in one folder would overwrite each other's files.

A second actor would also rewind the critic while the first one trains it.
"""

import contextlib
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import exclusive_lock, is_locked, refusal

LOCK_FILE = "actor.lock"
RUN_LOCK_FILE = "run.lock"
START_LOCK_FILE = "start.lock"
SERVER_LOCK_FILE = "server.lock"
PATIENCE_S = 1.0  # far longer than `in_progress` holds a shared lock


def only_actor(run_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Hold the actor's exclusive lock on `run_dir`, on all hosts that share file locks. Raises RlhfError if taken."""
    return _hold_lock("actor", run_dir, LOCK_FILE)


def only_run(run_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Hold the exclusive lock of `rlhf-triton run` on `run_dir`. Raises RlhfError if it is taken."""
    return _hold_lock("`rlhf-triton run`", run_dir, RUN_LOCK_FILE)


def only_start(run_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Hold the exclusive lock of a program that starts a run in `run_dir`. Raises RlhfError if it is taken."""
    return _hold_lock("`rlhf_triton.train`", run_dir, START_LOCK_FILE)


def only_server(server_dir: Path, key: str = "server.dir") -> contextlib.AbstractContextManager[None]:
    """Hold the exclusive lock of a tritonserver's folder; `key` is its setting. Raises RlhfError if it is taken."""
    return _hold_lock("server", server_dir, SERVER_LOCK_FILE, key=key)


def make_folder(folder: Path, key: str = "run.dir") -> None:
    """Make the folder that the setting `key` names. Raises RlhfError if that or writing there is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        error = refusal(folder)
    except OSError as cause:
        error = cause
    if error is not None:
        raise RlhfError(f"{key}: {folder} cannot be used: {error.strerror}; choose another folder") from error


def in_progress(run_dir: Path) -> bool:
    """Return whether `rlhf-triton run` or an actor holds its lock on `run_dir`."""
    return any(is_locked(run_dir / name) for name in (RUN_LOCK_FILE, LOCK_FILE))


def write_phase(run_dir: Path, text: str) -> None:
    """Write what this process, which holds the lock of `rlhf-triton run`, is doing."""
    (run_dir / RUN_LOCK_FILE).write_text(f"{_holder()}: {text}")


def read_phase(run_dir: Path) -> str:
    """Return the phase that `write_phase` wrote last; "" if there is none."""
    path = run_dir / RUN_LOCK_FILE
    return path.read_text().partition(": ")[2] if path.is_file() else ""


def run_process(run_dir: Path) -> int | None:
    """Return the process that holds the lock of `rlhf-triton run`; None if there is none on this host."""
    path = run_dir / RUN_LOCK_FILE
    match = re.match(r"process (\d+) on ([^:]*)", path.read_text()) if is_locked(path) else None
    return int(match[1]) if match and match[2] == platform.node() else None


def _holder() -> str:
    return f"process {os.getpid()} on {platform.node()}"


@contextlib.contextmanager
def _hold_lock(holder: str, folder: Path, name: str, *, key: str = "run.dir") -> Iterator[None]:
    path = folder / name
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(exclusive_lock(path, patience_s=PATIENCE_S))
            path.write_text(_holder())
        except TimeoutError:
            raise RlhfError(
                f"another {holder} is running in {folder} ({path.read_text()}); stop it first, or use another folder "
                f"for this one ({key})"
            ) from None
        except OSError as error:
            raise RlhfError(f"{key}: {folder} cannot be used: {error.strerror}; choose another folder") from error
        yield
