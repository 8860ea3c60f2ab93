"""The journal of samples: what a run records, how long it keeps it, and that steps replay bit for bit."""

import asyncio
import dataclasses
import os
import re
import shutil
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from live_system import make_run
from safetensors.torch import load_file
from samples import groups_of, scored_samples
from sidecar_rig import Instance
from simulated_journal import simulate
from training_runs import PPO, Server, go, go_until, make_ppo

from rlhf_triton.actor.data.prompts import Positions
from rlhf_triton.actor.loop import TrainingRun
from rlhf_triton.actor.policy.update import PolicyUpdate
from rlhf_triton.actor.replay.recorded_steps import OLD_LOGPROBS, describe_samples, find_steps
from rlhf_triton.actor.replay.sample_journal import SampleJournal
from rlhf_triton.actor.run.checkpoints import RunCheckpoints
from rlhf_triton.actor.run.settings import actor_checkpoints, find_changes, write_settings
from rlhf_triton.client.client import TrainAnswer
from rlhf_triton.config.loading import load_config, parse_config
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.sections import RunSection
from rlhf_triton.store.durable import numbers_in
from rlhf_triton.store.journal import Journal
from rlhf_triton.store.jsonl import read_jsonl
from rlhf_triton.store.record_log import PREFIX, RecordLog, StoredRecord, read_records
from rlhf_triton.store.run_lock import only_actor
from rlhf_triton.store.sealed_folder import saved_steps
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.tools.replay import main, replay, sections_of
from rlhf_triton.tools.report.data import load_run
from rlhf_triton.tools.report.samples import shown_steps
from rlhf_triton.trainer.sidecar import run_sidecar
from rlhf_triton.wire.contract import Limits
from rlhf_triton.wire.training_payload import train_payload


def journal_dir(run_dir):
    return RunSection(dir=run_dir).sample_journal_dir


SETTINGS = {
    "algorithm_name": "grpo",
    "responses_per_prompt": 2,
    "rollout_size": 4,
    "minibatch_size": 2,
    "lora_rank": 2,
    "checkpoint_every": 2,
    "keep_checkpoints": 3,
    "validation_size": 0,
    "lr": 1e-2,
    "kl_coef": 0.1,
    "kl_target": 0.01,
    "normalization": "running",
}


def train(folder, checkpoints, *, steps, **settings):
    settings = {**SETTINGS, "steps": steps, **settings}
    write_settings(make_run(folder, checkpoints, actor=settings).config, {})
    go(make_ppo(folder, checkpoints, **settings))


@pytest.fixture(scope="module")
def grpo(tmp_path_factory, checkpoints):
    """A run that has resumed after step 2 with another learning rate, after a third step that nothing came of."""
    folder = tmp_path_factory.mktemp("grpo")
    train(folder, checkpoints, steps=3)
    shutil.rmtree(folder / "checkpoints" / "actor" / "3")
    train(folder, checkpoints, steps=4, lr=2e-2)
    return folder


@pytest.fixture
def copy(grpo, tmp_path):
    """A run to damage."""
    return Path(shutil.copytree(grpo, tmp_path / "copy"))


def test_steps_replay_identically_across_a_resume(grpo, capsys):
    before = [*grpo.rglob("*")]
    assert replay(grpo, 1, 4) == 0
    out = capsys.readouterr().out
    assert out.startswith("from the start of the run\n")
    assert out.count(": identical (") == 4, out
    assert replay(grpo, 3, 3) == 0
    assert capsys.readouterr().out.startswith("from the checkpoint of step 2\nstep 3: identical (")
    assert [*grpo.rglob("*")] == before


@pytest.mark.parametrize(
    "settings",
    [PPO, {"max_off_policy_steps": 2, "correction": {"high": 2.0}}, {"max_resampled": 2}, {"lora_rank": 0}],
)
def test_other_methods_replay_identically(settings, tmp_path, checkpoints, capsys):
    train(tmp_path, checkpoints, steps=2, **settings)
    assert replay(tmp_path, 1, 2) == 0, capsys.readouterr().out
    record = find_steps(journal_dir(tmp_path), 1, 2).step(2)
    assert (OLD_LOGPROBS in record.arrays) == ("correction" in settings)


