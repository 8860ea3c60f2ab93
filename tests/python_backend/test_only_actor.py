"""`python_backend.store.run_lock`: two actors in one folder, as processes; the second one says so and ends."""

from __future__ import annotations

import fcntl
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_system import Checkpoints, make_run

import tools.run
from python_backend.store.run_lock import LOCK_FILE, ActorRuns, UnusableFolder, in_progress, only_actor, only_run

HOLD = "import sys\nfrom pathlib import Path\nfrom python_backend.store.run_lock import only_actor\n"
HOLD += "with only_actor(Path(sys.argv[1])):\n    print('works', flush=True)\n    sys.stdin.read()\n"


@pytest.mark.slow
def test_a_second_actor_ends_with_one_sentence(tmp_path: Path, checkpoints: Checkpoints):
    run_dir = tmp_path / "run"
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout.readline() == "works\n"
        actor = f"actor: {{policy: {{checkpoint: {checkpoints.policy}}}, prompts: {{path: {checkpoints.prompts}}}}}\n"
        (tmp_path / "run.yaml").write_text(f"run: {{dir: {run_dir}}}\n{actor}")
        command = [sys.executable, "-m", "actor", "--config", str(tmp_path / "run.yaml")]
        second = subprocess.run(command, capture_output=True, text=True)
        assert second.returncode == 2
        assert second.stderr.splitlines() == [
            f"error: another actor is running in {run_dir} (process {first.pid} on {platform.node()}); stop it first, "
            "or give this one its own folder (run.dir)"
        ]
        first.kill()  # leaves its lock file behind
        first.communicate()
        with only_actor(run_dir), pytest.raises(ActorRuns), only_actor(run_dir):
            pass
    finally:
        first.kill()
        first.communicate()


def test_folders_have_actors_of_their_own(tmp_path: Path):
    with only_actor(tmp_path / "one"), only_actor(tmp_path / "other"):
        pass


def test_a_run_is_in_progress_while_it_or_its_actor_holds_a_lock(tmp_path: Path):
    assert not in_progress(tmp_path / "none")
    with only_run(tmp_path):
        assert in_progress(tmp_path)
        with pytest.raises(ActorRuns, match="another `tools run` is running in"), only_run(tmp_path):
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
    with pytest.raises(UnusableFolder, match=r"run.dir: .*/file/run cannot be used: Not a directory; name another"):
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
