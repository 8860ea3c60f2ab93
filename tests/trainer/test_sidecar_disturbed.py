"""Tests of `trainer.sidecar` under faults: after any kill, refusal or damage, the result is the undisturbed run's.

A state machine sends requests while each write of the sidecar fails in turn. Named tests cover what it cannot express:
damage that cannot be repaired, disks that are really full, and which checkpoints are kept.
"""

import errno
import functools
import logging
import shutil
import threading
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from safetensors import SafetensorError
from sidecar_rig import PATIENCE_S, Killed, Rig, overflowing
from small_disk import small_disk
from versions import flip, reseal
from waiting import wait_for

import rlhf_triton.trainer.disk_retry
from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import disk_errors, refusal
from rlhf_triton.store.journal import Entry, Journal, Result
from rlhf_triton.store.ownership import Sender
from rlhf_triton.store.sealed_folder import replace_state, verify_folder
from rlhf_triton.store.weights import Origin, WeightsError, WeightsStore
from rlhf_triton.trainer.checkpoint import CheckpointFolder
from rlhf_triton.trainer.disk_retry import until_done
from rlhf_triton.trainer.progress import SidecarProgress
from rlhf_triton.trainer.publish import VersionRejected, copy_checkpoint

FULL = OSError(errno.ENOSPC, "No space left on device")
WRITES = [
    (WeightsStore, "add"),
    (WeightsStore, "set_current"),
    (WeightsStore, "prune"),
    (Journal, "finish"),
    (Journal, "drop"),
    (Journal, "forget_covered"),
    (Journal, "set_aside_after"),
    (CheckpointFolder, "save"),
    (CheckpointFolder, "keep_only"),
    (CheckpointFolder, "drop_after"),
    (CheckpointFolder, "prune"),
    (WeightsStore, "verify_files"),
]
FULL_TOO = [(Journal, "write_heartbeat")]  # killed, it would end the thread of the heartbeat alone


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(rlhf_triton.trainer.disk_retry, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(rlhf_triton.trainer.disk_retry, "MAX_PAUSE_S", 0.05)


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


SHARD = "shard-00001-model-00001-of-00001.safetensors"
DAMAGE = [
    (SHARD, flip),
    ("state.json", flip),
    ("state.json", cut),
    (SHARD, Path.unlink),
]


class Disturbed(RuleBasedStateMachine):
    """Requests to a sidecar in which every write fails once before and once after its work, and again when armed."""

    def __init__(self, folder, checkpoint, straight, error):
        super().__init__()
        self.straight, self.error, self.killed = straight, error, isinstance(error, Killed)
        publish = {"keep": 1 if self.killed else 100}
        self.rig = Rig(folder, checkpoint, publish=publish, checkpoint_every=2)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("rlhf_triton.trainer.critic_checkpoints.KEEP_REQUESTED", 9)
        self.armed = {write: [] for write in WRITES + FULL_TOO * (not self.killed)}
        for owner, name in self.armed:
            self.patch.setattr(owner, name, self.failing(owner, name))
        self.step = 0
        self.requested = set()
        self.trained = []
        self.published = [0]  # the step of each version

    def failing(self, owner, name):
        original = getattr(owner, name)
        armed = self.armed[owner, name]

        def disturbed(*args, **kwargs):
            when = armed.pop(0) if armed else None
            if when == "before":
                raise self.error
            result = original(*args, **kwargs)
            if when == "after":
                raise self.error
            return result

        return disturbed

    def answer(self, entry):
        """Wait for the result; start the sidecar again whenever it was killed."""
        deadline = time.monotonic() + PATIENCE_S
        while (result := self.rig.journal.result(entry)) is None:
            if isinstance(self.rig.error, Killed):
                self.rig.start()
            assert self.rig.error is None, self.rig.error
            assert time.monotonic() < deadline, f"{entry.name} was not answered"
            time.sleep(0.002)
        return result

    def stop(self):
        """Stop the sidecar, which may be killed again while it writes its last checkpoint."""
        answered_at = time.time()
        if not self.killed:  # else a stop could cut a replay short, and then the last step has no checkpoint
            wait_for(
                lambda: (beat := self.rig.journal.heartbeat()) and beat.state == "idle" and beat.time > answered_at
            )
        while self.rig.stop() is not None:
            assert isinstance(self.rig.error, Killed)
            self.rig.start()

    @initialize()
    def every_write_fails(self):
        self.rig.begin()
        wait_for(lambda: self.rig.store.current() == 0)
        for armed in self.armed.values():
            armed += ["before", "after"]
        self.train(2)
        self.save(late=False, keep=True)
        self.train(1)
        self.rewind(chosen=0)
        wait_for(lambda: not any(self.armed.values()))

    @rule(write=st.sampled_from(WRITES), when=st.sampled_from(["before", "after"]))
    def arm(self, write, when):
        self.armed[write].append(when)

    @precondition(lambda self: self.step < 5)
    @rule(count=st.integers(1, 2))
    def train(self, count):
        steps = [step for step in range(self.step + 1, self.step + count + 1) if step <= 6]
        for entry in [self.rig.send(step) for step in steps]:
            self.published.append(entry.step)
            expected = self.straight.journal.result(entry)
            assert self.answer(entry) == replace(expected, weights_version=len(self.published) - 1)
        self.trained += steps
        self.step = steps[-1]

    @precondition(lambda self: self.step > 0)
    @rule(late=st.booleans(), keep=st.booleans())
    def save(self, late, keep):
        step = self.step - late
        if step not in self.reachable() or step == 0:
            step = self.step
        keep_steps = sorted({*self.requested, step} if keep else {step})
        entry = self.rig.journal.accept_save(run_id="run", step=step, keep_steps=keep_steps)
        assert self.answer(entry) == Result(entry=entry.name, weights_version=len(self.published) - 1)
        self.requested = {kept for kept in self.requested if kept > step or keep} | {step}

    @rule(chosen=st.integers(0, 9))
    def rewind(self, chosen):
        targets = self.reachable()
        target = targets[chosen % len(targets)]
        result = self.answer(self.rig.journal.accept_rewind(run_id="run", target=target))
        assert result.error is None
        new = result.weights_version - len(self.published) + 1
        if target == self.step:
            assert new == 0
        else:  # killed while it publishes, it publishes once more
            assert new >= 1 if self.killed else new == 1
        self.published += [target] * new
        self.step = target
        self.requested = {kept for kept in {*self.requested, target} if 0 < kept <= target}
        assert self.rig.journal.last_step() == target

    @rule(damage=st.sampled_from([None, *DAMAGE]))
    def restart(self, damage):
        self.stop()
        newest = self.rig.checkpoints.root / str(self.step)  # missing if it was killed, and stopped before its replay
        if damage and self.step > max(self.requested, default=0) and newest.is_dir():  # the journal has all steps since
            name, change = damage
            change(newest / name)
        self.rig.start()

    @invariant()
    def the_weights_are_those_of_the_undisturbed_run(self):
        assert torch.equal(self.rig.weights(), self.straight.weights(self.step))

    def reachable(self):
        """Return the steps to which a rewind is possible."""
        newest = max(self.requested, default=0)  # a run that has saved a checkpoint is not begun anew
        return sorted({*self.requested, *range(newest, self.step + 1)})

    def teardown(self):
        try:
            self.stop()
            rig, served, versions = self.rig, self.rig.instances[0].served, list(range(len(self.published)))
            lines = [line["step"] for line in rig.metrics()]
            assert served == sorted(set(served))
            assert rig.store.versions()[-1] == rig.store.current() == served[-1] == versions[-1]
            assert self.requested <= {*rig.checkpoints.steps()}
            if self.killed:
                assert Counter(lines) <= Counter(self.trained)  # a replay is no second update
            else:
                assert rig.store.versions() == served == versions
                assert [rig.store.manifest(version).step for version in versions] == self.published
                assert rig.checkpoints.steps() == sorted({*self.requested, self.step} - {0})
                kept = range(max(self.requested, default=0) + 1, self.step + 1)
                assert rig.journal.entries() == [Entry(step, 0, "train") for step in kept]
                assert lines == self.trained
        finally:
            self.patch.undo()
            self.rig.close()


@pytest.mark.parametrize(
    "error", [pytest.param(Killed(), id="killed"), pytest.param(FULL, id="full disk", marks=pytest.mark.slow)]
)
def test_sidecar_results_match_the_undisturbed_run_after_failed_writes(tmp_path_factory, checkpoint, straight, error):
    run_state_machine_as_test(
        lambda: Disturbed(tmp_path_factory.mktemp("run"), checkpoint, straight, error),
        settings=hypothesis_settings(max_examples=4, stateful_step_count=10, suppress_health_check=list(HealthCheck)),
    )


# ---- rewinds ----


def test_rewind_publishes_a_new_version_and_accepts_other_steps_after_it(rig, straight):
    rig.train(1, 2)
    rig.save()
    rig.train(3, 4)
    refused = rig.answer(rig.journal.accept_rewind(run_id="run", target=1, sender=Sender("late", 1)))
    assert "cannot be reached" in str(refused.error)  # its entry is covered by a requested checkpoint, and gone
    assert rig.journal.owners() == []
    assert rig.rewind(3).weights_version == 5
    assert rig.answer(rig.send(4, value=50)).weights_version == 6
    assert not torch.equal(rig.weights(), straight.weights(4))
    assert [rig.store.manifest(version).parent for version in (5, 6)] == [3, 5]
    assert [rig.store.manifest(version).step for version in (5, 6)] == [3, 4]


def test_rewind_to_0_is_refused_once_checkpoints_are_saved(rig, straight):
    rig.train(1, 2)
    assert rig.rewind(0).error is None  # nothing was saved
    rig.train(1)
    assert rig.save().error is None
    rig.train(2)
    error = str(rig.rewind(0).error)
    assert error.startswith("rewind_to: 0 would discard the saved checkpoints of steps 1; ")
    assert rig.rewind(2).weights_version == 5
    assert torch.equal(rig.weights(), straight.weights(2))


@pytest.mark.parametrize(("target", "restarted"), [(0, False), (1, True)])
def test_repeated_rewind_serves_its_step_after_a_refused_version(rig, straight, target, restarted):
    rig.train(1, 2)
    rig.instances[0].refuses.update([3, 4])
    assert "version 3 was refused" in str(rig.rewind(target).error)
    if restarted:
        rig.stop()
        rig.start()
    assert "version 4 was refused" in str(rig.rewind(target).error)
    assert rig.store.current() == 2
    for _ in range(2):  # served the second time: no new number
        result = rig.rewind(target)
        assert (result.error, result.weights_version, rig.store.current()) == (None, 5, 5)
        assert torch.equal(rig.weights(), straight.weights(target))


def test_rewind_to_the_last_step_removes_an_earlier_owners_save_of_the_next_one(rig):
    """Its list of checkpoints is not that of the new owner."""
    for step in (1, 2):
        rig.train(step)
        rig.save(step, [*range(1, step + 1)])
    early = rig.journal.accept_save(run_id="run", step=3, keep_steps=[2])
    assert rig.rewind(2).error is None
    rig.train(3)
    assert rig.answer(early).error == "save at step 3: removed by a rewind"
    assert rig.checkpoints.steps() == [1, 2]


# ---- checkpoints that are kept ----


def test_checkpoints_are_pruned_to_keep_steps_and_the_newest(make, monkeypatch):
    monkeypatch.setattr("rlhf_triton.trainer.critic_checkpoints.KEEP_REQUESTED", 1)
    rig = make().begin()
    for step, keep_steps in [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [2, 4])]:
        rig.train(step)
        assert rig.save(step, keep_steps).error is None
        assert rig.checkpoints.steps() == keep_steps
    rig.train(5)
    rig.stop()
    assert rig.checkpoints.steps() == [2, 4, 5]  # the newest of all, which was not requested
    rig.start()
    # A critic_save that is repeated after a timeout does not give up what later ones need.
    assert rig.save(1, [1]).error == "step: 1 cannot be reached: there are checkpoints of steps 2, 4, 5"
    assert rig.save(2, [1, 2]).error is None
    rig.train(6)
    assert rig.stop() is None
    assert rig.checkpoints.steps() == [2, 4, 6]  # a new process remembers


