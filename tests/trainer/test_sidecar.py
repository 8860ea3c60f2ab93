"""`trainer.sidecar`: steps are trained exactly once, in order, and answered when served; failures are errors."""

import time

import pytest
import torch
from scrape import scrape
from sidecar_rig import PATIENCE_S, overflowing, payload
from waiting import wait_for

import rlhf_triton.trainer.critic_checkpoints
import rlhf_triton.trainer.progress
import rlhf_triton.trainer.publish
from rlhf_triton.client.model_servers import ModelServers
from rlhf_triton.config.sections import MonitoringSection
from rlhf_triton.models.modeling import load_critic
from rlhf_triton.models.out_of_memory import OutOfMemory
from rlhf_triton.store.journal import Journal
from rlhf_triton.tools.server.ports import free_port
from rlhf_triton.trainer.checkpoint import CheckpointFolder
from rlhf_triton.trainer.critic_update import CriticUpdate, split_rows
from rlhf_triton.trainer.publish import Publisher
from rlhf_triton.wire.contract import ContractError


@pytest.mark.device
def test_each_step_is_trained_once_and_published_as_one_version(rig, straight):
    results = rig.train(1, 2, 3)
    assert [(result.weights_version, result.error) for result in results] == [(1, None), (2, None), (3, None)]
    assert len({result.loss_mean for result in results}) == 3
    assert rig.train(1, 2, 3) == results  # sent again
    with pytest.raises(ContractError, match="step: 2 of run 'run' was already sent with other content"):
        rig.send(2, value=99)
    assert rig.instances[0].served == [0, 1, 2, 3]
    manifests = [rig.store.manifest(version) for version in range(4)]
    assert [(each.step, each.parent, each.epoch) for each in manifests] == [
        (0, None, 0),
        (1, 0, 1),
        (2, 1, 1),
        (3, 2, 1),
    ]
    for version in range(4):
        assert torch.equal(rig.weights(version), straight.weights(version))
    assert not torch.equal(rig.weights(2), rig.weights(3))


def test_answer_waits_until_every_instance_serves_the_version(rig):
    rig.train(1)
    other = rig.serve("critic_1")
    wait_for(lambda: other.served)
    rig.train(2)
    other.paused.set()
    entry = rig.send(3)
    wait_for(lambda: rig.instances[0].served[-1] == 3)
    time.sleep(0.05)
    assert rig.journal.result(entry) is None
    other.paused.clear()
    assert rig.answer(entry).weights_version == 3
    assert other.served[-1] == 3


def test_save_waits_for_its_step_and_prunes_covered_entries(rig):
    rig.train(1)
    early = rig.journal.accept_save(run_id="run", step=2)
    time.sleep(0.05)
    assert rig.journal.result(early) is None
    entries = [rig.send(2), early, rig.send(3)]
    assert [rig.answer(entry).weights_version for entry in entries] == [2, 2, 3]
    assert rig.checkpoints.steps() == [2]
    state = rig.checkpoints.state(2)
    assert (state.step, state.requested, state.version) == (2, True, 2)
    assert [result["digest"] for result in state.results] == [payload(1).digest(), payload(2).digest()]
    assert [entry.name for entry in rig.journal.entries()] == ["00000003.train"]  # what is covered is gone


def test_rewind_publishes_a_step_that_publish_every_2_held_back(make, straight):
    """The resumed actor takes the answer's version for the weights of that step."""
    rig = make(publish={"every": 2}).begin()
    results = rig.train(1, 2, 3)
    assert [result.weights_version for result in results] == [0, 1, 1]
    for _ in range(2):
        assert rig.rewind(3).weights_version == 2
    assert torch.equal(rig.weights(2), straight.weights(3))


