"""`trainer.checkpoint`: training resumed is training never interrupted, bit for bit; half a checkpoint is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_critic_update import payload, settings, silent, weights
from tiny_checkpoints import save_tiny

from tests.support.loaders import load_critic
from trainer.checkpoint import CheckpointFolder, CheckpointState
from trainer.critic_update import CriticUpdate


@pytest.fixture
def critic(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "critic", "llama", "critic")
    return tmp_path / "critic"


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def fresh(critic: Path) -> CriticUpdate:
    return CriticUpdate(load_critic(critic), settings(warmup_steps=3))


def state(step: int, update: CriticUpdate | None = None, *, asked: bool = False) -> CheckpointState:
    optimizer_step = update.optimizer_step if update else step
    return CheckpointState(
        "run", step, optimizer_step, step, 1, asked, {"lr": 0.1}, "a fingerprint", "a hash", [{"entry": "x"}]
    )


def optimizer_bits(update: CriticUpdate) -> dict[str, torch.Tensor]:
    states = update.optimizer.state
    return {f"{n}/{key}": states[p][key] for n, p in update.parameters.items() for key in states[p]}


def test_loading_undoes_whatever_was_trained_since(critic: Path, folder: CheckpointFolder):
    update = fresh(critic)
    update.train(payload(), silent)
    place = folder.save(update, state(1, update))
    files = {path.name: path.read_bytes() for path in place.iterdir()}
    before, moments = weights(update), {k: v.clone() for k, v in optimizer_bits(update).items()}
    update.train(payload(seed=1), silent)
    assert not torch.equal(weights(update), before)
    folder.load(1, update)
    assert torch.equal(weights(update), before)
    assert all(torch.equal(value, moments[name]) for name, value in optimizer_bits(update).items())
    update.train(payload(seed=2), silent)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == files  # not written through a mapped file


def test_a_checkpoint_before_the_first_step_has_no_moments(critic: Path, folder: CheckpointFolder):
    update = fresh(critic)
    folder.save(update, state(0, update))
    update.train(payload(), silent)
    folder.load(0, update)
    assert optimizer_bits(update) == {}
    update.train(payload(), silent)
    straight = fresh(critic)
    straight.train(payload(), silent)
    assert torch.equal(weights(update), weights(straight))


def test_an_interrupted_write_is_ignored_and_swept(
    critic: Path, folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
):
    update = fresh(critic)
    folder.save(update, state(1))
    with monkeypatch.context() as patch:
        patch.setattr("python_backend.store.durable.sync_tree", lambda path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            folder.save(update, state(2))
    (folder.root / ".staging-killed").mkdir()  # a kill has no time for `finally`
    (folder.root / "3").mkdir()  # as would be left by hand: no state.json
    assert folder.steps() == [1]
    assert folder.latest() == 1
    folder.prune(keep=1)
    assert sorted(path.name for path in folder.root.iterdir()) == ["1", "3"]


def test_saving_the_same_step_again_never_leaves_it_without_a_checkpoint(
    critic: Path, folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
):
    """The journal has dropped its entries by then, so the checkpoint is all there is."""
    update = fresh(critic)
    folder.save(update, state(1))

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for name in ("rename", "replace"):
            patch.setattr(Path, name, killed)
        with pytest.raises(KeyboardInterrupt):
            folder.save(update, state(1, asked=True))
    assert folder.steps() == [1]
    folder.load(1, fresh(critic))
    folder.save(update, state(1, asked=True))
    assert folder.state(1).asked


def test_a_removal_cut_short_leaves_no_half_checkpoint(
    critic: Path, folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
):
    update = fresh(critic)
    for step in (1, 2, 3):
        folder.save(update, state(step))

    def killed(place: Path, **_: object) -> None:
        (place / "model.safetensors").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("python_backend.store.durable.shutil.rmtree", killed)
    for remove in (lambda: folder.prune(keep=1), lambda: folder.drop_after(2)):
        with pytest.raises(KeyboardInterrupt):
            remove()
        for step in folder.steps():
            folder.load(step, update)


def test_pruning_keeps_what_actors_may_name_and_the_newest(critic: Path, folder: CheckpointFolder):
    update = fresh(critic)
    assert (folder.steps(), folder.latest()) == ([], None)
    for step in range(1, 9):
        folder.save(update, state(step, asked=step in (2, 4, 6)))
    folder.prune(keep=2)
    assert folder.steps() == [4, 6, 8]
    assert folder.latest(at_most=7) == 6
    assert folder.latest(at_most=3) is None
    folder.drop_after(4)
    assert folder.steps() == [4]


@pytest.mark.parametrize("name", ["99999999999999999999", "007", "²"])
def test_a_folder_whose_name_is_no_step_is_left_alone(critic: Path, folder: CheckpointFolder, name: str):
    update = fresh(critic)
    (folder.save(update, state(1)).parent / name).mkdir()
    (folder.root / name / "state.json").write_text("{}")
    assert (folder.steps(), folder.latest()) == ([1], 1)
    folder.prune(keep=1)
    folder.drop_after(0)
    assert [path.name for path in folder.root.iterdir()] == [name]
