"""The real sidecar on a real journal and store, in a thread; a few lines stand for the serving instances.
Under test: exactly once, answered when served, in order, and the same bits and numbers whatever was killed when.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import VOCAB, save_tiny

import trainer.sidecar
from python_backend.config import RunConfig
from python_backend.contract import StepConflict, TrainPayload
from python_backend.journal import Entry, Journal, JournalLocked, Result
from python_backend.modeling import CheckpointError, load_critic, quiet_transformers
from python_backend.weights import ServingRecord, WeightsStore
from trainer.checkpoint import CheckpointFolder
from trainer.publish import Publisher, VersionRejected
from trainer.sidecar import Sidecar, StoppedWaiting

PATIENCE_S = 30.0


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the sidecar catches it."""


class Instance(threading.Thread):
    """A critic instance as python_backend/critic.py is: sees CURRENT move, says what it serves."""

    def __init__(self, store: WeightsStore, name: str = "critic_0") -> None:
        super().__init__(daemon=True)
        self.store, self.instance = store, name
        self.refuses: set[int] = set()
        self.served: list[int] = []
        self.paused = threading.Event()
        self._stop_now = threading.Event()

    def run(self) -> None:
        refused = None
        while not self._stop_now.wait(0.001):
            number = self.store.current()
            if self.paused.is_set() or number is None or number in (*self.served[-1:], refused):
                continue
            if number in self.refuses:
                refused = number
                self._say(rejected=number, error="it looks odd")
            else:
                self.served.append(number)
                self._say()

    def _say(self, **more: Any) -> None:
        previous = self.served[-2] if len(self.served) > 1 else None
        self.store.acknowledge(
            ServingRecord(
                self.instance, socket.gethostname(), os.getpid(), self.served[-1], previous, time.time(), **more
            )
        )

    def close(self) -> None:
        self._stop_now.set()
        self.join()
        self.store.withdraw(self.instance, os.getpid())


class Rig:
    """One run's folder, its instances, and the sidecar that runs now."""

    def __init__(self, folder: Path, checkpoint: Path, **settings: Any) -> None:
        trainer = {
            "lr": 1e-2, "warmup_steps": 2, "constant_steps": 0, "max_steps": 100, "global_batch_size": 3,
            "checkpoint_every": 100, "reload_on_save": "none", **settings,
        }  # fmt: skip
        self.config = RunConfig.model_validate({
            "run": {"dir": folder, "run_id": "run"}, "critic": {"checkpoint": checkpoint}, "trainer": trainer,
            "server": {"grpc_port": 1},
        })  # fmt: skip
        self.journal = Journal(self.config.run.journal_dir, "run")
        self.store = WeightsStore(self.config.run.weights_dir)
        self.checkpoints = CheckpointFolder(folder / "checkpoints" / "critic")
        self.instances: list[Instance] = []
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def serve(self, name: str = "critic_0") -> Instance:
        instance = Instance(self.store, name)
        instance.start()
        self.instances.append(instance)
        return instance

    def start(self) -> Rig:
        self.error, self.stop_now = None, threading.Event()
        sidecar, stop = Sidecar(self.config), self.stop_now

        def run() -> None:
            try:
                sidecar.run(stop)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        return self

    def ended(self) -> BaseException | None:
        """Wait until the sidecar ends by itself; what it died of."""
        assert self.thread is not None
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return self.error

    def stop(self) -> BaseException | None:
        self.stop_now.set()
        return self.ended()

    def close(self) -> None:
        if self.thread is not None:
            self.stop()
        for instance in self.instances:
            instance.close()

    def send(self, step: int, value: int | None = None) -> Entry:
        return self.journal.accept_training(payload(step if value is None else value), run_id="run", step=step)

    def answer(self, entry: Entry) -> Result:
        deadline = time.monotonic() + PATIENCE_S
        while (result := self.journal.result(entry)) is None:
            assert self.error is None, self.error
            assert time.monotonic() < deadline, f"{entry.name} was not answered"
            time.sleep(0.002)
        return result

    def train(self, *steps: int) -> list[Result]:
        return [self.answer(self.send(step)) for step in steps]

    def save(self) -> Result:
        return self.answer(self.journal.accept_save(run_id="run"))

    def rewind(self, target: int) -> Result:
        return self.answer(self.journal.accept_rewind(run_id="run", target=target))

    def weights(self, version: int | None = None) -> torch.Tensor:
        version = self.store.current() if version is None else version
        tensors = load_file(self.store.folder(version) / "model.safetensors")
        return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def payload(value: int) -> TrainPayload:
    rng = np.random.default_rng(value)
    lengths = rng.integers(2, 9, 7)
    count = int(lengths.sum()) - 7
    targets = [rng.normal(size=count).astype(np.float32) for _ in range(2)]
    return TrainPayload(rng.integers(0, VOCAB, lengths.sum()), lengths, *targets, np.ones(count, np.float32))