def test_entries_beyond_the_rewind_limit_are_pruned(make, monkeypatch):
    monkeypatch.setattr("rlhf_triton.trainer.critic_checkpoints.KEEP_ENTRIES", 2)
    rig = make(checkpoint_every=1).begin()
    rig.train(1)
    rig.save(1, [1])
    for step, kept in [(2, [2]), (3, [2, 3]), (4, []), (5, [])]:
        rig.train(step)
        rig.stop()
        assert [entry.step for entry in rig.journal.entries() if entry.kind == "train"] == kept
        rig.start()
    assert rig.rewind(3).error == "rewind_to: 3 cannot be reached: there are checkpoints of steps 1, 5"


@pytest.mark.parametrize("requested", [True, False])
def test_checkpoint_of_0_1_0_is_read_with_its_mark(make, straight, requested):
    rig = make(checkpoint_every=1).begin()
    rig.train(1)
    if requested:
        rig.save()
    rig.stop()
    state = asdict(rig.checkpoints.state(1))
    replace_state(rig.checkpoints.root / "1", {**state, "asked": state.pop("requested")})
    assert rig.checkpoints.requested_steps() == [1] * requested
    rig.start().train(2)
    assert torch.equal(rig.weights(), straight.weights(2))


@pytest.mark.parametrize("every", [1, 2])
def test_save_fails_and_removes_nothing_while_its_version_is_rejected(make, straight, every):
    rig = make(publish={"every": every}).begin()
    rig.train(1, 2)
    assert rig.save(2, [2]).error is None
    served = rig.store.current()
    rig.instances[0].refuses.update(range(served + 1, 50))
    rig.train(3, 4)
    for _ in range(2):
        saved = rig.save(4, [4])
        assert "was refused by critic_0" in str(saved.error)
        assert (saved.weights_version, rig.checkpoints.steps()) == (served, [2, 4])
    rig.instances[0].refuses.clear()  # such as for lack of memory, of which there is enough again
    saved = rig.save(4, [4])
    assert (saved.error, rig.checkpoints.steps()) == (None, [4])
    assert torch.equal(rig.weights(saved.weights_version), straight.weights(4))
    rig.train(5, 6)
    assert rig.save(6, [6]).error is None
    assert rig.checkpoints.steps() == [6]
    assert torch.equal(rig.weights(), straight.weights(6))


