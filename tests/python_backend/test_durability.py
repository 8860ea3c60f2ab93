"""What is on the disk when a call returns: files, the folders that name them, and the parents of new folders."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from sidecar_rig import Rig
from test_journal import done, train

from python_backend.store.journal import Journal

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
    assert synced[-1] == rig.checkpoints.root
