"""`trainer.sidecar` on damaged files: found, named, made up for where that is possible; never trained on."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from sidecar_rig import Rig, payload

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.store.sealed_folder import verify_folder
from trainer.sidecar import Sidecar

pytest_plugins = ["sidecar_fixtures"]


def flip(path: Path) -> None:
    """Change one byte in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def file_of(rig: Rig, step: int) -> Path:
    return rig.journal.root / "run" / "entries" / f"{step:08d}.train"


# ---- journal entries ----


@pytest.mark.parametrize("damage", [flip, cut])
@pytest.mark.parametrize("then", ["resend", "replay", "rewind"])
def test_a_damaged_entry_is_its_callers_error_alone(
    make: Callable[..., Rig], straight: Rig, damage: Callable[[Path], None], then: str
):
    rig = make()
    rig.serve()
    rig.start().train(1)
    rig.kill()
    entries = [rig.send(2), rig.send(3)]
    damage(file_of(rig, 2))
    lost = file_of(rig, 2).read_bytes()
    rig.start()
    results = [rig.answer(entry) for entry in entries]
    assert "step 2 was not trained; training continues with the next step: " in (results[0].error or "")
    assert f"{file_of(rig, 2)} is damaged" in (results[0].error or "")
    assert [(result.weights_version, result.error) for result in results[1:]] == [(2, None)]
    assert not torch.equal(rig.weights(), straight.weights(3))
    after = rig.weights()
    assert (rig.journal.root / "run" / "set_aside" / "1" / "00000002.train").read_bytes() == lost
    lines = (rig.config.run.dir / "critic_metrics.jsonl").read_text().splitlines()
    failed = [line for line in map(json.loads, lines) if "error" in line]
    assert [(line["step"], line["error"]) for line in failed] == [(2, results[0].error)]
    if then == "resend":
        assert rig.train(2) == results[:1]
    if then == "replay":
        rig.kill()
        rig.start()
        assert rig.train(3) == results[1:]
    if then == "rewind":
        rig.train(4)
        assert rig.rewind(3).error is None
    rig.stop()
    assert torch.equal(rig.weights(rig.store.current()), after)
    assert len(list((rig.journal.root / "run" / "set_aside").iterdir())) == (2 if then == "rewind" else 1)


def test_damage_to_what_was_answered_stops_the_sidecar(rig: Rig, straight: Rig):
    rig.train(1, 2, 3)
    rig.kill()
    intact = file_of(rig, 2).read_bytes()
    flip(file_of(rig, 2))
    error = rig.start().ended()
    assert isinstance(error, CheckpointError)
    assert f"{file_of(rig, 2)} is damaged" in str(error)
    assert "step 2 has already been trained and acknowledged" in str(error)
    assert rig.store.current() == 3
    file_of(rig, 2).write_bytes(intact)
    assert rig.start().train(4)[0].weights_version == 4
    assert torch.equal(rig.weights(), straight.weights(4))


def test_a_rewind_past_damage_is_refused_and_training_goes_on(rig: Rig, straight: Rig):
    rig.train(1)
    rig.save()
    rig.train(2, 3)
    rig.stop()
    flip(file_of(rig, 2))
    rig.start()
    assert "rewind_to: 2 cannot be reached: " in (rig.rewind(2).error or "")
    rig.train(4)
    assert torch.equal(rig.weights(), straight.weights(4))
    assert rig.rewind(1).error is None


def test_a_damaged_save_is_its_callers_error_alone(make: Callable[..., Rig]):
    rig = make()
    rig.serve()
    entry = rig.journal.accept_save(run_id="run", step=0, keep_steps=[0])
    (rig.journal.root / "run" / "entries" / entry.name).write_bytes(b'{"keep_')
    assert "00000000.save.1 is damaged" in (rig.start().answer(entry).error or "")
    assert rig.train(1)[0].error is None


# ---- checkpoints ----


FILES = ["model.safetensors", "optimizer.safetensors", "config.json", "state.json"]


@pytest.mark.parametrize(
    ("name", "damage"), [*product(FILES, [flip]), ("state.json", cut), ("model.safetensors", Path.unlink)]
)
def test_a_damaged_checkpoint_is_made_up_for_from_an_older_one(
    rig: Rig, straight: Rig, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], None]
):
    rig.train(1)
    rig.save()
    rig.train(2, 3)
    rig.stop()
    damage(rig.checkpoints.root / "3" / name)
    rig.start().train(4)
    assert torch.equal(rig.weights(), straight.weights(4))
    assert rig.instances[0].served == [0, 1, 2, 3, 4]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert str(rig.checkpoints.root / "3" / name) in warning
    assert "training is repeated from step 1" in warning
    rig.stop()
    assert rig.checkpoints.steps() == [1, 4]
    assert (rig.checkpoints.root / "damaged-3").is_dir()


