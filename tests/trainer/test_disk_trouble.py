"""A full or read-only disk, at every write of the sidecar: nothing is lost, nothing is done twice, it goes on."""

from __future__ import annotations

import errno
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from sidecar_rig import Rig, until
from small_disk import SmallDisk, small_disk

import trainer.patience
from python_backend.config import RunConfig
from python_backend.store.durable import disk_errors, refusal, replace_file
from python_backend.store.journal import Heartbeat, Journal
from python_backend.store.weights import WeightsStore
from trainer.checkpoint import CheckpointFolder
from trainer.patience import Patience, StoppedWaiting
from trainer.progress import SidecarProgress
from trainer.publish import Reload

pytest_plugins = ["sidecar_fixtures"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.patience, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(trainer.patience, "LONGEST_PAUSE_S", 0.05)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 4) as disk:
        yield disk


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "disk error, retrying" in record.getMessage()]


# ---- the disk itself ----


@pytest.mark.parametrize("trouble", ["No space left on device", "Read-only file system"])
def test_a_weights_disk_that_refuses_is_waited_for_and_named(
    make: Callable[..., Rig], straight: Rig, caplog: pytest.LogCaptureFixture, trouble: str
):
    rig = make()
    with small_disk(rig.config.run.weights_dir, 4) as disk:
        try:
            rig.serve()
            rig.start().train(1)
            disk.fill() if "space" in trouble else disk.read_only(True)
            entries = [rig.send(2), rig.send(3), rig.journal.accept_save(run_id="run")]
            until(lambda: bool((rig.journal.heartbeat() or Heartbeat(0, 0, 0, "", 0)).trouble))
            heartbeat = rig.journal.heartbeat()
            assert heartbeat is not None
            assert (heartbeat.step, heartbeat.state) == (2, "publishing step 2")
            assert trouble in str(heartbeat.trouble)
            assert rig.journal.result(entries[0]) is None
            disk.empty() if "space" in trouble else disk.read_only(False)
            results = [rig.answer(entry) for entry in entries]
            assert [(result.weights_version, result.error) for result in results] == [(2, None), (3, None), (3, None)]
            until(lambda: rig.journal.heartbeat().trouble is None)
            assert torch.equal(rig.weights(), straight.weights(3))
            assert rig.store.versions() == [0, 1, 2, 3]
            assert list(disk.folder.glob(".*")) == []  # no half-written version
            assert len(refusals(caplog)) == 1  # not a line for each attempt
        finally:
            rig.close()


def test_a_stop_ends_the_wait_and_the_next_start_goes_on(disk: SmallDisk, checkpoint: Path, straight: Rig):
    rig = Rig(disk.folder / "run", checkpoint)
    try:
        rig.serve()
        rig.start().train(1)
        disk.fill()
        with pytest.raises(OSError, match="No space left on device"):
            rig.send(2)
        error = rig.stop()  # its last checkpoint cannot be written
        assert isinstance(error, StoppedWaiting)
        assert "writing the checkpoint of step 1" in str(error)
        assert "No space left on device" in str(error)
        assert "nothing is lost" in str(error)
        assert list((disk.folder / "run" / "checkpoints" / "critic").glob(".*")) == []
        disk.empty()
        assert rig.start().train(2)[0].weights_version == 2
        assert torch.equal(rig.weights(), straight.weights(2))
    finally:
        rig.close()


def test_a_sidecar_starts_when_the_disk_lets_it(disk: SmallDisk, checkpoint: Path):
    disk.fill()
    rig = Rig(disk.folder / "run", checkpoint)
    try:
        rig.start()
        time.sleep(0.1)
        assert rig.thread is not None
        assert rig.thread.is_alive()
        disk.empty()
        until(lambda: rig.store.current() == 0)
        rig.serve()
        assert rig.train(1)[0].weights_version == 1
    finally:
        rig.close()


def test_a_probe_names_the_refusal_and_leaves_nothing(disk: SmallDisk):
    assert refusal(disk.folder) is None
    assert list(disk.folder.iterdir()) == []
    disk.fill()
    cause = refusal(disk.folder)
    assert cause is not None
    assert cause.errno == errno.ENOSPC
    assert [path.name for path in disk.folder.iterdir()] == ["ballast"]


def test_a_metrics_line_is_written_whole_or_dropped(disk: SmallDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = disk.folder / "critic_metrics.jsonl"
    config = RunConfig.model_validate({"run": {"dir": disk.folder}})
    progress = SidecarProgress(config, Journal(tmp_path / "journal", "run"), epoch=1, stop=threading.Event())
    progress.log_reload(1, Reload(1, "triton"), "save")
    with path.open("ab") as file:  # what is left of its page is too small for the next line
        padding = 4096 - path.stat().st_size - 20
        file.write(b'"' + b"x" * (padding - 3) + b'"\n')
    disk.fill()
    progress.log_reload(2, Reload(2, "triton"), "save")
    assert any(
        "a line of critic_metrics.jsonl could not be written" in record.getMessage() for record in caplog.records
    )
    disk.empty()
    progress.log_reload(3, Reload(3, "triton"), "save")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines if isinstance(line, dict)] == [1, 3]


