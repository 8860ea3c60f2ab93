"""What the sidecar keeps: whatever an actor's checkpoint may need, through every crash, and no more than the bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sidecar_rig import Killed, Rig, kill_at

from python_backend.store.journal import Entry, Journal, Result
from trainer.checkpoint import CheckpointFolder

pytest_plugins = ["sidecar_fixtures"]


def save(rig: Rig, step: int, keep_steps: list[int] | None = None) -> Result:
    return rig.answer(rig.journal.accept_save(run_id="run", step=step, keep_steps=keep_steps))


def trained(rig: Rig) -> list[int]:
    return [entry.step for entry in rig.journal.entries() if entry.kind == "train"]


# ---- which checkpoints ----


def test_exactly_what_the_actor_needs_is_kept_and_the_newest(make: Callable[..., Rig]):
    rig = make(keep_checkpoints=1)
    rig.serve()
    rig.start()
    for step, keep_steps, kept in [(1, [1], [1]), (2, [1, 2], [1, 2]), (3, [1, 2, 3], [1, 2, 3]), (4, [2, 4], [2, 4])]:
        rig.train(step)
        assert save(rig, step, keep_steps).error is None
        assert rig.checkpoints.steps() == kept
    rig.train(5)
    rig.stop()
    assert rig.checkpoints.steps() == [2, 4, 5]  # the newest of all, which was not requested
    rig.start().train(6)
    assert rig.stop() is None
    assert rig.checkpoints.steps() == [2, 4, 6]  # a new process remembers


def test_a_late_repetition_does_not_give_up_what_came_after_it(make: Callable[..., Rig]):
    """A critic_save is repeated after a time-out, when later ones have been done already."""
    rig = make(keep_checkpoints=1)
    rig.serve()
    rig.start()
    for step, keep_steps in [(1, [1]), (2, [1, 2]), (3, [2, 3]), (4, [2, 3, 4])]:
        rig.train(step)
        save(rig, step, keep_steps)
    rig.train(5)
    assert save(rig, 1, [1]).error == "step: 1 cannot be reached: checkpoints are at steps 2, 3, 4"
    assert save(rig, 2, [1, 2]).error is None
    rig.train(6)  # it has come back to where it was
    rig.stop()
    assert rig.checkpoints.steps() == [2, 3, 4, 6]


def test_a_rewind_forgets_what_was_needed_after_it(rig: Rig):
    rig.train(1)
    save(rig, 1, [1])
    rig.train(2, 3)
    save(rig, 3, [1, 3])
    assert rig.rewind(1).error is None
    rig.train(2)
    assert save(rig, 2).error is None  # by a client that does not say: nothing later is "needed" any more
    rig.train(3)
    rig.stop()
    assert rig.checkpoints.steps() == [1, 2, 3]


# ---- the way back ----


@pytest.mark.parametrize("first", [None, 1])
def test_a_critic_save_that_never_arrived_is_made_up_for(make: Callable[..., Rig], straight: Rig, first: int | None):
    """The actor's checkpoint 3 is written and it dies; the sidecar trains 4, checkpoints it, and is stopped."""
    rig = make(checkpoint_every=2)
    rig.serve()
    rig.start()
    for step in (1, 2, 3, 4, 5):
        rig.train(step)
        if step == first:
            save(rig, step, [step])
    rig.stop()
    assert rig.checkpoints.latest() == 5
    rig.start()
    result = rig.rewind(3)
    assert result.error is None
    assert torch.equal(rig.weights(result.weights_version), straight.weights(3))
    assert 3 in rig.checkpoints.steps()  # the actor stands there: it may come back once more
    rig.train(4)
    assert torch.equal(rig.weights(), straight.weights(4))


def test_steps_before_the_newest_save_are_not_kept(rig: Rig):
    rig.train(1, 2, 3)
    save(rig, 2, [2])
    rig.stop()
    assert trained(rig) == [3]


@pytest.mark.parametrize("periodic", [False, True])
def test_a_save_that_comes_after_later_steps_is_done_all_the_same(
    make: Callable[..., Rig], straight: Rig, periodic: bool
):
    rig = make(checkpoint_every=2 if periodic else 100)
    rig.serve()
    rig.start().train(1, 2, 3)
    assert save(rig, 2, [2]) == Result("00000002.save.1", 3)
    assert rig.checkpoints.state(2).asked
    rig.train(4, 5)
    assert torch.equal(rig.weights(), straight.weights(5))
    assert rig.instances[0].served == [0, 1, 2, 3, 4, 5]  # no instance saw the return to the earlier step
    rig.stop()
    assert rig.checkpoints.steps() == [2, 5]
    assert torch.equal(rig.start().weights(rig.rewind(2).weights_version), straight.weights(2))


def test_too_long_a_way_back_is_not_kept(make: Callable[..., Rig]):
    rig = make(checkpoint_every=1, keep_entries=2)
    rig.serve()
    rig.start().train(1)
    save(rig, 1, [1])
    for step, kept in [(2, [2]), (3, [2, 3]), (4, []), (5, [])]:
        rig.train(step)
        rig.stop()
        assert trained(rig) == kept
        rig.start()
    assert rig.rewind(3).error == "rewind_to: 3 cannot be reached: checkpoints are at steps 1, 5"


@pytest.mark.parametrize(
    ("owner", "name", "when"),
    [
        (CheckpointFolder, "save", "after"),
        (CheckpointFolder, "keep_only", "before"),
        (CheckpointFolder, "keep_only", "after"),
        (CheckpointFolder, "prune", "before"),
        (Journal, "forget_covered", "before"),
        (Journal, "finish", "before"),
        (Journal, "drop", "before"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("late", [False, True])
def test_a_save_that_is_killed_is_done_in_the_end(
    rig: Rig, straight: Rig, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, when: str, late: bool
):
    rig.train(1)
    save(rig, 1, [1])
    rig.train(2, 3) if late else rig.train(2)
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, when, call=1)
        entry = rig.journal.accept_save(run_id="run", step=2, keep_steps=[2])
        assert isinstance(rig.ended(), Killed)
    rig.start()
    assert rig.answer(entry).error is None
    rig.train(3, 4)
    rig.stop()
    assert rig.checkpoints.steps() == [2, 4]
    assert torch.equal(rig.weights(), straight.weights(4))
    assert rig.journal.entries() == [Entry(3, 0, "train"), Entry(4, 0, "train")]


# ---- what was set aside ----


def test_only_the_newest_rewinds_are_kept(make: Callable[..., Rig]):
    rig = make(keep_set_aside=2)
    rig.serve()
    rig.start()
    for _ in range(4):
        rig.train(1)
        assert rig.rewind(0).error is None
    assert sorted(path.name for path in (rig.journal.root / "run" / "set_aside").iterdir()) == ["3", "4"]