def test_save_does_not_replace_a_version_after_a_failed_step_or_a_rollback(make):
    rig = make().begin()
    rig.train(1, 2)
    assert rig.answer(rig.journal.accept_training(overflowing(), run_id="run", step=3)).error is not None
    saved = rig.save(3)
    assert (saved.error, saved.weights_version) == (None, 2)
    write = functools.partial(copy_checkpoint, rig.store.folder(1))
    back = rig.store.add(write, Origin(run_id="run", step=1, parent=1, epoch=1)).version
    rig.store.set_current(back)
    saved = rig.save(3)
    assert (saved.error, saved.weights_version) == (None, back)


# ---- lost results ----


@pytest.mark.parametrize("running", [True, False])
def test_lost_results_are_restored_from_the_checkpoint(rig, straight, running):
    before = rig.train(1, 2)
    rig.save()
    if not running:
        rig.stop()
    shutil.rmtree(rig.journal.root / "run" / "results")
    entries = [rig.send(1), rig.send(2, value=99)] if running else [rig.send(1, value=99)]
    if not running:
        rig.start()
    results = [rig.answer(entry) for entry in entries]
    assert results[:-1] == before[: len(results) - 1]
    message = f"step {len(results)} was sent again after its result was lost, and the critic is at step 2"
    assert message in str(results[-1].error)
    rig.stop()
    rig.start()
    wait_for(lambda: rig.journal.last_step() == 2)
    assert rig.train(3)[0].error is None  # and not: "send step 1 first"
    assert torch.equal(rig.weights(), straight.weights(3))


