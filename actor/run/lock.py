"""Lock on the run's folder: a second actor would rewind the critic under the first and mix their checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from python_backend.errors import RlhfError

LOCK_FILE = "actor.lock"


class ActorRuns(RlhfError):
    """Another actor holds the lock of the folder."""


@contextlib.contextmanager
def only_actor(run_dir: Path) -> Iterator[None]:
    """Hold the actor's exclusive lock on `run_dir`, across all hosts that share file locks. Raises ActorRuns."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ActorRuns(
                f"another actor is running in {run_dir}; stop it first, or give this one its own folder (run.dir)"
            ) from None
        yield
