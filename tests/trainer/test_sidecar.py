"""`trainer.sidecar`: exactly once, in order, answered when served; what cannot be served is said and left out."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from sidecar_rig import Rig, overflowing, payload, until

import trainer.progress
from python_backend.checkpoints.inspection import CheckpointError
from python_backend.errors import RlhfError
from python_backend.models.modeling import load_critic
from python_backend.store.journal import Result
from python_backend.wire.contract import StepConflict
from trainer.critic_versions import CriticVersions
from trainer.patience import StoppedWaiting
from trainer.publish import Publisher, Reload, VersionRejected

pytest_plugins = ["sidecar_fixtures"]


def test_each_step_is_a_version_of_its_own(rig: Rig, straight: Rig):
    results = rig.train(1, 2, 3)
    assert [result.weights_version for result in results] == [1, 2, 3]
    assert [result.error for result in results] == [None] * 3
    assert len({result.loss_mean for result in results}) == 3
    assert rig.instances[0].served == [0, 1, 2, 3]
    for version in range(4):
        assert torch.equal(rig.weights(version), straight.weights(version))
    assert not torch.equal(rig.weights(2), rig.weights(3))
    assert [rig.store.manifest(v).step for v in range(4)] == [0, 1, 2, 3]
    assert [rig.store.manifest(v).parent for v in range(4)] == [None, 0, 1, 2]


def test_a_step_sent_twice_is_trained_once(rig: Rig, straight: Rig):
    first = rig.train(1, 2)
    assert rig.train(1, 2) == first
    with pytest.raises(StepConflict, match="step: 2 of run 'run' was already sent with other content"):
        rig.send(2, value=99)
    assert rig.train(3)[0].weights_version == 3
    assert torch.equal(rig.weights(), straight.weights(3))


def test_an_answer_means_served_by_every_instance(rig: Rig):
    rig.train(1)
    other = rig.serve("critic_1")
    until(lambda: other.served)
    rig.train(2)
    other.paused.set()
    entry = rig.send(3)
    until(lambda: rig.instances[0].served[-1] == 3)
    time.sleep(0.05)
    assert rig.journal.result(entry) is None
    other.paused.clear()
    assert rig.answer(entry).weights_version == 3
    assert other.served[-1] == 3


def test_saves_are_done_in_order(rig: Rig):
    entries = [rig.send(1), rig.send(2), rig.journal.accept_save(run_id="run"), rig.send(3)]
    results = [rig.answer(entry) for entry in entries]
    assert [result.weights_version for result in results] == [1, 2, 2, 3]
    assert rig.checkpoints.steps() == [2]
    state = rig.checkpoints.state(2)
    assert (state.step, state.asked, state.version) == (2, True, 2)
    assert [result["digest"] for result in state.results] == [payload(1).digest(), payload(2).digest()]
    assert [entry.name for entry in rig.journal.entries()] == ["00000003.train"]  # what is covered is gone


def test_a_save_without_reload_asks_triton_for_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(Publisher, "triton_reload", lambda self: asked.append("reload"))
    rig.train(1)
    assert rig.save() == Result("00000001.save.1", 1)
    rig.train(2)
    assert asked == []


def test_a_rewind_that_agrees_serves_what_every_second_step_has_not_published_yet(
    make: Callable[..., Rig], straight: Rig
):
    """The resumed actor takes the version in the answer for the weights of that step."""
    rig = make(publish={"every": 2})
    rig.serve()
    results = rig.start().train(1, 2, 3)
    assert [result.weights_version for result in results] == [0, 1, 1]
    assert rig.rewind(3).weights_version == 2
    assert torch.equal(rig.weights(2), straight.weights(3))
    assert rig.rewind(3).weights_version == 2


@pytest.mark.parametrize(("keep_entries", "kept"), [(0, []), (2, []), (3, [1, 2, 3])])
def test_checkpoints_come_by_themselves_and_at_the_end(make: Callable[..., Rig], keep_entries: int, kept: list[int]):
    rig = make(checkpoint_every=2, keep_entries=keep_entries)
    rig.serve()
    rig.start().train(1, 2, 3)
    assert rig.checkpoints.latest() == 2
    assert rig.stop() is None
    assert rig.checkpoints.latest() == 3
    assert [entry.step for entry in rig.journal.entries()] == kept  # a way from version 0 to each step, or none


def test_a_stopped_sidecar_goes_on_where_it_was(make: Callable[..., Rig], straight: Rig):
    rig = make()
    rig.serve()
    for step in (1, 2, 3):
        assert rig.start().train(step)[0].weights_version == step
        assert rig.stop() is None
    assert torch.equal(rig.weights(), straight.weights(3))
    assert rig.instances[0].served == [0, 1, 2, 3]
    assert [rig.store.manifest(version).epoch for version in range(4)] == [0, 1, 2, 3]


# ---- stopped, alone, lost ----


def test_a_stop_while_nobody_serves_loses_nothing(
    make: Callable[..., Rig], straight: Rig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trainer.progress, "STOP_PATIENCE_S", 0.05)
    rig = make()
    instance = rig.serve()
    rig.start().train(1)
    instance.paused.set()
    entry = rig.send(2)
    until(lambda: rig.store.current() == 2)
    error = rig.stop()
    assert isinstance(error, StoppedWaiting)
    assert "waiting until version 2 is served" in str(error)
    instance.paused.clear()
    assert rig.start().answer(entry).weights_version == 2
    assert torch.equal(rig.weights(), straight.weights(2))


def test_a_stop_long_after_the_last_wait_still_waits(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """The patience begins with the stop, not with the sidecar's last publication."""
    rig.train(1)
    much_later = {"monotonic": lambda: time.monotonic() + 2 * trainer.progress.STOP_PATIENCE_S}
    monkeypatch.setattr(trainer.progress, "time", SimpleNamespace(**{**vars(time), **much_later}))
    waited = []

    def wait_once(self: CriticVersions) -> None:
        self._progress.wait("waiting for a reload through Triton")
        waited.append("and was not told to give up")

    monkeypatch.setattr(CriticVersions, "finish_reload", wait_once)
    assert rig.stop() is None
    assert waited
    assert rig.checkpoints.latest() == 1