def test_lost_results_beside_a_damaged_checkpoint_fail_only_their_callers(rig, straight):
    rig.train(1, 2)
    rig.save()
    shutil.rmtree(rig.journal.root / "run" / "results")
    flip(rig.checkpoints.root / "2" / "state.json")
    for step in (1, 2):
        assert f"step {step} was sent again after its result was lost" in str(rig.answer(rig.send(step)).error)
    assert rig.train(3)[0].error is None
    assert torch.equal(rig.weights(), straight.weights(3))


# ---- damaged entries ----


def entry_of_step_2(rig):
    return rig.journal.root / "run" / "entries" / "00000002.train"


def test_damaged_training_entry_fails_only_its_caller(make, straight, monkeypatch):
    for module in ("critic_state", "critic_checkpoints"):
        monkeypatch.setattr(f"rlhf_triton.trainer.{module}.KEEP_SET_ASIDE", 1)
    rig = make().begin()
    rig.train(1)
    rig.kill()
    entries = [rig.send(2), rig.send(3)]
    flip(entry_of_step_2(rig))
    lost = entry_of_step_2(rig).read_bytes()
    rig.start()
    results = [rig.answer(entry) for entry in entries]
    assert "step 2 was not trained; training continues with the next step: " in results[0].error
    assert f"{entry_of_step_2(rig)} is damaged" in results[0].error
    assert [(result.weights_version, result.error) for result in results[1:]] == [(2, None)]
    after = rig.weights()
    assert not torch.equal(after, straight.weights(3))
    aside = rig.journal.root / "run" / "set_aside"
    assert (aside / "1" / "00000002.train").read_bytes() == lost
    assert [(line["step"], line["error"]) for line in rig.metrics() if "error" in line] == [(2, results[0].error)]
    assert rig.train(2) == results[:1]  # sent again
    rig.kill()
    assert rig.start().train(3) == results[1:]  # replayed
    rig.train(4)
    assert rig.rewind(3).error is None
    assert torch.equal(rig.weights(), after)
    assert [path.name for path in aside.iterdir()] == ["2"]  # the rewind's; only the newest one is kept


