"""Regions of servers that are gone are removed at the next start: those alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tiny_models import regions, server_processes, tiny_server, write_scoring_model

from tools.server import shared_memory
from tools.server.shared_memory import SHARED_MEMORY, remove_abandoned

# Holds the regions of a server as its owner does; the second process inherits the lock, as tritonserver does.
OWNER = """
import os, subprocess, sys
from pathlib import Path
from tools.server import shared_memory
shared_memory.SHARED_MEMORY = Path(sys.argv[1])
regions = shared_memory.Regions()
lock = regions.lock()
(shared_memory.SHARED_MEMORY / (regions.prefix + "region")).write_text("memory")
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock])
print(child.pid, flush=True)
input()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in folder.iterdir())


def test_regions_stay_as_long_as_any_of_their_processes(folder: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    child = psutil.Process(int(owner.stdout.readline()))
    assert remove_abandoned() == []
    owner.kill()
    owner.communicate()
    (folder / "rlhf-1-aaaaaaaa-region").write_text("no owner file: not provably ours")
    (folder / "rlhf-2-bbbbbbbb-region").symlink_to(folder / "somewhere")
    with contextlib.suppress(psutil.NoSuchProcess):  # its input has ended with its parent
        child.kill()
    psutil.wait_procs([child], timeout=60)
    (prefix,) = remove_abandoned()
    assert prefix.startswith(f"rlhf-{owner.pid}-")
    assert [path.name for path in sorted(folder.iterdir())] == ["rlhf-1-aaaaaaaa-region", "rlhf-2-bbbbbbbb-region"]


SERVE_AND_DIE = """
import os, signal, sys
from pathlib import Path
sys.path.append(sys.argv[2])
from tiny_models import tiny_server
server = tiny_server(Path(sys.argv[1]), log=lambda line: None)
server.start()
server.wait_ready()
os.kill(server.pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_start_removes_what_a_kill_left(tmp_path: Path) -> None:
    write_scoring_model(tmp_path / "repository", "critic")
    command = [sys.executable, "-c", SERVE_AND_DIE, str(tmp_path), str(Path(__file__).parents[1] / "support")]
    killed = subprocess.Popen(command)
    assert killed.wait(60) == -signal.SIGKILL
    stubs = server_processes(killed.pid)  # one may wait for ever for a lock in memory that the server held
    for stub in stubs:
        with contextlib.suppress(psutil.NoSuchProcess):
            stub.kill()
    psutil.wait_procs(stubs, timeout=60)
    assert server_processes(killed.pid) == []
    with tiny_server(tmp_path) as server:  # a server of another test that starts now may be the one that removes them
        server.wait_ready()
        assert regions(os.getpid())
    assert regions(killed.pid) == []
    assert not list(SHARED_MEMORY.glob(f".rlhf-{killed.pid}-*"))