def test_a_reload_that_outlasts_the_stop_is_no_error(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch):
    """The checkpoint of the last step does not wait for it either."""
    monkeypatch.setattr(trainer.progress, "STOP_PATIENCE_S", 0.05)
    loading, may_end = threading.Event(), threading.Event()

    def load(self: Publisher) -> Reload:
        loading.set()
        may_end.wait()
        return Reload(1, "triton")

    monkeypatch.setattr(Publisher, "triton_reload", load)
    rig = make(reload_on_save="triton")
    rig.serve()
    rig.start().train(1)
    rig.save()
    assert loading.wait(20)
    rig.train(2)
    rig.save()
    rig.train(3)  # a second save does not make the training wait for the first one's reload
    assert rig.stop() is None
    assert rig.checkpoints.latest() == 3
    may_end.set()


def test_a_lost_checkpoint_is_said_and_not_trained_over(rig: Rig):
    rig.train(1, 2)
    rig.save()
    rig.stop()
    rig.send(3)
    (rig.checkpoints.root / "2").rename(rig.config.run.dir / "elsewhere")
    rig.start()
    error = rig.ended()
    assert isinstance(error, CheckpointError)
    assert re.search("continues with step 3, but .* end at 0", str(error))
    (rig.config.run.dir / "elsewhere").rename(rig.checkpoints.root / "2")
    assert rig.start().train(3)[0].weights_version == 3


def test_a_second_sidecar_is_refused(rig: Rig, make: Callable[..., Rig]):
    rig.train(1)
    error = make().start().ended()
    assert isinstance(error, RlhfError)
    assert str(rig.journal.root) in str(error)
    assert rig.train(2)[0].weights_version == 2


# ---- what cannot be trained or served ----


def test_a_refused_version_puts_current_back_and_the_caller_is_told(rig: Rig, straight: Rig):
    rig.train(1)
    rig.instances[0].refuses.add(2)
    result = rig.train(2)[0]
    assert result.error == f"version 2 was refused by {rig.store.serving()[0].name}: it looks odd"
    assert result.weights_version == rig.store.current() == 1
    assert rig.train(3)[0].weights_version == 3  # and the next one is served
    assert rig.instances[0].served == [0, 1, 3]
    assert torch.equal(rig.weights(), straight.weights(3))


@pytest.mark.parametrize("way", ["killed", "rewound"])
def test_a_gradient_that_is_not_finite_is_that_steps_error_alone(rig: Rig, way: str):
    rig.train(1)
    entry = rig.journal.accept_training(overflowing(), run_id="run", step=2)
    result = rig.answer(entry)
    assert "gradients are not finite" in (result.error or "")
    assert result.weights_version == rig.store.current() == 1
    third = rig.train(3)[0]
    assert third.error is None
    after = rig.weights()
    if way == "killed":
        rig.kill()
        rig.start()
        rig.train(4)
    if way == "rewound":
        rig.train(4)
        assert rig.rewind(3).error is None
        assert torch.equal(rig.weights(), after)


def publisher(rig: Rig) -> Publisher:
    return Publisher(rig.store, run_id="run", epoch=1, servers=[], reload="swap", timeout_s=1, keep=3)


def test_the_canary_finds_weights_that_are_not_the_trained_ones(rig: Rig):
    rig.train(1, 2)
    with pytest.raises(VersionRejected, match="version 1: the values for the canary row differ by"):
        publisher(rig).verify(1, load_critic(rig.store.folder(2)))


def test_a_save_that_overtook_its_step_waits_for_it(rig: Rig):
    rig.train(1)
    save = rig.journal.accept_save(run_id="run", step=2)
    time.sleep(0.05)
    assert rig.journal.result(save) is None
    rig.train(2)
    assert rig.answer(save).weights_version == 2
    assert rig.checkpoints.steps() == [2]