def test_damaged_answered_entries_stop_the_sidecar(rig, straight):
    rig.train(1, 2, 3)
    rig.kill()
    intact = entry_of_step_2(rig).read_bytes()
    flip(entry_of_step_2(rig))
    rig.assert_ends(
        CheckpointError, f"{entry_of_step_2(rig)} is damaged", "step 2 has already been trained and acknowledged"
    )
    assert rig.store.current() == 3
    entry_of_step_2(rig).write_bytes(intact)
    assert rig.start().train(4)[0].weights_version == 4
    assert torch.equal(rig.weights(), straight.weights(4))


def test_rewind_past_a_damaged_entry_is_refused_and_training_continues(rig, straight):
    rig.train(1)
    rig.save()
    rig.train(2, 3)
    rig.stop()
    flip(entry_of_step_2(rig))
    rig.start()
    assert "rewind_to: 2 cannot be reached: " in rig.rewind(2).error
    rig.train(4)
    assert torch.equal(rig.weights(), straight.weights(4))
    assert rig.rewind(1).error is None


def test_damaged_save_entry_fails_only_its_caller(make):
    rig = make()
    rig.serve()
    entry = rig.journal.accept_save(run_id="run", step=0, keep_steps=[0])
    (rig.journal.root / "run" / "entries" / entry.name).write_bytes(b'{"keep_')
    assert "00000000.save.1 is damaged" in rig.start().answer(entry).error
    assert rig.train(1)[0].error is None