# ---- every write, refused once after it was done in part ----

WRITES = [
    (WeightsStore, "add", "before"),
    (WeightsStore, "add", "after"),
    (WeightsStore, "set_current", "before"),
    (WeightsStore, "set_current", "after"),
    (WeightsStore, "prune", "before"),
    (WeightsStore, "prune", "after"),
    (Journal, "finish", "before"),
    (Journal, "finish", "after"),
    (Journal, "drop", "before"),
    (CheckpointFolder, "save", "before"),
    (CheckpointFolder, "save", "after"),
    (Journal, "forget_covered", "before"),
    (Journal, "forget_covered", "after"),
    (Journal, "set_aside_after", "after"),
    (CheckpointFolder, "drop_after", "after"),
]


def refuse(patch: pytest.MonkeyPatch, owner: type, name: str, when: str) -> list[str]:
    """Have every second call of `owner.name` refused by the disk, before or after its work; returns the refusals."""
    original, calls, refused = getattr(owner, name), [], []

    def refusing(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) % 2 == 0:
            return original(*args, **kwargs)
        if when == "after":
            original(*args, **kwargs)
        refused.append(name)
        raise OSError(errno.ENOSPC, "No space left on device", name)

    patch.setattr(owner, name, refusing)
    return refused


@pytest.mark.parametrize(("owner", "name", "when"), WRITES, ids=lambda value: getattr(value, "__name__", value))
def test_whatever_is_refused_is_done_once(
    make: Callable[..., Rig], straight: Rig, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, when: str
):
    rig = make(publish={"keep": 100})
    rig.serve()
    refused = refuse(monkeypatch, owner, name, when)
    rig.start().train(1)
    assert rig.save().error is None
    assert [result.weights_version for result in rig.train(2, 3)] == [2, 3]
    assert rig.rewind(1).weights_version == 4
    assert [result.weights_version for result in rig.train(2, 3)] == [5, 6]
    assert refused
    assert torch.equal(rig.weights(), straight.weights(3))
    assert rig.store.versions() == [0, 1, 2, 3, 4, 5, 6]  # no version is there twice
    assert [rig.store.manifest(version).step for version in range(7)] == [0, 1, 2, 3, 1, 2, 3]
    assert rig.instances[0].served == [0, 1, 2, 3, 4, 5, 6]
    metrics = rig.config.run.dir / "critic_metrics.jsonl"
    until(lambda: len(metrics.read_text().splitlines()) >= 5)  # the last line is written after the answer
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2, 3, 2, 3]


def test_a_heartbeat_that_cannot_be_written_ends_nothing(rig: Rig, straight: Rig, monkeypatch: pytest.MonkeyPatch):
    refused = refuse(monkeypatch, Journal, "beat", "before")
    rig.train(1, 2)
    until(lambda: bool(refused))
    assert rig.train(3)[0].weights_version == 3
    assert torch.equal(rig.weights(), straight.weights(3))


# ---- patience ----


def test_it_says_what_it_waits_for_and_when_that_is_over(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    shown: list[tuple[str, str | None]] = []
    timed_out, not_empty = OSError(errno.ETIMEDOUT, "Timed out"), OSError(errno.ENOTEMPTY, "Not empty")  # of NFS
    attempts = iter([OSError(errno.EROFS, "Read-only file system"), timed_out, not_empty, None])

    def action() -> str:
        if error := next(attempts):
            raise error
        return "done"

    patience = Patience(threading.Event(), lambda *item: shown.append(item))
    assert patience.until_done("writing", action) == "done"
    assert shown == [
        ("writing", "[Errno 30] Read-only file system"),
        ("writing", "[Errno 110] Timed out"),
        ("writing", "[Errno 39] Not empty"),
        ("writing", None),
    ]
    assert len(refusals(caplog)) == 1


def test_what_waiting_does_not_cure_is_raised_at_once():
    def action() -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "model.safetensors")

    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        Patience(threading.Event(), lambda *_: None).until_done("reading", action)


def test_safetensors_errors_of_the_disk_are_os_errors(tmp_path: Path):
    with pytest.raises(OSError, match="No space left on device") as caught, disk_errors(tmp_path / "x.safetensors"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "x.safetensors")
    with pytest.raises(SafetensorError, match="header"), disk_errors(tmp_path / "x.safetensors"):
        raise SafetensorError("Error while deserializing header: HeaderTooLarge")


def test_a_replacement_that_fails_leaves_no_file_behind(tmp_path: Path):
    (tmp_path / "there").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path / "there", b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