def test_log_probs_that_an_update_recomputes_are_compared(tmp_path, checkpoints, capsys):
    """They are in the journal, and the report shows their ratios to those of sampling, which are not all 1."""
    train(tmp_path, checkpoints, steps=2, max_off_policy_steps=1, correction={"high": 2.0})
    steps, _ = shown_steps(load_run(tmp_path))
    ratios = [token.ratio for step in steps for sample in step.samples for token in sample.tokens]
    assert None not in ratios
    assert max(abs(ratio - 1) for ratio in ratios) > 1e-4

    def change(record):
        return with_flipped_bit(record, OLD_LOGPROBS) if record.header["kind"] == "step" else record

    rewrite(tmp_path, change)
    assert replay(tmp_path, 1, 2) == 1
    assert "step 1: `old_logprobs` of sample 0" in capsys.readouterr().out


def test_groups_are_on_disk_before_their_update(tmp_path, checkpoints, monkeypatch):
    """A slow disk delays the update; a crash within it leaves the groups of the step, without the step."""
    sync = os.fsync

    def slowly(descriptor):
        if threading.current_thread().name.startswith("record-log"):
            time.sleep(0.3)
        sync(descriptor)

    def crash(*_, **__):
        shutil.copytree(tmp_path / "run", tmp_path / "crashed")
        raise OSError("crash")

    monkeypatch.setattr(os, "fsync", slowly)
    monkeypatch.setattr(PolicyUpdate, "run", crash)
    with pytest.raises(OSError, match="crash"):
        train(tmp_path / "run", checkpoints, steps=1)
    found = find_steps(journal_dir(tmp_path / "crashed"), 1, 1)
    assert ([*found.groups], [*found.steps]) == ([(1, 0), (1, 1)], [])


def test_step_is_on_disk_before_the_checkpoint_of_a_stop(tmp_path, checkpoints, monkeypatch):
    """A kill right after the checkpoint leaves no step that is trained but not in the journal."""
    sync = os.fsync
    save = RunCheckpoints.save_last
    killed = threading.Event()
    run = make_ppo(tmp_path / "run", checkpoints, **{**SETTINGS, "checkpoint_every": 100}, steps=3)

    def slowly(descriptor):
        if threading.current_thread().name.startswith("record-log") and run.stop._requested.is_set():
            killed.wait(5)
        sync(descriptor)

    async def save_and_copy(*given):
        await save(*given)
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
        killed.set()

    monkeypatch.setattr(os, "fsync", slowly)
    monkeypatch.setattr(RunCheckpoints, "save_last", save_and_copy)
    go_until(run, run.policy_update, "run", 2)
    assert saved_steps(actor_checkpoints(tmp_path / "killed")) == [2]
    assert [*find_steps(journal_dir(tmp_path / "killed"), 1, 3).steps] == [1, 2]


def journal_of(run_dir, **actor):
    """Return the journal of a later start of a run."""
    config = load_config(run_dir / "run.yaml")
    run = config.run.model_copy(update={"dir": run_dir})
    config = config.model_copy(update={"run": run, "actor": config.actor.model_copy(update=actor)})
    inputs = SimpleNamespace(positions=defaultdict(Positions), fingerprints={}, seed_of=int)
    state = SimpleNamespace(inputs=inputs, policy=SimpleNamespace(fingerprint=""), numbers=dict)
    return SampleJournal(config, state)


def test_resume_removes_the_steps_after_its_checkpoint(copy):
    journal = journal_of(copy)
    journal.resume(2)
    journal.close()
    assert [*find_steps(journal_dir(copy), 1, 4).steps] == [1, 2]


def test_resumes_after_one_checkpoint_keep_one_record_of_a_group_in_flight(copy):
    """Else a run that crashes before its next checkpoint, again and again, fills the disk."""
    samples = [
        dataclasses.replace(sample, policy_steps=np.full(len(sample.tokens), 4)) for sample in [*scored_samples()][:2]
    ]
    (group,) = groups_of(samples, 2)
    group = dataclasses.replace(group, number=8)
    for start in range(3):
        journal = journal_of(copy, max_off_policy_steps=1)
        assert [*journal.sampled(4)] == ([9] if start else [])
        journal.resume(4)
        journal.add_groups(5, [group])
        if start == 0:
            journal.add_sampled(9, 1, group)
        journal.close()
    records = [record for step in (4, 5) for _, record in read_records(journal_dir(copy), step)]
    assert [record.header["number"] for record in records if record.header["kind"] == "sampled"] == [9]


