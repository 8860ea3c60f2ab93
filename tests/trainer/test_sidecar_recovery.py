"""`trainer.sidecar` recovering: a heartbeat while it loads, results that were lost, refused rewinds requested again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sidecar_rig import PATIENCE_S, Rig, until

import trainer.publish
from python_backend.store import weights
from python_backend.store.journal import Journal
from python_backend.store.weights import WeightsStore
from trainer.checkpoint import CheckpointFolder
from trainer.publish import Publisher

pytest_plugins = ["sidecar_fixtures"]


# ---- the heartbeat ----


def watch(rig: Rig, patch: pytest.MonkeyPatch, owner: type, name: str) -> list[bool]:
    """Make each call of `owner.name` last until a heartbeat has come, or PATIENCE_S; whether one came, call by call."""
    original, seen = getattr(owner, name), []

    def slow(*args: Any, **kwargs: Any) -> Any:
        before, give_up_at = rig.journal.heartbeat(), time.monotonic() + PATIENCE_S
        while rig.journal.heartbeat() == before and time.monotonic() < give_up_at:
            time.sleep(0.01)
        seen.append(rig.journal.heartbeat() != before)
        return original(*args, **kwargs)

    patch.setattr(owner, name, slow)
    return seen


@pytest.mark.parametrize(
    ("then", "owner", "name"),
    [
        ("start", CheckpointFolder, "load"),
        ("start", Journal, "load"),
        ("start", Journal, "restore_results"),
        ("rewind", CheckpointFolder, "load"),
        ("rewind", Journal, "load"),
        ("save", CheckpointFolder, "keep_only"),
    ],
)
def test_a_sidecar_that_loads_or_prunes_shows_that_it_lives(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, then: str, owner: type, name: str
):
    rig.train(1)
    rig.save()
    rig.train(2, 3)
    if then == "start":
        rig.kill()
    with monkeypatch.context() as patch:
        seen = watch(rig, patch, owner, name)
        if then == "start":
            result = rig.start().train(4)[0]
        elif then == "rewind":
            result = rig.rewind(2)
        else:
            result = rig.answer(rig.journal.accept_save(run_id="run", step=3, keep_steps=[1, 3]))
    assert result.error is None
    assert seen
    assert all(seen)


def test_an_idle_sidecar_that_reloads_the_critic_shows_that_it_lives(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """A large critic takes longer to load than `trainer.heartbeat_timeout_s`."""
    rig.train(1)
    (record,) = rig.store.serving()
    monkeypatch.setattr(trainer.publish, "HEAL_AFTER_S", 0.0)
    monkeypatch.setattr(Publisher, "_load", lambda self: [])
    with monkeypatch.context() as patch:
        seen = watch(rig, patch, Publisher, "_outcomes")
        patch.setattr(type(rig.store.records), "died", lambda self: [record])
        until(lambda: bool(seen), timeout_s=PATIENCE_S + 5.0)
    assert all(seen)


def test_callers_are_told_that_no_server_takes_a_version_up(make: Callable[..., Rig]):
    """Such as one whose load hangs: the wait goes on, and those who wait know for what."""
    rig = make(serve_timeout_s=0.1).start()
    entry = rig.send(1)
    until(lambda: "critic: the server on 127.0.0.1:1 cannot be reached" in str(rig.journal.heartbeat()))
    assert rig.journal.result(entry) is None
    heartbeat = rig.journal.heartbeat()
    assert heartbeat is None or heartbeat.state == "waiting until version 1 is served"
    rig.serve()
    assert rig.answer(entry).weights_version == 1


def test_callers_are_told_that_a_stopped_rollback_is_in_the_way(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """`tools weights rollback`, stopped by Ctrl-Z in the middle of writing."""
    monkeypatch.setattr(weights, "WRITER_PATIENCE_S", 0.05, raising=False)
    rig.train(1)
    with WeightsStore(rig.store.root)._writing():
        entry = rig.send(2)
        until(lambda: "WRITER" in str(rig.journal.heartbeat()))
        assert rig.journal.result(entry) is None
    assert rig.answer(entry).weights_version == 2


# ---- lost results ----


def test_results_that_were_lost_come_back_from_the_checkpoint(rig: Rig, straight: Rig):
    before = rig.train(1, 2, 3)
    rig.save()
    rig.stop()
    shutil.rmtree(rig.journal.root / "run" / "results")
    rig.start()
    until(lambda: rig.journal.last_step() == 3)
    assert rig.train(4)[0].weights_version == 4  # and not: "send step 1 first"
    assert rig.train(1, 2, 3) == before
    assert torch.equal(rig.weights(), straight.weights(4))


@pytest.mark.parametrize("when", ["while it runs", "while it is away"])
@pytest.mark.parametrize("same", [True, False])
def test_a_step_accepted_while_results_were_lost_is_answered(rig: Rig, straight: Rig, when: str, same: bool):
    before = rig.train(1, 2)
    rig.save()
    if when == "while it is away":
        rig.stop()
    shutil.rmtree(rig.journal.root / "run" / "results")
    entry = rig.send(1, value=1 if same else 99)
    if when == "while it is away":
        rig.start()
    result = rig.answer(entry)
    if same:
        assert result == before[0]
    else:
        assert "step 1 was sent again after its result was lost, and the critic is at step 2" in str(result.error)
    rig.stop()
    rig.start()
    until(lambda: rig.journal.last_step() == 2)
    assert rig.train(3)[0].error is None
    assert torch.equal(rig.weights(), straight.weights(3))


# ---- rewinds ----


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("target", [0, 1])
def test_a_refused_rewind_that_is_asked_for_again_serves_its_step(
    rig: Rig, straight: Rig, target: int, restarted: bool
):
    rig.train(1, 2)
    rig.instances[0].refuses.update([3, 4])
    assert "version 3 was refused" in str(rig.rewind(target).error)
    if restarted:
        rig.stop()
        rig.start()
    assert "version 4 was refused" in str(rig.rewind(target).error)
    assert rig.store.current() == 2
    result = rig.rewind(target)
    assert (result.error, result.weights_version, rig.store.current()) == (None, 5, 5)
    assert torch.equal(rig.weights(), straight.weights(target))
    assert rig.rewind(target).weights_version == 5  # served now: no new number


def test_a_rewind_to_a_step_whose_version_was_refused_serves_it(rig: Rig, straight: Rig):
    rig.train(1)
    rig.instances[0].refuses.add(2)
    assert "refused" in str(rig.train(2)[0].error)
    result = rig.rewind(2)
    assert result.error is None
    assert torch.equal(rig.weights(result.weights_version), straight.weights(2))
