"""What is on the disk when a call returns, or after a kill: files, folders, and the parents of new folders."""

from __future__ import annotations

import errno
import io
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sidecar_rig import Rig
from test_journal import done, train

from python_backend.store.durable import remove_folder, sweep, write_folder
from python_backend.store.journal import Entry, Heartbeat, Journal, Result
from python_backend.store.jsonl import append_jsonl, read_jsonl
from python_backend.store.weights import WeightsStore

pytest_plugins = ["sidecar_fixtures"]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal", "run")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every path that was forced onto the disk, in order."""
    paths, fsync = [], os.fsync

    def record(descriptor: int) -> None:
        paths.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return paths


def test_the_folders_of_a_first_step_are_durable(journal: Journal, synced: list[Path]):
    train(journal, 1)
    folder = journal.root / "run" / "entries"
    assert {folder, folder.parent, journal.root, journal.root.parent} <= set(synced)


def test_what_was_set_aside_stays_aside(journal: Journal, synced: list[Path]):
    for step in (1, 2):
        done(journal, train(journal, step))
    rewind = journal.accept_rewind(run_id=None, target=1)
    synced.clear()
    journal.set_aside_after(rewind)
    run = journal.root / "run"
    assert {run / "entries", run / "results", run / "set_aside" / "1", run / "set_aside", run} <= set(synced)


def test_a_damaged_entry_is_kept_before_it_is_emptied(journal: Journal, synced: list[Path]):
    entry = train(journal, 1)
    synced.clear()
    journal.set_aside_damaged(entry)
    aside = journal.root / "run" / "set_aside" / "1"
    assert [path for path in synced if path.is_relative_to(aside)] == [aside / entry.name, aside]


def staged(synced: list[Path], root: Path) -> list[Path]:
    """Folders below `root` that were forced onto the disk before they got their name."""
    return [path for path in synced if path.parent == root and path.name.startswith(".staging-")]


def test_a_checkpoint_is_on_the_disk_with_the_names_of_its_files(rig: Rig, synced: list[Path]):
    rig.train(1)
    rig.save()
    assert len(staged(synced, rig.checkpoints.root)) == 1
    assert {rig.checkpoints.root, rig.checkpoints.root.parent, rig.config.run.dir} <= set(synced)


def test_a_version_is_on_the_disk_with_its_store(make: Callable[..., Rig], synced: list[Path]):
    rig = make()
    rig.serve()
    rig.start().train(1)
    assert len(staged(synced, rig.store.root)) == 2
    assert {rig.store.root, rig.store.root.parent, rig.config.run.dir} <= set(synced)


def test_a_checkpoint_that_a_rewind_took_out_does_not_come_back(rig: Rig, synced: list[Path]):
    rig.train(1, 2)
    rig.save()
    synced.clear()
    rig.checkpoints.drop_after(1)
    here = [folder for folder in synced if folder.is_relative_to(rig.checkpoints.root)]  # the sidecar writes elsewhere
    assert here[-1] == rig.checkpoints.root


# ---- a folder that replaces another ----

KILL_EVERYWHERE = """
import os, sys
from pathlib import Path
from python_backend.store.durable import sweep, write_folder

class Killed:
    def __init__(self, last): self.left = last
    def __call__(self, event, _):
        if event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree") or event == "open":
            self.left -= 1
            if self.left < 0: os._exit(9)

def fill(value): return lambda folder: (folder / "file").write_text(value)

code, point = 9, 0
while code:
    root = Path(sys.argv[1]) / str(point)
    write_folder(root / "best", fill("old"))
    if not (child := os.fork()):
        sys.addaudithook(Killed(point))
        write_folder(root / "best", fill("new"))
        os._exit(0)
    code, point = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), point + 1
    sweep(root)
    print((root / "best" / "file").read_text() if (root / "best").exists() else "lost", *sorted(os.listdir(root)))
"""


def test_a_folder_is_the_old_or_the_new_one_wherever_its_writer_is_killed(tmp_path: Path):
    run = subprocess.run([sys.executable, "-c", KILL_EVERYWHERE, tmp_path], capture_output=True, text=True, check=True)
    found = run.stdout.splitlines()
    assert {"old best", "new best"} == set(found)
    assert found == sorted(found, reverse=True), "once it is the new one, it stays the new one"


def filled(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "file").write_text(text) and None