def test_groups_are_recorded_by_their_prompts_places_whatever_their_order_in_the_batch(copy):
    """Dynamic sampling appends the groups that it drops, whose prompts came before those of the kept ones."""
    groups = [dataclasses.replace(group, number=3 - i) for i, group in enumerate(groups_of(scored_samples()))]
    journal = journal_of(copy)
    journal.resume(4)
    journal.add_groups(5, groups)
    journal.close()
    found = find_steps(journal_dir(copy), 5, 5)
    prompts = [found.group(5, number).header["prompts"][0]["prompt_id"] for number in range(4)]
    assert prompts == ["3", "2", "1", "0"]
    assert journal._recorded.numbers == [3, 2, 1, 0]


def test_damaged_groups_in_flight_are_sampled_again(copy, caplog):
    path = journal_dir(copy) / "4" / "1"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    assert journal_of(copy, max_off_policy_steps=1).sampled(4) == {}
    assert "is damaged at byte" in caplog.text
    assert "groups that were in flight are sampled again" in caplog.text


def rewrite(folder, change):
    """Write the samples again with changed records."""
    old = folder / "old"
    journal_dir(folder).rename(old)
    log = RecordLog(journal_dir(folder))
    for step in numbers_in(old):
        for _, record in read_records(old, step):
            log.append(step, lambda record=record: [change(record)])
    log.close()


def with_flipped_bit(record, name):
    """Return the record with another last bit in the first number of an array that is not 0."""
    changed = record.arrays[name].copy()
    bits = changed.reshape(-1).view(f"u{changed.itemsize}")
    bits[np.flatnonzero(changed)[0]] ^= bits.dtype.type(1)
    return dataclasses.replace(record, arrays={**record.arrays, name: changed})


@pytest.mark.parametrize(
    ("kind", "name", "told"),
    [
        ("group", "logprobs", r"step 1: `logprobs` of sample 0 \(prompt \d+\), by its digest"),
        (
            "step",
            "advantages",
            r"step 1: `advantages` of sample 0 \(prompt \d+\) at token \d+: \S+ in the run, \S+ here",
        ),
        ("step", "digests", r"step 1: `tokens` of sample 0 \(prompt \d+\), by its digest"),
        ("step", "weights", r"step 1: in the weights after the step, `model.layers.0\S+`, by its digest"),
    ],
)
def test_first_difference_is_named(kind, name, told, copy, capsys):
    def change(record):
        if record.header["kind"] != kind or record.header["step"] != 1:
            return record
        return with_flipped_bit(record, name)

    rewrite(copy, change)
    assert replay(copy, 1, 2) == 1
    out = capsys.readouterr().out
    assert len(lines := out.splitlines()) == 4, out
    assert re.match(told, lines[1]), out