# ---- damaged checkpoints ----


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_sidecar_retrains_from_the_checkpoint_before_damaged_ones(make, straight, caplog, monkeypatch):
    for module in ("critic_state", "critic_checkpoints"):
        monkeypatch.setattr(f"rlhf_triton.trainer.{module}.KEEP_SET_ASIDE", 1)
    rig = make().begin()
    rig.train(1)
    rig.save()
    rig.train(2)
    rig.stop()
    shutil.copytree(rig.checkpoints.root / "2", rig.config.run.dir / "kept")  # a new one takes its place
    rig.start().train(3)
    rig.stop()
    (rig.config.run.dir / "kept").rename(rig.checkpoints.root / "2")
    for step in (2, 3):
        flip(rig.checkpoints.root / str(step) / SHARD)
    (rig.checkpoints.root / "damaged-9").mkdir()  # which 0.1.0 has set aside
    rig.start().train(4)
    assert torch.equal(rig.weights(), straight.weights(4))
    assert sum("training is repeated from step 1" in warning for warning in warnings(caplog)) == 2
    rig.stop()
    assert rig.checkpoints.steps() == [1, 4]
    assert [*rig.checkpoints.root.glob("damaged-*")] == []
    assert len(list(rig.checkpoints.root.glob("*.set-aside"))) == 1  # as many as set


def test_folder_that_is_not_a_checkpoint_is_set_aside(make, straight):
    """Such as one whose state.json somebody deleted: the step gets a new one."""
    rig = make(checkpoint_every=2)
    rig.serve()
    (rig.checkpoints.root / "2").mkdir(parents=True)
    (rig.checkpoints.root / "2" / SHARD).write_bytes(b"what is this")
    rig.start().train(1, 2, 3)
    assert verify_folder(rig.checkpoints.root / "2")["step"] == 2
    assert (rig.checkpoints.root / "2.set-aside" / SHARD).is_file()
    assert torch.equal(rig.weights(), straight.weights(3))


def test_save_recomputes_a_damaged_checkpoint_or_returns_the_error(make, straight):
    rig = make(checkpoint_every=2).begin()
    rig.train(1, 2, 3)
    flip(rig.checkpoints.root / "2" / "state.json")
    assert rig.save(2).error is None
    assert verify_folder(rig.checkpoints.root / "2")["requested"]
    rig.train(4)
    assert torch.equal(rig.weights(), straight.weights(4))
    flip(rig.checkpoints.root / "2" / "state.json")
    error = str(rig.save(2).error)
    assert error.startswith("step: 2 cannot be reached: ")
    assert "because the journal no longer has step 1" in error
    rig.train(5)
    assert torch.equal(rig.weights(), straight.weights(5))


def test_missing_or_damaged_last_checkpoint_stops_the_sidecar_until_repaired(rig):
    rig.train(1, 2)
    rig.save()
    rig.stop()
    rig.send(3)
    folder = rig.checkpoints.root / "2"
    elsewhere = folder.rename(rig.config.run.dir / "elsewhere")
    rig.assert_ends(CheckpointError, "continues with step 3, but")
    elsewhere.rename(folder)
    flip(folder / SHARD)
    rig.assert_ends(
        CheckpointError,
        f"2/{SHARD} is damaged",
        "from step 0, because the journal no longer has step 1; restore the file",
    )
    flip(folder / SHARD)
    assert rig.start().train(3)[0].weights_version == 3


def test_changed_trainer_settings_are_logged_and_applied(make, caplog):
    rig = make().begin()
    rig.train(1)
    rig.stop()
    other = make(lr=2e-2, token_budget=99)
    other.start().train(2)
    assert warnings(caplog) == [
        "the critic was trained up to step 1 under other settings (trainer.token_budget: was 4096, now 99 "
        "(rounding only); trainer.optimizer.lr: was 0.01, now 0.02); the new ones apply from here on"
    ]
    other.stop()
    assert other.checkpoints.state(2).settings["trainer.optimizer.lr"] == 2e-2
    caplog.clear()
    other.start().train(3)
    assert warnings(caplog) == []