def overflowing() -> TrainPayload:
    """Finite returns whose gradient is not."""
    sane = payload(0)
    return TrainPayload(sane.tokens, sane.lengths, np.full_like(sane.returns, 1e38), sane.prev_values, sane.mask)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quiet_transformers()
    folder = tmp_path_factory.mktemp("critic")
    save_tiny(folder, "gpt2", "critic")
    return folder


@pytest.fixture
def make(tmp_path: Path, checkpoint: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def new(name: str = "run", **settings: Any) -> Rig:
        rigs.append(Rig(tmp_path / name, checkpoint, **settings))
        return rigs[-1]

    yield new
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make: Callable[..., Rig]) -> Rig:
    """A sidecar at work, and one instance."""
    rig = make()
    rig.serve()
    return rig.start()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Rig]:
    """Six steps that nothing disturbed, every version kept: what each other run must equal."""
    rig = Rig(tmp_path_factory.mktemp("straight"), checkpoint, publish={"keep": 100})
    rig.serve()
    rig.start().train(1, 2, 3, 4, 5, 6)
    rig.stop()
    yield rig
    rig.close()


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
    rig.train(2)
    other.paused.set()
    entry = rig.send(3)
    while rig.instances[0].served[-1] != 3:
        time.sleep(0.002)
    time.sleep(0.05)
    assert rig.journal.result(entry) is None
    other.paused.clear()
    assert rig.answer(entry).weights_version == 3
    assert other.served[-1] == 3


def test_without_any_instance_nothing_is_answered(make: Callable[..., Rig]):
    rig = make().start()
    entry = rig.send(1)
    while rig.store.current() != 1:
        time.sleep(0.002)
    time.sleep(0.05)
    assert rig.journal.result(entry) is None
    assert "waiting until version 1 is served" in rig.journal.heartbeat().state or rig.journal.heartbeat().step <= 1
    rig.serve()
    assert rig.answer(entry).weights_version == 1


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


def test_publishing_every_second_step(make: Callable[..., Rig], straight: Rig):
    rig = make(publish={"every": 2})
    rig.serve()
    results = rig.start().train(1, 2, 3, 4)
    assert [result.weights_version for result in results] == [0, 1, 1, 2]
    assert torch.equal(rig.weights(2), straight.weights(4))


def test_checkpoints_come_by_themselves_and_at_the_end(make: Callable[..., Rig]):
    rig = make(checkpoint_every=2)
    rig.serve()
    rig.start().train(1, 2, 3)
    assert rig.checkpoints.latest() == 2
    assert rig.stop() is None
    assert rig.checkpoints.latest() == 3
    assert rig.journal.entries() == []


def test_a_stopped_sidecar_goes_on_where_it_was(make: Callable[..., Rig], straight: Rig):
    rig = make()
    rig.serve()
    for step in (1, 2, 3):
        assert rig.start().train(step)[0].weights_version == step
        assert rig.stop() is None
    assert torch.equal(rig.weights(), straight.weights(3))
    assert rig.instances[0].served == [0, 1, 2, 3]
    assert [rig.store.manifest(version).epoch for version in range(4)] == [0, 1, 2, 3]