def test_replay_names_each_difference_of_the_environment(copy, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    rewrite(
        copy,
        lambda record: StoredRecord(record.header | {"seed": 1}, record.arrays) if "seed" in record.header else record,
    )
    assert replay(copy, 1, 1) == 1
    assert "what differs in the environment:\n  OMP_NUM_THREADS: " in capsys.readouterr().out


def flip_a_bit(run):
    """Flip one bit in the log-probs of the first group."""
    records = read_records(journal_dir(run), 1)
    path, record = next((place.path, record) for place, record in records if record.header["kind"] == "group")
    data = bytearray(path.read_bytes())
    data[data.index(record.arrays["logprobs"].tobytes())] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("kind", "part", "told"),
    [
        ("step", "end", "step 2; restore the file"),
        ("step", "prefix", "a record is incomplete; restore the file"),
        ("step", "header", "a record does not match its digest; restore the file"),
        ("group", "end", r"step 2, group 2, sample \d \(prompt \d\): `\S+`; restore the file"),
    ],
)
def test_damage_to_a_later_step_blocks_no_earlier_one(kind, part, told, copy, capsys):
    records = read_records(journal_dir(copy), 2)
    place = next(place for place, record in records if record.header["kind"] == kind)
    path = place.path
    begin = place.position
    data = bytearray(path.read_bytes())
    size, _ = PREFIX.unpack(data[begin : begin + PREFIX.size])
    last = begin + PREFIX.size + size - 1
    data[{"prefix": begin + 5, "header": begin + PREFIX.size + 9, "end": last}[part]] ^= 1
    path.write_bytes(bytes(data))
    assert main([str(copy), "--step", "1"]) == 0
    assert main([str(copy), "--step", "2"]) == 2
    error = capsys.readouterr().err
    assert re.search(f"{path} is damaged at byte {begin}: {told}", error), error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "prepare", "told"),
    [
        ("--step 0", None, "--step 0: steps are counted from 1"),
        ("--step 3 --to 2", None, "--step 3 --to 2: steps are counted from 1, and --to is not before --step"),
        ("--step 1 actor.steps=2", None, "actor.steps=2: a replay keeps the run's settings; only --fork changes them"),
        ("--step 1 --fork {run}", None, "--fork: {run} exists; choose another folder"),
        (
            "--step 9 --fork {run}/new",
            None,
            "lacks step 5, which a replay of step 8 needs (from the checkpoint of step 4): it was never complete, or",
        ),
        ("--step 2 --fork {run}/new actor.stps=2", None, "unknown key actor.stps"),
        ("--step 5", None, "lacks step 5, which a replay of step 5 needs (from the checkpoint of step 4)"),
        ("--step 5", None, "or actor.keep_checkpoints (3) no longer keeps it; steps 1 to 4 can be replayed"),
        ("--step 2 --fork {run}/new actor.policy.lora_rank=4", None, "actor.policy.lora_rank cannot change after the"),
        ("--step 2 --fork {run}/new actor.kl.coef=0.5", None, "actor.kl.coef cannot change after the first step"),
        ("--step 2 --fork {run}/new actor.algorithm.name=ppo", None, "ppo needs a critic, and {run} has none; choose"),
        ("--step 1", lambda run: shutil.rmtree(journal_dir(run) / "1"), "lacks step 1, which a replay of step 1 needs"),
        (
            "--step 1",
            lambda run: shutil.rmtree(journal_dir(run)),
            "has no samples, so no step of this run can be replayed",
        ),
        ("--step 1", lambda run: (journal_dir(run) / "1" / "1").write_text("a diary"), "is not a log of records"),
        ("--step 1", flip_a_bit, "): `logprobs`; restore the file"),
    ],
)
def test_impossible_replays_and_forks_are_refused_in_one_sentence(arguments, prepare, told, copy, capsys):
    if prepare is not None:
        prepare(copy)
    before = [*copy.rglob("*")]
    assert main([str(copy), *arguments.format(run=copy).split()]) == 2
    error = capsys.readouterr().err
    assert told.format(run=copy) in error
    assert error.count("\n") == 1
    assert [*copy.rglob("*")] == before


def test_run_in_progress_is_not_replayed(copy, capsys):
    with only_actor(copy):
        assert main([str(copy), "--step", "1"]) == 2
    assert "is the folder of a run in progress; stop it" in capsys.readouterr().err


def test_samples_are_kept_since_the_oldest_checkpoint(tmp_path):
    """Simulated: 300 steps, a checkpoint after every 10th, of which the two newest are kept."""
    first, *later = simulate(tmp_path, 300, starts=3)
    assert max(later) < 1.1 * first, "the samples of a later run take more bytes"
    folder = journal_dir(tmp_path)
    assert [*find_steps(folder, 1, 300).steps] == [*range(288, 301)], (
        "the steps kept do not start two before the oldest checkpoint"
    )
    of_both = "26 groups, each a prompt with its responses, of steps 288 to 300; `rlhf-triton replay` reads them"
    assert describe_samples(folder, 300, ahead=0) == of_both


