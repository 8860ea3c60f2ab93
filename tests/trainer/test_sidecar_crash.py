"""`trainer.sidecar` killed at every turn, and rewound: the same bits, and version numbers that only rise."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from sidecar_rig import Killed, Rig, kill_at

from python_backend.store.journal import Journal
from python_backend.store.ownership import Sender
from python_backend.store.weights import WeightsStore
from python_backend.wire.contract import StepConflict
from trainer.checkpoint import CheckpointFolder
from trainer.publish import Publisher

pytest_plugins = ["sidecar_fixtures"]


# ---- killed ----

KILLS = [
    (WeightsStore, "add", "before"),
    (WeightsStore, "add", "after"),
    (Publisher, "verify", "after"),
    (WeightsStore, "set_current", "before"),
    (WeightsStore, "set_current", "after"),
    (WeightsStore, "prune", "before"),
    (WeightsStore, "prune", "after"),
    (Journal, "finish", "before"),
    (Journal, "finish", "after"),
    (CheckpointFolder, "save", "before"),
    (CheckpointFolder, "save", "after"),
    (Journal, "forget_covered", "before"),
    (Journal, "forget_covered", "after"),
    (Journal, "drop", "before"),
]


@pytest.mark.parametrize(("owner", "name", "when"), KILLS, ids=lambda value: getattr(value, "__name__", value))
def test_whatever_is_killed_when_the_bits_and_numbers_are_the_same(
    make: Callable[..., Rig],
    straight: Rig,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    when: str,
):
    rig = make()
    rig.serve()
    save = None
    entries = []
    for step in range(1, 7):
        entries.append(rig.send(step))
        if step == 2:
            save = rig.journal.accept_save(run_id="run")
    rare = owner is CheckpointFolder or name in ("forget_covered", "drop")
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, when, call=1 if rare else 6)
        assert isinstance(rig.start().ended(), Killed)
    rig.start()
    results = [rig.answer(entry) for entry in entries]
    assert save is not None
    assert rig.answer(save).error is None
    assert results == [straight.journal.result(entry) for entry in entries]
    assert [result.weights_version for result in results] == [1, 2, 3, 4, 5, 6]
    assert torch.equal(rig.weights(), straight.weights(6))
    served = rig.instances[0].served
    assert served == sorted(served)
    assert rig.store.current() == rig.store.versions()[-1] == 6
    assert rig.stop() is None
    steps = [
        json.loads(line)["step"] for line in (rig.config.run.dir / "critic_metrics.jsonl").read_text().splitlines()
    ]
    assert len(steps) == len(set(steps))  # a replay is no second update


def test_a_replay_leaves_current_alone_until_it_has_something_new(make: Callable[..., Rig]):
    """Its early versions are pruned: making them again would serve old weights under new numbers."""
    rig = make(publish={"keep": 1})
    rig.serve()
    rig.start().train(1, 2, 3, 4, 5)
    rig.kill()
    assert rig.store.versions() == [0, 5]
    assert rig.start().train(6)[0].weights_version == 6
    assert rig.instances[0].served == [0, 1, 2, 3, 4, 5, 6]


# ---- rewind ----


@pytest.mark.parametrize(
    ("target", "restart"), [(0, False), (0, True), (1, False), (2, True), (3, False), (3, True), (4, False)]
)
def test_a_rewind_serves_the_old_weights_under_a_new_number(rig: Rig, straight: Rig, target: int, restart: bool):
    rig.train(1, 2)
    rig.save()
    rig.train(3, 4)
    if restart:
        rig.stop()
        rig.start()
    if target == 1:  # its entry is covered by a requested checkpoint, and gone
        result = rig.rewind(target)
        assert "cannot be reached" in (result.error or "")
        return
    result = rig.rewind(target)
    version = 4 if target == 4 else 5  # agreeing already needs no new version
    assert (result.weights_version, result.error) == (version, None)
    assert torch.equal(rig.weights(version), straight.weights(target))
    assert rig.store.manifest(version).step == target
    assert rig.journal.last_step() == target
    again = rig.answer(rig.send(target + 1, value=50 + target))  # what follows may be something else
    assert (again.weights_version, again.error) == (version + 1, None)
    assert rig.store.manifest(version + 1).parent == version
    assert rig.instances[0].served == list(range(version + 2))


def test_the_last_of_two_rewinds_to_one_step_owns_the_run(rig: Rig):
    """The second finds the critic at its target; the first was accepted at a later step."""
    rig.train(1, 2, 3)
    for owner in ("old", "new"):
        result = rig.answer(rig.journal.accept_rewind(run_id="run", target=2, sender=Sender(owner, 1)))
        assert (result.error, rig.journal.owners()[0]) == (None, f"{owner}/1")
    with pytest.raises(StepConflict, match="was rewound after this request was sent"):
        rig.journal.accept_save(run_id="run", sender=Sender("old", 1))
    rig.stop()
    assert rig.start().journal.owners() == ["new/1", "old/1"]


@pytest.mark.parametrize(
    ("owner", "name", "when"),
    [
        (Journal, "set_aside_after", "before"),
        (Journal, "set_aside_after", "after"),
        (CheckpointFolder, "drop_after", "after"),
        (WeightsStore, "set_current", "after"),
        (Journal, "drop", "before"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_rewind_that_is_killed_is_done_in_the_end(
    rig: Rig, straight: Rig, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, when: str
):
    rig.train(1)
    rig.save()
    rig.train(2, 3)
    for _ in range(2):  # and once more while it is repeated
        with monkeypatch.context() as patch:
            kill_at(patch, owner, name, when, call=1)
            if rig.error is None:
                entry = rig.journal.accept_rewind(run_id="run", target=1)
            elif rig.journal.result(entry) is not None:
                break
            else:
                rig.start()
            assert isinstance(rig.ended(), Killed)
    if not rig.thread.is_alive():
        rig.start()
    assert rig.answer(entry).error is None
    assert torch.equal(rig.weights(), straight.weights(1))
    assert rig.journal.last_step() == 1
    rig.train(2, 3)
    assert torch.equal(rig.weights(), straight.weights(3))
    served = rig.instances[0].served
    assert served == sorted(set(served))