# ---- killed ----

KILLS = [
    (WeightsStore, "add", "before"), (WeightsStore, "add", "after"), (Publisher, "verify", "after"),
    (WeightsStore, "set_current", "before"), (WeightsStore, "set_current", "after"),
    (WeightsStore, "prune", "before"), (WeightsStore, "prune", "after"),
    (Journal, "finish", "before"), (Journal, "finish", "after"),
    (CheckpointFolder, "save", "before"), (CheckpointFolder, "save", "after"),
    (Journal, "forget_covered", "before"), (Journal, "forget_covered", "after"), (Journal, "drop", "before"),
]  # fmt: skip


def kill_at(patch: pytest.MonkeyPatch, owner: type, name: str, when: str, call: int) -> None:
    """Kill the sidecar before or after its `call`-th call of `owner.name`."""
    original, calls = getattr(owner, name), []

    def killing(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == call and when == "before":
            raise Killed
        result = original(*args, **kwargs)
        if len(calls) == call:
            raise Killed
        return result

    patch.setattr(owner, name, killing)


@pytest.mark.parametrize(("owner", "name", "when"), KILLS, ids=lambda value: getattr(value, "__name__", value))
def test_whatever_is_killed_when_the_bits_and_numbers_are_the_same(
    make: Callable[..., Rig], straight: Rig, monkeypatch: pytest.MonkeyPatch,
    owner: type, name: str, when: str,
):  # fmt: skip
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
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, Journal, "entries", "before", call=1)
        assert isinstance(rig.ended(), Killed)
    assert rig.store.versions() == [0, 5]
    assert rig.start().train(6)[0].weights_version == 6
    assert rig.instances[0].served == [0, 1, 2, 3, 4, 5, 6]


def test_a_stop_while_nobody_serves_loses_nothing(
    make: Callable[..., Rig], straight: Rig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trainer.sidecar, "STOP_PATIENCE_S", 0.05)
    rig = make()
    instance = rig.serve()
    rig.start().train(1)
    instance.paused.set()
    entry = rig.send(2)
    while rig.store.current() != 2:
        time.sleep(0.002)
    error = rig.stop()
    assert isinstance(error, StoppedWaiting)
    assert "waiting until version 2 is served" in str(error)
    instance.paused.clear()
    assert rig.start().answer(entry).weights_version == 2
    assert torch.equal(rig.weights(), straight.weights(2))