@pytest.mark.parametrize("refused", [1, 2])
def test_a_rename_that_fails_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int):
    write_folder(tmp_path / "best", filled("old"))
    calls, rename = [], Path.rename

    def failing(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == refused:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Input/output error"):
        write_folder(tmp_path / "best", filled("new"))
    assert [(path.name, (path / "file").read_text()) for path in tmp_path.iterdir()] == [("best", "old")]


def test_a_removed_folder_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The content that a killed writer had replaced already must not stand in for a folder removed later."""
    write_folder(tmp_path / "10", filled("old"))
    with monkeypatch.context() as patch:
        patch.setattr("python_backend.store.durable.remove_folder", lambda folder: None)  # killed before the removal
        write_folder(tmp_path / "10", filled("new"))
    remove_folder(tmp_path / "10")
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_that_nfs_keeps_for_their_readers_fail_no_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A client replaces a deleted file that is open or mapped by `.nfs...`, so that its folder cannot be removed."""
    write_folder(tmp_path / "1", filled("mapped"))
    with monkeypatch.context() as patch:

        def rmdir(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")

        patch.setattr(os, "rmdir", rmdir)
        remove_folder(tmp_path / "1")
    assert not (tmp_path / "1").exists()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- a file that another process appends to ----


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', "\0" * 40, '{"step": 2}'], ids=["cut", "zeros", "no newline"])
def test_a_line_after_a_torn_one_is_a_line_of_its_own(tmp_path: Path, torn: str):
    path = tmp_path / "critic_metrics.jsonl"
    append_jsonl(path, [{"step": 1}])
    with path.open("a") as file:
        file.write(torn)
    append_jsonl(path, [{"step": 3}])
    append_jsonl(path, [{"step": 4}])
    assert [line["step"] for line in read_jsonl(path)] == [1, 3, 4]
    path.write_text(torn)  # the first line
    append_jsonl(path, [{"step": 3}])
    assert read_jsonl(path) == [{"step": 3}]


# ---- a folder of another host ----


class NfsClient:
    """A host that remembers missing names, and the attributes of folders, until it opens the folder, as NFS allows."""

    def __init__(self) -> None:
        self._known: dict[Path, os.stat_result | None] = {}

    def __call__(self, look: Callable[[], Any]) -> Any:
        """Return what `look` finds on this host."""
        status = os.stat

        def remembered(path: Any, **more: Any) -> os.stat_result:
            if Path(path) not in self._known:
                self._known[Path(path)] = None  # unless it is found
                self._known[Path(path)] = status(path, **more)
            found = self._known[Path(path)]
            if found is None:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            return found

        def opening(real: Callable[..., Any]) -> Callable[..., Any]:
            def opened(path: Any, *arguments: Any, **more: Any) -> Any:
                if stat.S_ISDIR(remembered(path).st_mode):
                    inside = [name for name in self._known if Path(path) in (name, name.parent)]
                    for name in inside:
                        del self._known[name]
                return real(path, *arguments, **more)

            return opened

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "stat", remembered)
            for module, name in ((os, "open"), (os, "listdir"), (os, "scandir"), (io, "open")):
                patch.setattr(module, name, opening(getattr(module, name)))
            return look()


def test_a_host_that_remembers_folders_sees_what_another_one_writes(journal: Journal, tmp_path: Path):
    server, sidecar, store = NfsClient(), NfsClient(), WeightsStore(tmp_path / "store")
    store.root.mkdir()
    with journal.lock():
        assert server(journal.heartbeat) is server(store.announced) is None
        entry = train(journal, 1)
        os.utime(journal.root / "run" / "entries", (1, 1))
        before = sidecar(journal.changed_at)
        assert server(lambda: journal.result(entry)) is None
        train(journal, 2)
        assert sidecar(journal.changed_at) not in (None, before)
        done(journal, entry)
        assert server(lambda: journal.result(entry)) == Result(entry.name, 1, digest=journal.load(entry)[1])
        journal.beat(Heartbeat(1, 1, 0, "idle", 0.0))
        store.announce(3)
        assert (server(journal.heartbeat), server(store.announced)) == (Heartbeat(1, 1, 0, "idle", 0.0), 3)
        journal.set_aside_after(journal.accept_rewind(run_id=None, target=0))
        assert "removed by a rewind" in str(server(lambda: journal.result(Entry(2, 0, "train"))).error)