@pytest.mark.parametrize("other", ["version 0", "run"])
def test_checkpoint_of_another_run_or_initial_critic_stops_the_sidecar(rig, other):
    rig.train(1)
    rig.stop()
    if other == "run":
        run = rig.config.run.model_copy(update={"run_id": "other"})
        rig.config = rig.config.model_copy(update={"run": run})
        message = "run.run_id: 'other', but the checkpoint of step 1 belongs to run 'run'"
    else:
        message = "was trained from another initial critic: version 0 had digest " + rig.store.manifest(0).digest[:17]
        path = rig.store.folder(0) / "config.json"
        path.chmod(0o600)
        path.write_text(path.read_text() + "\n")
        reseal(rig.store.folder(0))
    rig.assert_ends(CheckpointError, message)


def test_store_damaged_after_a_swap_stops_the_sidecar_without_failing_the_step(rig, monkeypatch):
    """The step's version is served: an answer that it was rejected would be wrong."""

    def damaged(*_, **__):
        raise WeightsError("CURRENT contains 'one', not a version number")

    monkeypatch.setattr(WeightsStore, "prune", damaged)
    rig.start()
    step = rig.send(1)
    assert isinstance(rig.ended(), WeightsError)
    assert rig.journal.result(step) is None
    assert rig.store.current() == 1


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2}], ids=["all weights", "LoRA"])
def test_a_damaged_version_0_ends_the_sidecar(make, settings):
    """Only version 0 has the weights that training does not change."""
    rig = make(**settings).begin()
    rig.train(1)
    rig.stop()
    flip(rig.store.folder(0) / "model.safetensors")
    rig.assert_ends(WeightsError, "version 0: model.safetensors has digest")


@pytest.mark.parametrize("kind", ["rewind", "save"])
def test_no_earlier_step_is_restored_from_a_damaged_version_0(make, kind):
    rig = make(lora_rank=2).begin()
    rig.train(1, 2)
    flip(rig.store.folder(0) / "model.safetensors")
    entry = (
        rig.journal.accept_rewind(run_id="run", target=1)
        if kind == "rewind"
        else rig.journal.accept_save(run_id="run", step=1)
    )
    wait_for(lambda: rig.error is not None or rig.journal.result(entry) is not None)
    assert isinstance(rig.error, WeightsError), rig.journal.result(entry)
    assert "version 0: model.safetensors has digest" in str(rig.error)
    assert rig.journal.result(entry) is None
    flip(rig.store.folder(0) / "model.safetensors")
    assert rig.start().answer(entry).error is None


# ---- disks that are really full ----


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        yield disk


def refusals(caplog):
    return [record.getMessage() for record in caplog.records if "disk error, retrying" in record.getMessage()]


def test_sidecar_waits_for_a_full_weights_disk(make, straight, caplog):
    rig = make()
    with small_disk(rig.config.run.weights_dir) as disk:
        try:
            rig.begin().train(1)
            disk.fill()
            entries = [rig.send(2), rig.send(3), rig.journal.accept_save(run_id="run")]
            wait_for(lambda: rig.journal.heartbeat().trouble)
            heartbeat = rig.journal.heartbeat()
            assert (heartbeat.step, heartbeat.state) == (2, "publishing step 2")
            assert "No space left on device" in str(heartbeat.trouble)
            assert rig.journal.result(entries[0]) is None
            disk.empty()
            results = [rig.answer(entry) for entry in entries]
            assert [(result.weights_version, result.error) for result in results] == [(2, None), (3, None), (3, None)]
            wait_for(lambda: rig.journal.heartbeat().trouble is None)
            assert torch.equal(rig.weights(), straight.weights(3))
            assert rig.store.versions() == [0, 1, 2, 3]
            assert list(disk.folder.glob(".*")) == []  # no half-written version
            assert len(refusals(caplog)) == 1  # not a line for each attempt
        finally:
            rig.close()