@pytest.mark.parametrize("step", [1, 2, 3])
def test_fork_with_another_setting_differs_only_from_its_step_on(step, grpo, tmp_path, checkpoints, capsys):
    """Forks start at a checkpoint, at a step without one, and at step 0; an unchanged fork repeats the run."""
    for name, change in (("same", []), ("other", ["actor.algorithm.clip_ratio=0.001"])):
        folder = tmp_path / name
        options = ["--step", str(step), "--fork", str(folder), "actor.steps=3", "actor.optimizer.lr=1e-2"]
        assert main([str(grpo), *options, *change]) == 0
        assert capsys.readouterr().out.endswith(f"run.yaml continues with step {step}\n")
        server = Server()
        run = TrainingRun(config := load_config(folder / "run.yaml"), server)
        assert find_changes(config, accepted=False) == {}
        server.tokenizer = run.policy.tokenizer
        go(run)
    runs = [read_jsonl(folder / "metrics.jsonl") for folder in (grpo, tmp_path / "same", tmp_path / "other")]
    old, same, other = ([line["train_optim/loss"] for line in lines] for lines in runs)
    assert len(same) == 4 - step
    if step < 3:  # the run's own third step was repeated with another learning rate
        assert same[: 3 - step] == old[step - 1 : 2]
    assert other != same


class WithSidecar(Server):
    """A critic that a real sidecar trains, from a journal as a server would write it."""

    def __init__(self, config):
        super().__init__()
        self._journal = Journal(config.run.journal_dir, config.run.identity)
        self._instance = Instance(WeightsStore(config.run.weights_dir))
        self._stop = threading.Event()
        self._sidecar = threading.Thread(target=run_sidecar, args=(config, self._stop))

    def start(self):
        self._sidecar.start()
        self._instance.start()

    def close(self):
        self._stop.set()
        self._sidecar.join()
        self._instance.close()

    async def _result(self, entry):
        while (result := self._journal.result(entry)) is None:
            await asyncio.sleep(0.01)
        assert result.error is None
        return result

    async def train(self, payload, *, run_id, step):
        entry = self._journal.accept_training(train_payload(payload, Limits(1000)), run_id=run_id, step=step)
        result = await self._result(entry)
        return TrainAnswer(result.loss_mean or 0.0, result.weights_version)

    async def save(self, **given):
        return (await self._result(self._journal.accept_save(**given))).weights_version

    async def rewind(self, *, run_id, step):
        return (await self._result(self._journal.accept_rewind(run_id=run_id, target=step))).weights_version


def train_with_critic(config):
    """Train a run to its end; return the tensors of its last checkpoints, of policy and critic."""
    server = WithSidecar(config)
    run = TrainingRun(config, server)
    server.tokenizer = run.policy.tokenizer
    write_settings(config, {})
    server.start()
    try:
        go(run)
    finally:
        server.close()
    files = config.run.dir.glob(f"checkpoints/*/{config.actor.steps}/*.safetensors")
    return [{name: tensor.tolist() for name, tensor in load_file(file).items()} for file in sorted(files)]


def test_fork_continues_with_the_critic_of_its_step(tmp_path, checkpoints, capsys):
    """Forks start at a checkpoint and at a step without one; an unchanged fork trains both models as the run did."""
    folder = tmp_path / "run"
    policy, critic = train_with_critic(make_run(folder, checkpoints, actor={**SETTINGS, **PPO, "steps": 4}).config)
    assert main([str(folder), "--step", "1", "--to", "4"]) == 0
    assert capsys.readouterr().out.count(": identical, the critic too (") == 4
    for step, change in ((3, []), (4, []), (3, ["trainer.optimizer.lr=0.1"])):
        fork = tmp_path / f"fork {step} {change}"
        assert main([str(folder), "--step", str(step), "--fork", str(fork), *change]) == 0
        forked = train_with_critic(load_config(fork / "run.yaml"))
        assert forked[0] == policy, "the policy differs, although the server's values are always 0"
        assert (forked[1] == critic) == (not change)
        assert replay(fork, 4, 4) == 0
    shutil.rmtree(folder / "checkpoints" / "critic" / "2")
    assert main([str(folder), "--step", "3", "--fork", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert "--fork: the critic after step 2 is not kept: " in error
    assert error.endswith("; its checkpoints are of steps 4\n")
    assert not (tmp_path / "new").exists()


def test_fork_keeps_a_default_that_replaces_a_published_value():
    actor = {"algorithm": {"name": "sao"}, "kl": {"coef": 0.01}}
    config = RunConfig.model_validate({"actor": actor})
    assert parse_config(sections_of(config), "run.yaml", []).actor.kl == config.actor.kl