def test_a_stop_long_after_the_last_wait_still_waits(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """The patience begins with the stop, not with the sidecar's last publication."""
    monkeypatch.setattr(trainer.sidecar, "STOP_PATIENCE_S", 0.5)
    rig.train(1)
    time.sleep(0.6)
    monkeypatch.setattr(Sidecar, "_finish_reload", lambda self: self._wait("waiting for a reload through Triton"))
    assert rig.stop() is None
    assert rig.checkpoints.latest() == 1


def test_a_lost_checkpoint_is_said_and_not_trained_over(rig: Rig):
    rig.train(1, 2)
    rig.save()
    rig.stop()
    rig.send(3)
    (rig.checkpoints.root / "2").rename(rig.config.run.dir / "elsewhere")
    rig.start()
    error = rig.ended()
    assert isinstance(error, CheckpointError)
    assert re.search("goes on with step 3, but .* end at 0", str(error))
    (rig.config.run.dir / "elsewhere").rename(rig.checkpoints.root / "2")
    assert rig.start().train(3)[0].weights_version == 3


def test_a_second_sidecar_is_refused(rig: Rig, make: Callable[..., Rig]):
    rig.train(1)
    error = make().start().ended()
    assert isinstance(error, JournalLocked)
    assert str(rig.journal.root) in str(error)
    assert rig.train(2)[0].weights_version == 2


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
    if target in (1, 3) and (target == 1 or restart):  # their entries are covered by a checkpoint and gone
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


def test_the_same_steps_after_a_rewind_give_the_same_weights_under_new_numbers(rig: Rig, straight: Rig):
    """An actor that is deterministic sends the very same again: the old versions must not come back as its own."""
    rig.train(1)
    rig.save()
    rig.train(2, 3)
    assert rig.rewind(1).weights_version == 4
    results = rig.train(2, 3)
    assert [result.weights_version for result in results] == [5, 6]
    assert rig.store.current() == 6
    assert torch.equal(rig.weights(), straight.weights(3))
    assert rig.instances[0].served == [0, 1, 2, 3, 4, 5, 6]


def test_a_rewind_out_of_reach_is_refused_and_training_goes_on(make: Callable[..., Rig], straight: Rig):
    rig = make(checkpoint_every=2)
    rig.serve()
    rig.start().train(1, 2, 3, 4, 5)
    assert rig.rewind(3).error == "rewind_to: 3 cannot be reached: checkpoints are at steps 4"
    assert rig.journal.last_step() == 5
    assert rig.train(6)[0].weights_version == 6
    assert torch.equal(rig.weights(), straight.weights(6))


@pytest.mark.parametrize(
    ("owner", "name", "when"),
    [
        (Journal, "set_aside_after", "before"), (Journal, "set_aside_after", "after"),
        (CheckpointFolder, "drop_after", "after"), (WeightsStore, "set_current", "after"), (Journal, "drop", "before"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
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
            else:
                rig.start()
            if rig.journal.result(entry) is not None:
                break
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


# ---- what cannot be trained or served ----


def test_a_refused_version_puts_current_back_and_the_caller_is_told(rig: Rig, straight: Rig):
    rig.train(1)
    rig.instances[0].refuses.add(2)
    result = rig.train(2)[0]
    assert result.error == "version 2 was refused by critic_0: it looks odd"
    assert result.weights_version == rig.store.current() == 1
    assert rig.train(3)[0].weights_version == 3  # and the next one is served
    assert rig.instances[0].served == [0, 1, 3]
    assert torch.equal(rig.weights(), straight.weights(3))


def test_a_refused_rewind_is_answered(rig: Rig):
    rig.train(1, 2)
    rig.instances[0].refuses.add(3)
    result = rig.rewind(0)
    assert result.error == "version 3 was refused by critic_0: it looks odd"
    assert rig.store.current() == 2
    assert rig.train(1)[0].weights_version == 4


@pytest.mark.parametrize("way", ["straight", "killed", "rewound"])
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
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, Journal, "entries", "before", call=1)
            assert isinstance(rig.ended(), Killed)
        rig.start()
        rig.train(4)
    if way == "rewound":
        rig.train(4)
        assert rig.rewind(3).error is None
        assert torch.equal(rig.weights(), after)


def publisher(rig: Rig) -> Publisher:
    return Publisher(rig.store, run_id="run", epoch=1, grpc_url="", reload="swap", timeout_s=1, keep=3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_never_served(rig: Rig, bad: float):
    rig.train(1)
    critic = load_critic(rig.store.folder(1))
    with torch.no_grad():
        critic.model.classifier.bias[0] = bad
    with pytest.raises(VersionRejected, match=r"version 2: classifier\.bias holds values that are not finite"):
        publisher(rig).publish(critic, step=2, beat=lambda _: None)
    assert rig.store.current() == 1


def test_the_canary_finds_weights_that_are_not_the_trained_ones(rig: Rig):
    rig.train(1, 2)
    with pytest.raises(VersionRejected, match="version 1: the canary's values differ by"):
        publisher(rig).verify(1, load_critic(rig.store.folder(2)))


def test_damaged_weights_are_never_served(rig: Rig):
    rig.train(1)
    critic = load_critic(rig.store.folder(1))
    file = rig.store.folder(1) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(VersionRejected, match=r"version 1: cannot read model\.safetensors"):
        publisher(rig).verify(1, critic)