def test_rewind_with_adapters_serves_old_weights_under_a_new_version(make):
    settings = {"lora_rank": 2, "precision": "bfloat16", "gradient_checkpointing": True}
    calm = make("calm", publish={"keep": 100}, **settings)
    rig = make(publish={"format": "adapter", "keep": 1}, **settings)
    for each in (calm, rig):
        each.begin().train(1, 2)
    rig.save()
    for each in (calm, rig):
        each.train(3)
    rig.stop()
    assert rig.start().rewind(2).weights_version == 4
    assert_same_weights(rig, 4, calm, 2)
    assert rig.train(3)[0].weights_version == 5
    assert_same_weights(rig, 5, calm, 3)
    assert rig.store.versions() == [0, 5]  # the base stays


def assert_same_weights(rig, version, calm, step):
    """Compare the weights that an instance computes with."""
    found, expected = (load_critic(r.store.folder(v)).model.state_dict() for r, v in ((rig, version), (calm, step)))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# ---- stopped ----


def test_stop_while_waiting_for_an_instance_loses_no_step(make, straight, monkeypatch):
    monkeypatch.setattr(rlhf_triton.trainer.progress, "STOP_PATIENCE_S", 0.05)
    rig = make().begin()
    rig.train(1)
    instance = rig.instances[0]
    instance.paused.set()
    entry = rig.send(2)
    wait_for(lambda: rig.store.current() == 2)
    error = rig.stop()
    assert "waiting until version 2 is served" in str(error)
    instance.paused.clear()
    assert rig.start().answer(entry).weights_version == 2
    assert torch.equal(rig.weights(), straight.weights(2))


# ---- what callers see while it works or waits ----


def watch(rig, patch, owner, name):
    """Make each call of `owner.name` last until a heartbeat or PATIENCE_S; return for each call whether one came."""
    original = getattr(owner, name)
    seen = []

    def slow(*args, **kwargs):
        before = rig.journal.heartbeat()
        give_up_at = time.monotonic() + PATIENCE_S
        while rig.journal.heartbeat() == before and time.monotonic() < give_up_at:
            time.sleep(0.01)
        seen.append(rig.journal.heartbeat() != before)
        return original(*args, **kwargs)

    patch.setattr(owner, name, slow)
    return seen


def test_heartbeat_continues_while_the_sidecar_loads_or_prunes(rig, monkeypatch):
    rig.train(1)
    rig.save()
    rig.train(2)
    rig.kill()
    with monkeypatch.context() as patch:
        loads, reads, restores, prunes = (
            watch(rig, patch, owner, name)
            for owner, name in (
                (CheckpointFolder, "load"),
                (Journal, "load"),
                (Journal, "restore_results"),
                (CheckpointFolder, "keep_only"),
            )
        )
        assert rig.start().train(3)[0].error is None
        assert all(map(len, (loads, reads, restores)))
        loaded = len(loads)
        read = len(reads)
        assert rig.rewind(2).error is None
        assert len(loads) > loaded
        assert len(reads) > read
        assert rig.save(2, [1, 2]).error is None
    assert prunes
    assert all((*loads, *reads, *restores, *prunes))


def test_heartbeat_continues_while_an_idle_sidecar_reloads_the_critic(rig, monkeypatch):
    """A large critic takes longer to load than HEARTBEAT_TIMEOUT_S."""
    rig.train(1)
    (record,) = rig.store.serving()
    monkeypatch.setattr(rlhf_triton.trainer.publish, "RELOAD_AFTER_S", 0.0)
    monkeypatch.setattr(ModelServers, "load", lambda self, version, timeout_s: [])
    with monkeypatch.context() as patch:
        seen = watch(rig, patch, Publisher, "_reload_all")
        patch.setattr(type(rig.store.records), "died", lambda self: [record])
        wait_for(lambda: bool(seen), timeout_s=PATIENCE_S + 5.0)
    assert all(seen)