def test_damage_that_cannot_be_made_up_for_ends_the_sidecar(rig: Rig):
    rig.train(1, 2)
    rig.save()
    rig.stop()
    flip(rig.checkpoints.root / "2" / "optimizer.safetensors")
    error = rig.start().ended()
    assert isinstance(error, CheckpointError)
    assert "2/optimizer.safetensors is damaged" in str(error)
    assert "from step 0, because the journal no longer has step 1: restore the file" in str(error)
    assert rig.checkpoints.steps() == [2]  # left where it is, for whoever repairs it


def test_two_damaged_checkpoints(make: Callable[..., Rig], straight: Rig):
    rig = make(keep_set_aside=1)
    rig.serve()
    rig.start().train(1)
    rig.save()
    rig.train(2)
    rig.stop()
    shutil.copytree(rig.checkpoints.root / "2", rig.config.run.dir / "kept")  # a new one takes its place
    rig.start().train(3)
    rig.stop()
    (rig.config.run.dir / "kept").rename(rig.checkpoints.root / "2")
    for step in (2, 3):
        flip(rig.checkpoints.root / str(step) / "model.safetensors")
    rig.start().train(4)
    assert torch.equal(rig.weights(), straight.weights(4))
    rig.stop()
    assert rig.checkpoints.steps() == [1, 4]
    assert len(list(rig.checkpoints.root.glob("damaged-*"))) == 1  # as many as set


def test_a_folder_that_is_no_checkpoint_is_no_obstacle(make: Callable[..., Rig], straight: Rig):
    """Such as one whose state.json somebody deleted: the step gets a new one."""
    rig = make(checkpoint_every=2)
    rig.serve()
    (rig.checkpoints.root / "2").mkdir(parents=True)
    (rig.checkpoints.root / "2" / "model.safetensors").write_bytes(b"what is this")
    rig.start().train(1, 2, 3)
    assert verify_folder(rig.checkpoints.root / "2")["step"] == 2
    assert (rig.checkpoints.root / "damaged-2" / "model.safetensors").is_file()
    assert torch.equal(rig.weights(), straight.weights(3))


# ---- what a checkpoint must agree with ----


def test_other_settings_are_named_and_used(make: Callable[..., Rig], caplog: pytest.LogCaptureFixture):
    rig = make()
    rig.serve()
    rig.start().train(1)
    rig.stop()
    other = make(lr=2e-2, token_budget=99, keep_checkpoints=7)
    other.start().train(2)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == (
        "the critic was trained up to step 1 under other settings (trainer.optimizer.lr: was 0.01, now 0.02; "
        "trainer.token_budget: was 4096, now 99 (rounding only)); the new ones apply from here on"
    )
    other.stop()
    assert other.checkpoints.state(2).settings["optimizer.lr"] == 2e-2
    caplog.clear()
    other.start().train(3)
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_another_version_0_is_an_error(rig: Rig):
    rig.train(1)
    rig.stop()
    path = rig.store.folder(0) / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "sha256": "0" * 64}))
    error = rig.start().ended()
    assert isinstance(error, CheckpointError)
    assert "was trained from a version 0 with sha256 " + manifest["sha256"][:12] in str(error)


def test_another_runs_checkpoints_are_an_error(rig: Rig):
    rig.train(1)
    rig.stop()
    run = rig.config.run.model_copy(update={"run_id": "other"})
    rig.config = rig.config.model_copy(update={"run": run})
    error = rig.start().ended()
    assert isinstance(error, CheckpointError)
    assert "run.run_id: 'other', but the checkpoint of step 1 belongs to run 'run'" in str(error)


def test_the_random_state_is_the_same_wherever_training_resumes(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
):
    """Nothing draws from it today; a critic with dropout would."""
    drawn: list[float] = []
    original = Sidecar.train

    def drawing(self: Sidecar, entry: object) -> None:
        drawn.append(float(torch.rand(())))
        original(self, entry)

    monkeypatch.setattr(Sidecar, "train", drawing)
    rig = make()
    rig.serve()
    rig.start().train(1, 2, 3)
    rig.stop()
    whole, drawn[:] = list(drawn), []
    other = make("other")
    other.serve()
    other.start().train(1)
    other.stop()
    torch.manual_seed(99)
    other.start().train(2, 3)
    assert drawn == whole
    assert len(set(whole)) == 3
    assert payload(1).digest() == other.journal.result(other.send(1)).digest