def test_full_disk_delays_the_sidecars_start_and_a_stop_ends_the_wait(disk, checkpoint, straight):
    disk.fill()
    rig = Rig(disk.folder / "run", checkpoint)
    try:
        rig.start()
        time.sleep(0.1)
        assert rig.thread.is_alive()
        disk.empty()
        wait_for(lambda: rig.store.current() == 0)
        rig.serve()
        rig.train(1)
        disk.fill()
        with pytest.raises(OSError, match="No space left on device"):
            rig.send(2)
        error = rig.stop()  # its last checkpoint cannot be written
        assert isinstance(error, RlhfError)
        for part in ("writing the checkpoint of step 1", "No space left on device", "nothing is lost"):
            assert part in str(error)
        assert list(rig.checkpoints.root.glob(".*")) == []
        disk.empty()
        assert rig.start().train(2)[0].weights_version == 2
        assert torch.equal(rig.weights(), straight.weights(2))
    finally:
        rig.close()


def test_disk_probe_returns_the_error_and_leaves_no_file(disk):
    assert refusal(disk.folder) is None
    assert list(disk.folder.iterdir()) == []
    disk.fill()
    cause = refusal(disk.folder)
    assert cause.errno == errno.ENOSPC
    assert [path.name for path in disk.folder.iterdir()] == ["ballast"]


def test_curable_disk_errors_are_retried_and_reported(caplog):
    shown = []
    # errors of NFS
    timed_out = OSError(errno.ETIMEDOUT, "Timed out")
    not_empty = OSError(errno.ENOTEMPTY, "Not empty")
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "model.safetensors")
    attempts = iter([OSError(errno.EROFS, "Read-only file system"), timed_out, not_empty, None, missing])

    def action():
        if error := next(attempts):
            raise error
        return "done"

    def patient(what):
        return until_done(what, action, threading.Event(), lambda *item: shown.append(item))

    assert patient("writing") == "done"
    assert shown == [
        ("writing", "Read-only file system"),
        ("writing", "Timed out"),
        ("writing", "Not empty"),
        ("writing", None),
    ]
    assert len(refusals(caplog)) == 1
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        patient("reading")


class RetryClock:
    """A clock that work and the pauses between retries advance: stands in for `time` and for the stop event."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    time = monotonic

    def wait(self, seconds):
        self.now += seconds
        return False


def test_sidecar_stays_blocked_while_a_retry_is_at_work(make, monkeypatch):
    """A write that takes longer than the pauses before it meets the full disk: most of the time it is at work."""
    rig = make()
    rig.journal.root.mkdir(parents=True)
    clock = RetryClock()
    monkeypatch.setattr("rlhf_triton.trainer.progress.time", clock)
    progress = SidecarProgress(rig.config, rig.journal, epoch=1, stop=clock)
    attempts = iter([FULL, FULL, FULL, None])
    shown = []

    def write():
        for _ in range(30):
            clock.now += 1.0
            progress.renew_heartbeat("writing")
            shown.append(rig.journal.heartbeat().trouble)
        if error := next(attempts):
            raise error

    progress.persist("writing", write)
    assert shown == [None] * 30 + ["No space left on device"] * 90
    progress.renew_heartbeat("idle")
    assert rig.journal.heartbeat().trouble is None
    with pytest.raises(VersionRejected):
        progress.persist("publishing", functools.partial(blocked_and_refused, progress))
    clock.now += 1.0
    progress.renew_heartbeat("idle")
    assert rig.journal.heartbeat().trouble is None


def blocked_and_refused(progress):
    progress.show_block("waiting", "a server is unreachable")
    raise VersionRejected("it looks odd")


def test_safetensors_disk_errors_become_os_errors(tmp_path):
    with pytest.raises(OSError, match="No space left on device") as caught, disk_errors(tmp_path / "x.safetensors"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "x.safetensors"))
    with pytest.raises(SafetensorError, match="header"), disk_errors(tmp_path / "x.safetensors"):
        raise SafetensorError("Error while deserializing header: HeaderTooLarge")