def test_heartbeat_reports_that_no_server_loads_a_version(make, monkeypatch):
    """If a load hangs, the wait continues, and callers see its reason."""
    monkeypatch.setattr(rlhf_triton.trainer.publish, "SERVE_TIMEOUT_S", 0.1)
    rig = make().start()
    entry = rig.send(1)
    wait_for(lambda: "critic: the server on 127.0.0.1:1 cannot be reached" in str(rig.journal.heartbeat()))
    assert rig.journal.result(entry) is None
    assert rig.journal.heartbeat().state == "waiting until version 1 is served"
    rig.serve()
    assert rig.answer(entry).weights_version == 1


# ---- what cannot be trained or served ----


@pytest.mark.parametrize("lr", [1e30, 1e38], ids=["values overflow", "weights overflow"])
def test_update_that_makes_the_critic_non_finite_fails_only_its_step(make, straight, lr):
    """The learning rate has a typo: gradients and some weights stay finite, but no value does."""

    def start(lr):
        optimizer = rig.config.trainer.optimizer.model_copy(update={"lr": lr, "min_lr": lr})
        trainer = rig.config.trainer.model_copy(update={"optimizer": optimizer})
        rig.config = rig.config.model_copy(update={"trainer": trainer})
        rig.start()

    rig = make()
    usual = rig.config.trainer.optimizer.lr
    rig.begin().train(1, 2)
    rig.stop()
    start(lr)
    results = rig.train(3, 4)
    for result in results:
        assert "non-finite; the critic of step" in str(result.error)
    saved = rig.save(4, [4])
    assert (saved.error, rig.checkpoints.steps(), rig.store.current()) == (None, [4], 2)
    rig.stop()
    start(usual)
    assert rig.train(5)[0].error is None
    assert torch.equal(rig.weights(2), straight.weights(2))
    assert rig.weights(3).isfinite().all()


def test_rejected_versions_and_bad_gradients_fail_only_their_step(make, straight):
    rig = make()
    port = free_port()
    rig.config = rig.config.model_copy(update={"monitoring": MonitoringSection(trainer_port=port)})
    instance = rig.serve()
    instance.refuses = {2}
    rig.start().train(1)
    result = rig.train(2)[0]
    assert result.error == f"version 2 was refused by {rig.store.serving()[0].name}: it looks odd"
    assert result.weights_version == rig.store.current() == 1
    assert rig.train(3)[0].weights_version == 3  # the next one is served, and holds both steps
    assert instance.served == [0, 1, 3]
    assert torch.equal(rig.weights(), straight.weights(3))
    failed = rig.answer(rig.journal.accept_training(overflowing(), run_id="run", step=4))
    assert "gradients are not finite" in failed.error
    assert failed.weights_version == rig.store.current() == 3
    assert rig.train(5)[0].error is None
    after = rig.weights()
    rig.stop()  # the last numbers are shown after the answer
    found = scrape(port, "rlhf_trainer_")
    assert {name: value for name, value in found.items() if name.endswith("_total") and "log" not in name} == {
        "updates_total": 4,
        "failed_updates_total": 2,
        "rejected_versions_total": 1,
        "skipped_optimizer_steps_total": 0,
        "out_of_memory_total": 0,
    }
    assert (found["step"], found["weights_version"], found["journal_last_step"]) == (5, rig.store.current(), 5)
    assert (found["journal_pending_entries"], found["blocked"]) == (0, 0)
    assert found["loss"] > 0
    assert all(found[f"publish_seconds{phase}"] > 0 for phase in ("write", "verify", "reload"))
    rig.config = rig.config.model_copy(update={"monitoring": MonitoringSection()})
    rig.start().train(6)
    rig.kill()  # the replay leaves the failed step out
    assert rig.start().rewind(5).error is None  # and so does a rewind
    assert torch.equal(rig.weights(), after)


# ---- what does not fit into memory ----

BATCH = 4  # sequences of an optimizer step in a rig; a step of the journal has two of them


