"""`python_backend.store.run_lock`: two actors in one folder, as processes; the second one says so and ends."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_system import Checkpoints, make_run

import tools.run
from python_backend.errors import RlhfError
from python_backend.store.run_lock import LOCK_FILE, in_progress, only_actor, only_run


def test_a_folder_has_one_actor(tmp_path: Path):
    one = tmp_path / "one"
    refused = pytest.raises(RlhfError, match=f"another actor is running in {one}")
    with only_actor(one), only_actor(tmp_path / "other"), refused, only_actor(one):
        pass
    with only_actor(one):
        pass


def test_a_run_is_in_progress_while_it_or_its_actor_holds_a_lock(tmp_path: Path):
    assert not in_progress(tmp_path / "none")
    with only_run(tmp_path):
        assert in_progress(tmp_path)
        with pytest.raises(RlhfError, match="another `tools run` is running in"), only_run(tmp_path):
            pass
        with only_actor(tmp_path):
            pass
    assert not in_progress(tmp_path), "the lock files stay"
    with only_actor(tmp_path):
        assert in_progress(tmp_path)
    assert not in_progress(tmp_path)


@pytest.mark.parametrize("lock", [only_run, only_actor])
def test_a_run_in_progress_is_not_moved_by_fresh(
    tmp_path: Path, checkpoints: Checkpoints, lock: Callable[[Path], Any], capsys: pytest.CaptureFixture[str]
):
    run = make_run(tmp_path / "run", checkpoints)
    (run.config.run.dir / "metrics.jsonl").touch()
    with lock(run.config.run.dir):
        assert tools.run.main(["--fresh", "--config", str(run.path)]) == 2
    assert f"is running in {run.config.run.dir} (process {os.getpid()} on" in capsys.readouterr().err
    assert (run.config.run.dir / "metrics.jsonl").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(RlhfError, match=r"run.dir: .*/file/run cannot be used: Not a directory; name another"):
        only_run(tmp_path / "file" / "run").__enter__()


def test_whoever_looks_does_not_keep_an_actor_from_its_lock(tmp_path: Path):
    """`in_progress` holds a shared lock for a moment."""
    with only_actor(tmp_path):
        pass
    with (tmp_path / LOCK_FILE).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        with only_actor(tmp_path):
            pass