@pytest.fixture
def gpu(monkeypatch):
    """Simulate a device that fits `tokens` of a micro-batch; `lacks` makes single micro-batches run out of memory."""
    gpu = {"tokens": 10**6, "lacks": lambda rows: False}
    loss_of = CriticUpdate._loss

    def limited(update, rows, *args, **kwargs):
        loss = loss_of(update, rows, *args, **kwargs)
        if len(rows) * max(row.tokens.size for row in rows) > gpu["tokens"] or gpu["lacks"](rows):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.")
        return loss

    monkeypatch.setattr(CriticUpdate, "_loss", limited)
    return gpu


def of_step(step, *, sequences=slice(None)):
    """Return whether a micro-batch has one of the sequences of this step of the journal."""
    chosen = {row.tokens.tobytes() for row in list(split_rows(payload(step)))[sequences]}
    return lambda rows: any(row.tokens.tobytes() in chosen for row in rows)


def assert_trained_alike(weights, wanted):
    """Compare weights trained in micro-batches of different sizes, up to rounding.

    GPT-2's key biases (16 of 4481 weights) are left out: their gradient is rounding, which Adam amplifies.
    """
    assert ((weights - wanted).abs() > 1e-5).float().mean() < 0.01


@pytest.mark.device
def test_out_of_memory_halves_the_sidecars_micro_batches(rig, straight, gpu):
    gpu["tokens"] = 10
    results = rig.train(1, 2, 3)
    expected = [straight.journal.result(entry) for entry in straight.journal.entries()][:3]
    for result, wanted in zip(results, expected, strict=True):
        assert (result.error, result.weights_version) == (None, wanted.weights_version)
        assert result.loss_mean == pytest.approx(wanted.loss_mean, rel=1e-5)
    assert_trained_alike(rig.weights(3), straight.weights(3))
    rig.stop()
    counts = [line["out_of_memory/trainer.token_budget"] for line in rig.metrics() if "loss_mean" in line]
    assert counts[0] >= 1
    assert counts[1:] == [0, 0]  # it stays halved


@pytest.mark.parametrize("fits_later", [False, True])
def test_batches_skipped_for_memory_are_skipped_in_a_replay(rig, straight, gpu, fits_later):
    """One of the two optimizer steps of step 3 and all of step 2 are skipped."""
    some = of_step(3, sequences=slice(BATCH))
    whole = of_step(2)
    gpu["lacks"] = lambda rows: some(rows) or whole(rows)
    first, second, third = rig.train(1, 2, 3)
    assert (first.error, second.weights_version, second.loss_mean) == (None, 1, None)
    assert "CUDA out of memory" in str(second.error)
    remedy = "train on shorter rows (of an actor: lower actor.generation.max_new_tokens)"
    assert f"; {remedy} or set trainer.gradient_checkpointing" in str(second.error)
    assert (third.error, third.weights_version) == (None, 2)
    served = rig.weights()
    rig.kill()
    trained, failed, partly = rig.metrics()
    assert (trained["step"], failed["error"]) == (1, second.error)
    assert failed["out_of_memory/trainer.token_budget"] >= 1
    assert (partly["optimizer_steps"], partly["skipped_steps"]) == (1, 1)
    if fits_later:
        gpu["lacks"] = some
    assert rig.start().rewind(2).error is None
    assert_trained_alike(rig.weights(), straight.weights(1))
    assert rig.train(3)[0].error is None
    rig.kill()
    if fits_later:
        gpu["lacks"] = lambda rows: False
    assert rig.start().rewind(3).error is None
    assert_trained_alike(rig.weights(), served)


@pytest.mark.parametrize("sequences", [slice(None), slice(BATCH)], ids=["all", "first"])
def test_sidecar_stops_if_an_acknowledged_step_no_longer_fits_in_memory(rig, gpu, sequences):
    """Its weights are served and cannot be reproduced: another process may have taken the memory."""
    rig.train(1, 2)
    rig.kill()
    gpu["lacks"] = of_step(2, sequences=sequences)
    rig.assert_ends(OutOfMemory, "not even a single row fits")
    gpu["lacks"] = lambda rows: False
    assert rig.start().train(3)[0].weights_version == 3
