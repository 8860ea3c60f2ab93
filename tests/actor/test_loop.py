"""Tests of `actor.loop` and `actor.run`: what a rollout waits for, staleness, and stops in each phase.

Fake servers answer, fail and wait on demand; tests/server has real ones.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import math
import os
import shutil
import signal
import string
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from live_system import make_run, validations_of
from run_checkpoints import TEXTS
from safetensors.torch import load_file
from samples import groups_of, make_batch, rewarded
from settings import actor_section
from tiny_tokenizers import save_chat_policy
from training_runs import PATIENCE_S, PPO, Crash, Server, by_text, go, go_until, make_ppo

import rlhf_triton.actor.loop
import rlhf_triton.actor.recording.recorder
from rlhf_triton.actor.algorithms import sample_metrics
from rlhf_triton.actor.algorithms.sample_metrics import rollout_metrics
from rlhf_triton.actor.data.compute import ComputeThread
from rlhf_triton.actor.data.prompt_files import PromptError
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.prompts import Positions
from rlhf_triton.actor.data.recorded import PolicyTurn
from rlhf_triton.actor.data.rollout_rows import row_of_response
from rlhf_triton.actor.loop import TrainingRun
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.policy.update import PolicyUpdate
from rlhf_triton.actor.replay.sample_journal import SampleJournal
from rlhf_triton.actor.run.collection import Collector
from rlhf_triton.actor.run.settings import CONTENTS_FILE
from rlhf_triton.actor.run.staleness import KEPT_VERSIONS, VersionSteps, needed_update
from rlhf_triton.actor.run.step import StepTraining
from rlhf_triton.actor.run.stopping import Stop, Stopped
from rlhf_triton.actor.run.timers import Timers
from rlhf_triton.actor.scoring.reference import ServedReference
from rlhf_triton.actor.scoring.scorer import Scorer
from rlhf_triton.checkpoints.special_tokens import special_tokens_in
from rlhf_triton.checkpoints.tokenization import fingerprint, num_embeddings
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.client.client import TrainAnswer
from rlhf_triton.client.errors import RequestFailed, ServerFailed
from rlhf_triton.client.served import ServedModel
from rlhf_triton.config.loading import load_config
from rlhf_triton.errors import NotFinite, RlhfError
from rlhf_triton.store.durable import read_json, write_json
from rlhf_triton.store.jsonl import read_jsonl
from rlhf_triton.store.sealed_folder import saved_steps
from rlhf_triton.tools.status import status

STEPS = 3


# ---- collect: what waits for what, and that the rows' order of ending never shows ----

PROMPTS = [Prompt(str(i), "", np.asarray(tokens)) for i, tokens in enumerate([[5, 6, 7], [8], [9, 10, 11, 12], [14]])]


@pytest.fixture(scope="module")
def policy(checkpoint):
    made = Policy(actor_section(model=checkpoint, max_new_tokens=12, generation_batch_size=2))
    made.model.lm_head.weight.data[made.eos_ids[0]] += 0.5  # responses end now and then
    return made


class InstantScorer:
    """Rewards a row with the sum of its tokens; a token's value is its id. `answer` may return an awaitable."""

    has_critic = True
    reward = ServedModel()

    def __init__(self, answer=lambda: None):
        self.asked = 0
        self._answer = answer

    async def score(self, rows, **_):
        self.asked += len(rows)
        answer = self._answer()
        if answer is not None:
            await answer
        scores = [rewarded(row.tokens.sum(), values=row.tokens.astype(np.float32), version=0) for (row,) in rows]
        return [(replace(row, score=score),) for (row,), score in zip(rows, scores, strict=True)]


async def collected(
    policy,
    server,
    *,
    reference=None,
    versions=None,
    called=lambda name: None,
    row_ends=lambda finished, *row: finished(*row),
    **actor,
):
    """`called` receives each call for the policy's thread after it has returned, `row_ends` each row that has ended."""

    class Watched(ComputeThread):
        async def __call__(self, function, *args, **kwargs):
            result = await super().__call__(function, *args, **kwargs)
            called(function.__name__)
            return result

    def add(job):
        job.finished = functools.partial(row_ends, job.finished)
        Policy.add(policy, job)

    policy.add = add
    scorer = server
    in_thread = Watched(1, torch.device("cpu"))
    collector = Collector(actor_section(**actor), policy, scorer, reference, in_thread)
    groups = collector.start(dict(enumerate(PROMPTS)), seed=2)
    for group in groups:
        if versions is None:
            group.versions.set_result(None)
        else:
            group.versions = versions
    try:
        found = await collector.complete(groups, timers=Timers())
    finally:
        await collector.sampling.cancel()
    return [group.conversations[0][-1] for group in found]


class Reference:
    """A served one, whose log-prob of a token is -0.01 times its id, but for what `change` makes of the answer."""

    def __init__(self, change=lambda row, found: None):
        self.asked = threading.Event()
        self._change = change

    async def logprobs(self, rows):
        self.asked.set()
        padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row[1:]) for row in rows], batch_first=True)
        found = np.array(torch.nn.functional.pad(-0.01 * padded, (0, 1)), np.float32)
        for row, line in zip(rows, found, strict=True):
            self._change(row, line)
        return found


async def test_rows_are_scored_while_others_are_generated_and_keep_their_own_scores(policy):
    """A row's end waits for requests: were rows sent when all are written, it would wait in vain."""
    order = []
    asked = threading.Event()
    server = Reference()
    reference = ServedReference(server, policy, Path())

    def hold(finished, index, row):
        order.append(index)
        finished(index, row)
        for event in (asked, server.asked):
            assert event.wait(PATIENCE_S), "no row was sent before the last was written"

    scorer = InstantScorer(asked.set)
    rows = await collected(policy, scorer, reference=reference, row_ends=hold)
    assert order != sorted(order), "the rows ended in the order of their prompts, which shows nothing"
    assert [row.prompt.prompt_id for row in rows] == ["0", "1", "2", "3"]
    assert len({len(row.tokens) for row in rows}) > 1
    for row in rows:
        tokens = row.tokens.tolist()
        assert tokens[: row.prompt.tokens.size] == row.prompt.tokens.tolist()
        assert (row.score.failure, row.score.reward, row.score.values.tolist()) == ("", sum(tokens), tokens)
        assert row.ref_logprobs.tolist() == pytest.approx([0, *(-0.01 * row.tokens[1:])])


async def test_missing_reference_logprobs_mask_the_row(policy):
    """A request is refused, another's answer is NaN, a third's is too short; the remaining row is unaffected."""

    def change(row, found):
        if row[0] == 8:
            raise RequestFailed("reference at host refused: too late")
        if row[0] == 14:
            found[row.size - 2] = np.nan
        else:
            found[0] = -np.inf  # a token of the prompt that sampling never draws

    class ThroughProxy(Reference):
        async def logprobs(self, rows):
            found = await super().logprobs(rows)
            return found[:, :1] if rows[0][0] == 9 else found

    reference = ServedReference(ThroughProxy(change), policy, Path())
    rows = await collected(policy, InstantScorer(), reference=reference)
    failures = [row.score.failure for row in rows]
    not_finite = "reference returned log-probs that are not finite for a response"
    assert (failures[:2], failures[3]) == (["", "reference at host refused: too late"], not_finite)
    assert f"logprobs of shape [1, 1], but [1, {len(rows[2].tokens)}] is expected" in failures[2]
    assert all(row.score.reward == row.tokens.sum() for row in rows)
    assert make_batch(rows, algorithm_name="reinforce++").mask.any(-1).tolist() == [True, False, False, False]


async def test_no_reference_is_loaded_or_asked_without_a_kl_penalty(policy, checkpoint):
    server = Reference()
    reference = ServedReference(server, policy, Path())
    rows = await collected(policy, InstantScorer(), reference=reference, kl_coef=0.0)
    assert not server.asked.is_set()
    assert all(row.ref_logprobs is None for row in rows)
    metrics = rollout_metrics(groups_of(rows), make_batch(rows, kl_coef=0.0), kl_coef=0.0)
    assert not any("kl_per_seq" in name for name in metrics)
    assert Policy(actor_section(model=checkpoint, kl_coef=0.0)).reference is None


async def test_only_scoring_waits_for_the_critic(policy):
    calls = []
    computed = threading.Event()

    def called(name):
        calls.append(name)
        if calls == ["decode", "sampled_logprobs", "logprobs"]:
            computed.set()

    server = InstantScorer()
    ready = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(collected(policy, server, versions=ready, called=called))
    assert await asyncio.to_thread(computed.wait, PATIENCE_S), f"only {calls} came about without the critic"
    assert server.asked == 0
    ready.set_result(None)
    assert not any(row.score.failure for row in await task)
    assert server.asked == len(PROMPTS)


async def test_collect_raises_and_leaves_no_task_if_the_critic_fails(policy):
    ready = asyncio.get_running_loop().create_future()
    ready.set_exception(RequestFailed("the critic's update was refused"))
    with pytest.raises(RequestFailed, match="was refused"):
        await collected(policy, InstantScorer(), versions=ready)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_cancelling_collect_stops_generation_and_requests(policy):
    """At the end of a run, its next rollout is still in progress."""
    written = threading.Event()
    go_on = threading.Event()

    def hold(finished, index, row):
        written.set()
        assert go_on.wait(PATIENCE_S)
        finished(index, row)

    server = InstantScorer(lambda: asyncio.sleep(PATIENCE_S))
    task = asyncio.create_task(collected(policy, server, row_ends=hold))
    assert await asyncio.to_thread(written.wait, PATIENCE_S)
    task.cancel()
    threading.Timer(0.1, go_on.set).start()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.asked == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


# ---- staleness: which update a step waits for, and which one a version contains ----


@pytest.mark.parametrize("every", [1, 2, 3, 5])
@pytest.mark.parametrize("max_staleness", [0, 1, 3, 4])
def test_needed_update_keeps_staleness_within_max_staleness(every, max_staleness):
    """Otherwise it would wait indefinitely, or be answered by weights that lack more than it allows."""
    for step in range(1, 40):
        needed = needed_update(step, max_staleness=max_staleness, every=every)
        assert needed % every == 0
        assert needed <= step - 1
        assert step - 1 - needed <= max(max_staleness, every - 1)
        assert every > 1 or needed == step - 1 - max_staleness


MONTHS = [(step + 7, step) for step in range(1, KEPT_VERSIONS + 200)]


@pytest.mark.parametrize(
    ("start", "rules", "answers", "contained"),
    [  # the first version and its step; (version, step) of each answer; version -> the updates in it
        pytest.param((6, 3), {}, [(7, 4), (8, 5)], {5: 0, 6: 3, 7: 4, 8: 5}, id="rewound to step 3, as version 6"),
        pytest.param((10, 4), {}, [(13, 7), (11, 5), (12, 6)], {10: 4, 11: 5, 12: 6, 13: 7}, id="in any order"),
        pytest.param((0, 0), {}, [(1, 1), (3, 2)], {2: 1, 3: 2, 4: 2}, id="no answer has named versions 2 and 4"),
        pytest.param((0, 0), {"every": 3}, [(0, 2), (1, 3), (1, 4), (2, 6)], {0: 0, 1: 3, 2: 6}, id="rare publishing"),
        pytest.param((0, 0), {"manifest_step": {2: 1}.get}, [(2, 2)], {2: 1}, id="a manifest knows of a rollback"),
        pytest.param((0, 0), {}, MONTHS, {KEPT_VERSIONS: KEPT_VERSIONS - 7, 8: 0}, id="the newest are remembered"),
    ],
)
def test_version_steps_map_a_version_to_its_last_update(start, rules, answers, contained):
    steps = VersionSteps(*start, **{"every": 1, **rules})
    for version, step in answers:
        steps.record(version, step)
    assert len(steps._steps) <= KEPT_VERSIONS
    assert {version: steps.step_of(version) for version in contained} == contained


def test_staleness_is_logged_as_maximum_mean_and_histogram():
    name = "train_rollouts/staleness"
    rows = {"0": 6, "2": 2}
    found = VersionSteps(1, 5, every=1).metrics([1] * 5 + [0] * 2 + [2], sent=2)
    assert {**found, f"{name}_rows": {}} == {name: 2.0, f"{name}_mean": 0.5, f"{name}_rows": {}}
    assert found[f"{name}_rows"] == rows


FIRST_VERSION = 17
SMALL = {"validation_size": 0, "rollout_size": 4, "max_new_tokens": 3}


class SlowCritic(Server):
    """A critic that serves an update only when the actor waits for it, and fails some of them."""

    def __init__(self, *, fails=(), waits_for_save=False):
        super().__init__()
        self.fails = fails
        self.awaited = 0  # the last update that the actor has waited for
        self.version = FIRST_VERSION
        self.trained = 0
        self.may_train = asyncio.Event()
        if not waits_for_save:
            self.may_train.set()

    async def rewind(self, **_):
        return FIRST_VERSION

    async def train(self, payload, *, run_id, step):
        await self.may_train.wait()
        while self.trained < step - 1 or (self.awaited < step and step not in self.fails):
            await asyncio.sleep(0.001)
        self.trained = step
        if step in self.fails:
            raise ServerFailed(f"critic_train refused: the gradients of {step} are not finite")
        self.version += 1
        return TrainAnswer(0.0, self.version)

    async def save(self, *, step, **_):
        self.may_train.set()
        while self.trained < step:
            await asyncio.sleep(0.001)
        return self.version


def watched_run(folder, checkpoints, critic, **actor):
    """A run that tells the critic what it waits for."""
    run = make_ppo(folder, checkpoints, critic, **SMALL, **actor)
    served = run.critic.wait_served

    async def watched(step):
        critic.awaited = max(critic.awaited, step)
        return await served(step)

    run.critic.wait_served = watched
    return run


def test_max_minutes_drops_a_rollout_but_no_update(tmp_path, checkpoints, caplog):
    """The prefetched rollout is waiting for the last update when it is dropped: the checkpoint names that step."""
    critic = SlowCritic(waits_for_save=True)
    caplog.set_level("INFO")
    limits = {"max_minutes": 1e-6, "max_staleness": 0, "max_off_policy_steps": 1, "old_logprobs": "sampler"}
    summary = go(watched_run(tmp_path, checkpoints, critic, **limits))
    assert critic.trained == summary["steps"] == 1
    assert summary["weights_version"] == FIRST_VERSION + 1
    (ended,) = [record for record in caplog.records if record.message.startswith("ended: actor.max_minutes (1e-06) ")]
    assert ended.levelname == "INFO", "the end of the run is logged as a problem"


def test_run_continues_after_failed_critic_updates(tmp_path, checkpoints, caplog):
    """Step 4 is the last one, so the failure occurs in the middle of the run and at its end."""
    summary = go(watched_run(tmp_path, checkpoints, SlowCritic(fails=(1, 4)), steps=4, checkpoint_every=2))
    assert (summary["failed_critic_updates"], summary["weights_version"]) == (2, FIRST_VERSION + 2)
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["client/failed_critic_updates"] == 1
    assert all(f"the gradients of {step} are not finite" in caplog.text for step in (1, 4))
    timeline = read_jsonl(tmp_path / "timeline.jsonl")
    timed = [line["step"] for line in timeline if line["phase"] == "critic_update"]
    assert sorted(timed) == [1, 2, 3, 4], "the time of a failed update is missing"


def environment_run(folder, checkpoints, name, columns, **actor):
    """A GRPO run with a test environment; each prompt has its own `columns`, and the turns of the policy end soon."""
    prompts = folder / "prompts.jsonl"
    classes = Path(__file__).parents[1] / "support" / "environment_classes.py"
    rows = [{"text": text, **more} for text, more in zip(TEXTS, columns, strict=False)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {**SMALL, "algorithm_name": "grpo", "responses_per_prompt": 2, "prompts_path": str(prompts)}
    environment = {"class": f"{classes}:{name}", "max_tokens": 200, "max_turns": 3}
    actor = {**settings, "steps": 2, "stop_strings": [*string.ascii_lowercase], **actor}
    made = make_run(folder / "run", checkpoints, actor=actor, environment=environment, rewards={"model": {}})
    run = TrainingRun(made.config, server := Server())
    server.tokenizer = run.policy.tokenizer
    return run


def test_step_with_only_truncated_conversations_changes_no_weights(tmp_path, checkpoints, caplog):
    limits = {"kl_coef": 0.1, "kl_target": 1.0, "max_resampled": 1, "stop_strings": []}
    run = environment_run(tmp_path, checkpoints, "Countdown", [{"turns": 99}] * 4, **limits)
    before = [parameter.clone() for parameter in run.policy.model.parameters()]
    go(run)
    assert all(map(torch.equal, before, run.policy.model.parameters()))
    by_hand = {"train_rollouts/truncated": 1.0, "train_optim/minibatches": 0.0, "train_rollouts/kl_coef": 0.1}
    for line in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        assert {key: line[key] for key in by_hand} == by_hand
        assert None not in line.values()
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
    assert caplog.text.count("4 of 4 responses are excluded from the update") == 2


def test_failed_environments_of_dropped_groups_are_counted(tmp_path, checkpoints):
    """The environments of every other prompt fail, so its group has no spread; dynamic sampling replaces it."""
    columns = [{"turns": -2}, {"turns": 2}] * 4
    settings = {"max_resampled": 5, "max_failed_fraction": 0.99, "validation_size": 0, "rollout_size": 8}
    go(environment_run(tmp_path, checkpoints, "Logged", columns, **settings))
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert any(line["train_rollouts/resampled_prompts"] for line in lines)
    for line in lines:
        sampled = line["train_rollouts/rollout_size"] + 2 * line["train_rollouts/resampled_prompts"]
        failed = line["train_rollouts/masked_samples"]
        assert line["train_rollouts/failed_environments"] == pytest.approx(failed / sampled) != 0


def test_run_masks_a_conversation_that_shows_the_policy_a_token_without_embedding(tmp_path, checkpoints):
    """The policy's log-probs are computed for every row of the step, also for those that failed."""
    policy = shutil.copytree(checkpoints.policy, tmp_path / "policy")
    tokenizer = load_tokenizer(policy)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|extra|>"]})
    tokenizer.save_pretrained(policy)
    columns = [{"name": "<|extra|>"}, {}]
    settings = {"model": str(policy), "max_failed_fraction": 0.5, "validation_size": 0}
    go(environment_run(tmp_path, checkpoints, "Doing", columns, **settings))
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["train_rollouts/masked_samples"] for line in lines] == [2.0, 2.0]


# ---- stops: signals ----

PROGRAM = """
import asyncio, logging, sys
from rlhf_triton.actor.run.stopping import (Stop, Stopped, stop_on_signals)

async def main():
    stop = Stop()
    stop_on_signals(stop, float(sys.argv[1]))
    print("ready", flush=True)
    try:
        await stop.or_done(asyncio.sleep(600))
    except Stopped:
        print("leaving", flush=True)
    if sys.argv[2] == "hang":
        stop.saved = lambda: 7
        await asyncio.sleep(600)

logging.basicConfig()
asyncio.run(main())
"""
ELSEWHERE = """
import os, signal, sys, threading
def send():
    sys.stdin.readline()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.kill(os.getpid(), signal.SIGTERM)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
threading.Thread(target=send).start()
"""


@contextlib.contextmanager
def started(grace_s, then, program=PROGRAM):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", program, str(grace_s), then], text=True, **pipes)
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def test_first_signal_stops_gracefully_second_at_once():
    with started(600, "hang") as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "leaving\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == -signal.SIGTERM


def test_stop_ends_a_wait_that_the_signal_did_not_interrupt():
    """It came just before the event loop began to wait; here: another thread of the process takes it."""
    with started(600, "leave", ELSEWHERE + PROGRAM) as process:
        assert process.communicate("go\n", timeout=PATIENCE_S)[0] == "leaving\n"
        assert process.returncode == 0


def test_grace_period_is_bounded():
    with started(0.1, "hang") as process:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "stopped after step 7, whose checkpoint is written: the grace period of 0.1 s expired; the next" in errors


async def test_or_done_returns_finished_work_and_cancels_pending_work_on_stop():
    stop = Stop()
    works = [asyncio.ensure_future(asyncio.sleep(600)) for _ in range(2)]
    assert await stop.or_done(asyncio.sleep(0, "result")) == "result"
    waiting = asyncio.ensure_future(stop.or_done(works[0]))
    await asyncio.sleep(0)
    waiting.cancel()  # by somebody else
    with pytest.raises(asyncio.CancelledError):
        await waiting
    stop.request()
    with pytest.raises(Stopped):
        await stop.or_done(works[1])
    assert all(work.cancelled() for work in works)


# ---- ends and sizes: what tokenizer, embeddings, generation config and chat template say of them ----


@pytest.mark.device
def test_run_trains_a_base_model_with_padded_vocabulary_and_two_eos_ids(tmp_path, checkpoints):
    """The model is like Qwen2.5's base models: no id beyond the tokenizer is sampled, and responses end."""
    start = tmp_path / "start"
    policy = tmp_path / "run" / "policy"
    tokenizer = save_chat_policy(start, more=16, eos_token="<|endoftext|>")
    settings = {"model": str(start), "lora_rank": 0, "prompts_max_tokens": 40}
    run = make_grpo(tmp_path / "run", checkpoints, **settings)
    run.policy.causal(run.policy.model).lm_head.weight.data[tokenizer.convert_tokens_to_ids("<|im_end|>")] -= 0.5
    batches = watched_batches(run)
    go(run)
    line = read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]
    assert 0 < line["train_rollouts/fraction_of_samples_properly_ended"] < 1
    assert math.isfinite(line["train_optim/grad_norm"])
    assert max(int(batch.tokens.max()) for batch in batches) < len(tokenizer)
    written = read_json(policy / "generation_config.json")
    special = special_tokens_in(policy)
    assert written["eos_token_id"] == special.eos_ids == run.policy.eos_ids == [0, 2]
    assert (written["pad_token_id"], special.template_end, special.banned_ids) == (0, None, run.policy.banned_ids)
    assert (num_embeddings(policy), fingerprint(load_tokenizer(policy))) == (176, fingerprint(tokenizer))
    assert load_tokenizer(policy).chat_template == tokenizer.chat_template


def test_steps_without_signal_are_counted(tmp_path, checkpoints):
    summary = go(make_grpo(tmp_path, checkpoints, Server(lambda _: 1.0), validation_size=0))
    assert summary["steps_without_signal"] == 3


# ---- stops: a run that leaves in the middle of each phase of a step ----


def make_grpo(folder, checkpoints, server=None, **settings):
    """Groups and adapters: everything that a checkpoint holds, but for a critic."""
    actor = {
        "algorithm_name": "grpo",
        "responses_per_prompt": 2,
        "lora_rank": 2,
        "warmup_steps": 5,
        "min_lr": 1e-4,
        "steps": STEPS,
        "checkpoint_every": 100,
        "validation_size": 2,
        "validation_every": 2,
        "lr": 1e-2,
    }
    return make_ppo(folder, checkpoints, server, **{**actor, **settings})


def ends(folder):
    """Return what the end of a run leaves, except times."""
    return [*trained(folder), *validations_of(folder)]


def trained(folder):
    """The last checkpoint and the metrics of all steps."""
    checkpoint = folder / "checkpoints" / "actor" / str(STEPS)
    lines = [
        {name: value for name, value in line.items() if name.startswith(("step", "train_"))}
        for line in read_jsonl(folder / "metrics.jsonl")
    ]
    (file,) = checkpoint.glob("*.safetensors")
    tensors = {name: tensor.tolist() for name, tensor in load_file(file).items()}  # their order in the file may differ
    return [tensors, lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, checkpoints):
    """The run that nothing stops."""
    folder = tmp_path_factory.mktemp("whole")
    go(make_grpo(folder, checkpoints))
    assert validations_of(folder)[0][1]["step"] == 2, "no validation is left to interrupt"
    return ends(folder)


@pytest.mark.parametrize("settings", [{"max_off_policy_steps": 1, "old_logprobs": "sampler"}, {"max_resampled": 20}])
def test_bad_prompt_row_ends_the_run_after_saving_the_last_complete_step(tmp_path, checkpoints, settings):
    """Whether the row is prefetched or resampled; once it is repaired, the run continues where it was."""
    rows = [json.dumps({"text": text}) for text in TEXTS[:4] * 6]
    bad = int(np.random.default_rng([0, 0]).permutation(len(rows))[-1])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join([*rows[:bad], '{"text": "Open \\ud83d it."}', *rows[bad + 1 :]]))
    settings = {"rollout_size": 4, "prompts_path": str(prompts), "steps": 30, "validation_size": 0, **settings}
    with pytest.raises(PromptError) as caught:
        go(make_grpo(tmp_path / "run", checkpoints, **settings))
    (step,) = saved_steps(tmp_path / "run" / "checkpoints" / "actor")
    assert str(caught.value).startswith(f"{prompts}:{bad + 1}: text: '\\ud83d' is half a character")
    assert f"the run stopped after step {step}, whose checkpoint is written; the next" in str(caught.value)
    assert [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [*range(1, step + 1)]
    prompts.write_text("\n".join(rows))
    go(make_grpo(tmp_path / "run", checkpoints, **{**settings, "steps": step + 1}))


def rewards_of_the_first(count):
    """Reward as many responses, and none from then on."""
    calls = itertools.count()
    return lambda text: by_text(text) if next(calls) < count else math.nan


def failing_call(owner, name, call, error):
    """Raises the error in the n-th call of a method of the run's parts."""

    def prepare(run):
        part = getattr(run, owner) if owner else run
        original = getattr(part, name)
        calls = []

        def fails(*args, **kwargs):
            calls.append(None)
            if len(calls) == call:
                raise error
            return original(*args, **kwargs)

        setattr(part, name, fails)

    return prepare


def gradient_is_not_finite(run, after=2):
    """Make the gradient NaN from the third optimizer step on."""
    step = run.policy_update._step

    def poisoned():
        if run.policy.trained.optimizer_step == after:
            next(p for p in run.policy.model.parameters() if p.grad is not None).grad.fill_(math.nan)
        return step()

    run.policy_update._step = poisoned


OFF_POLICY = {"max_off_policy_steps": 1, "old_logprobs": "sampler"}
ENDS = {
    "rewards": (lambda run: None, RlhfError, "4 of 4 rewards are unavailable"),
    "gradient": (gradient_is_not_finite, NotFinite, "the policy's gradient is not finite at optimizer step 2"),
    "batch": (failing_call("training", "make_batch", 3, RuntimeError("a bug")), RuntimeError, "a bug"),
    "disk": (failing_call("rollouts", "take", 3, OSError(5, "disk")), OSError, "disk"),
}


SHORT = {"rollout_size": 4, "validation_size": 0, "normalization": "running", "warmup_steps": 1}


@pytest.fixture(scope="module")
def whole_short(tmp_path_factory, checkpoints):
    """The run with the settings `SHORT` that nothing ends."""
    folder = tmp_path_factory.mktemp("whole")
    go(make_grpo(folder, checkpoints, **SHORT))
    return trained(folder)


@pytest.mark.parametrize(("end", "settings"), [*((end, {}) for end in ENDS), ("gradient", OFF_POLICY)], ids=str)
def test_run_saves_its_last_complete_step_after_any_end(tmp_path, checkpoints, whole_short, end, settings, caplog):
    """The next start continues as if the run had never ended."""
    prepare, kind, told = ENDS[end]
    shown = {**SHORT, **settings}
    run = make_grpo(
        tmp_path / "run", checkpoints, Server(rewards_of_the_first(8)) if end == "rewards" else None, **shown
    )
    prepare(run)
    with pytest.raises(kind, match=told) as caught:
        go(run)
    where = "the run stopped after step 2, whose checkpoint is written; the next start resumes from the newest check"
    assert where in (str(caught.value) if isinstance(caught.value, RlhfError) else caplog.text)
    assert saved_steps(tmp_path / "run" / "checkpoints" / "actor") == [2]
    assert read_json(tmp_path / "run" / "policy" / "policy.json") == {"step": 2}
    go(make_grpo(tmp_path / "run", checkpoints, **shown))
    if not settings:  # otherwise a resumed run's first rollout is of a newer policy
        assert trained(tmp_path / "run") == whole_short


def nan_weights(run):
    """Make the weights NaN after the second step."""
    renew = run.policy.renew_generator
    calls = []

    def poisoned(policy_step):
        calls.append(None)
        if len(calls) == 3:
            with torch.no_grad():
                next(p for p in run.policy.model.parameters() if p.requires_grad).fill_(math.nan)
        renew(policy_step)

    run.policy.renew_generator = poisoned


@pytest.mark.parametrize(
    ("prepare", "lost"),
    [
        (functools.partial(gradient_is_not_finite, after=5), "the policy's update of step 3 had started"),
        (nan_weights, "its weights are not finite"),
        (failing_call("samples", "add_step", 3, NotFinite("")), "the policy's update of step 3 had started"),
    ],
)
def test_incomplete_steps_are_not_checkpointed(tmp_path, checkpoints, prepare, lost):
    run = make_grpo(tmp_path, checkpoints, rollout_size=4, minibatch_size=2, validation_size=0)
    prepare(run)
    with pytest.raises(NotFinite) as caught:
        go(run)
    assert f"the run stopped after step 2, which has no checkpoint: {lost}; the next start begins at" in str(
        caught.value
    )
    assert not saved_steps(tmp_path / "checkpoints" / "actor")


def test_stop_keeps_the_checkpoint_before_its_own(tmp_path, checkpoints):
    """The critic, whose server was lost, may never receive the update of the last step."""
    settings = {"checkpoint_every": 1, "keep_checkpoints": 1, "validation_size": 0, "warmup_steps": 0}
    go(make_grpo(tmp_path, checkpoints, **settings, steps=1))
    run = make_grpo(tmp_path, checkpoints, **{**settings, "checkpoint_every": 100})
    failing_call("policy", "decode", 2, RequestFailed("lost"))(run)
    with pytest.raises(RequestFailed):
        go(run)
    assert saved_steps(tmp_path / "checkpoints" / "actor") == [1, 2]


def test_failures_of_groups_that_were_replaced_count(tmp_path, checkpoints):
    """Only the first of two prompts has rewards: half are missing, which is allowed, then two thirds."""
    seen = []

    def reward(text):
        seen.append(text[:5])
        return float(len(seen)) if text[:5] == seen[0] else math.nan

    settings = {**SHORT, "max_resampled": 3, "max_failed_fraction": 0.5}
    with pytest.raises(RlhfError, match="4 of 6 rewards are unavailable"):
        go(make_grpo(tmp_path, checkpoints, Server(reward), **settings))


def test_run_with_dead_rewards_stops_before_it_resamples(tmp_path, checkpoints):
    scored = []
    server = Server(lambda text: scored.append(text) or math.nan)
    with pytest.raises(RlhfError, match="8 of 8 rewards are unavailable"):
        go(make_grpo(tmp_path, checkpoints, server, rollout_size=8, max_resampled=20, validation_size=0))
    assert len(scored) == 8


def watched_batches(run):
    """The batches of all updates, once the run has ended."""
    batches = []
    update = run.policy_update.run

    def watched(batch, **kwargs):
        batches.append(batch)
        return update(batch, **kwargs)

    run.policy_update.run = watched
    return batches


@pytest.mark.parametrize(
    ("owner", "name", "call", "done"),
    [
        ("policy", "decode", 1, 0),  # the validation before the first step
        ("policy.generator", "disable_adapter", 3, 1),  # for the reference
        ("policy_update", "run", 2, 2),
        ("policy", "decode", 4, 2),  # the validation after step 2
    ],
)
def test_stopped_run_resumes_after_its_last_complete_step(tmp_path, checkpoints, whole, owner, name, call, done):
    run = make_grpo(tmp_path, checkpoints)
    message = go_until(run, functools.reduce(getattr, owner.split("."), run), name, call)
    saved = f"after step {done}, whose checkpoint is written; the next start resumes from the newest checkpoint"
    assert message == f"stopped {saved if done else 'before the first step ended; the next start begins at step 1'}"
    assert saved_steps(tmp_path / "checkpoints" / "actor") == ([done] if done else [])
    assert read_json(tmp_path / "policy" / "policy.json") == ({"step": done} if done else None)
    assert run.stop.saved() == done  # so that the end of the grace can say so
    go(make_grpo(tmp_path, checkpoints))
    assert ends(tmp_path) == whole


@pytest.mark.parametrize(("name", "call", "crash"), [("decode", 9, True), ("decode", 14, False), ("logprobs", 4, True)])
def test_each_prompt_trains_once_after_any_end_with_groups_in_flight(tmp_path, checkpoints, name, call, crash):
    """None is lost or repeated, however many of later steps were in flight, and no token is older than allowed."""
    ahead = {"max_off_policy_steps": 2, "correction": {"mode": "clip"}}
    settings = {**SHORT, **ahead, "steps": 8, "checkpoint_every": 2, "logged_texts": 4}
    run = make_grpo(tmp_path, checkpoints, **settings)
    go_until(run, run.policy, name, call, crash=crash)
    go(make_grpo(tmp_path, checkpoints, **settings))
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(1, 9)]
    assert max(line["train_rollouts/policy_staleness"] for line in lines) <= 2
    assert any(line["train_optim/importance"] != 1.0 for line in lines)
    in_order = [prompt.text for prompt, _ in run.inputs.read(8 * 2, Positions()) for _ in range(2)]
    assert [line["prompt"] for line in read_jsonl(tmp_path / "rollouts.jsonl")] == in_order


AHEAD = {
    **SHORT,
    "max_off_policy_steps": 2,
    "correction": {"mode": "clip"},
    "steps": 6,
    "checkpoint_every": 2,
    "logged_texts": 4,
}


def crash_in_the_fourth_update(run):
    """Run until then; the checkpoint of step 2 is the newest, and no response is being sampled."""
    update = run.policy_update.run
    calls = []

    def crash_in_the_fourth(*given, **named):
        while run.policy.has_jobs:
            time.sleep(0.001)
        calls.append(None)
        if len(calls) == 4:
            raise Crash("crashed")
        return update(*given, **named)

    run.policy_update.run = crash_in_the_fourth
    with pytest.raises(Crash):
        go(run)


def test_resumed_run_takes_the_groups_that_were_sampled_ahead(tmp_path, checkpoints):
    """Groups of steps 3 to 5 were sampled with the checkpoint's weights or older ones; those of step 6 were not."""
    crash_in_the_fourth_update(make_grpo(tmp_path, checkpoints, **AHEAD))
    before = [line for line in read_jsonl(tmp_path / "rollouts.jsonl") if line["step"] == 3]
    *_, samples = status(load_config(tmp_path / "run.yaml"))
    assert samples.endswith("of steps 1 to 3; `rlhf-triton replay` reads them; sampled ahead: 6 groups, policy lag 2")
    again, other = (make_grpo(tmp_path, checkpoints, **AHEAD, temperature=each) for each in (1.0, 0.5))
    changed = make_grpo(tmp_path, checkpoints, **AHEAD)
    changed.policy.fingerprint = "of another model"
    changed.samples = SampleJournal(load_config(tmp_path / "run.yaml"), changed.samples._state)
    write_json(tmp_path / CONTENTS_FILE, {"environment.class": "of an edited file"})
    edited = make_grpo(tmp_path, checkpoints, **AHEAD)
    for each, count in ((again, 6), (other, 0), (changed, 0), (edited, 0)):
        each.inputs.record(2, Positions(4))
        assert len(each.samples.sampled(2)) == count, "groups of other settings, files, models or prompts are kept"
    found = []
    start = again.collector.start_sampled
    again.collector.start_sampled = lambda rows: (found.append(rows[0][0].prompt.text), start(rows))[1]
    go(again)
    lines = read_jsonl(tmp_path / "rollouts.jsonl")
    assert found == [line["prompt"] for line in lines if line["step"] in (3, 4, 5)][::2]
    assert [line for line in lines if line["step"] == 3] == before


def test_response_that_could_not_be_sampled_is_masked_and_sampled_again_after_a_resume(tmp_path, checkpoints):
    """The run continues without it. As a sample ahead, it would fail each resumed run again."""
    run = make_grpo(tmp_path, checkpoints, **AHEAD, max_failed_fraction=0.5)
    add = run.policy.add

    def lose_the_first(job):
        finished = job.finished
        prompt = job.prompts.get(0)

        def report(index, conversation):
            if index == 0 and prompt is not None:
                conversation = (row_of_response(prompt, PolicyTurn([], False, [], [], error="too late")),)
            finished(index, conversation)

        add(replace(job, finished=report))

    run.policy.add = lose_the_first
    crash_in_the_fourth_update(run)
    assert [line["train_rollouts/masked_samples"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 1, 1]
    again = make_grpo(tmp_path, checkpoints, **AHEAD, max_failed_fraction=0.0)
    again.inputs.record(2, Positions(4))
    assert sorted(again.samples.sampled(2)) == [5, 7, 9], "other groups than the second of each step are kept"
    go(again)
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 6


def test_kl_coefficient_adapts_only_after_the_critics_warmup(tmp_path, checkpoints):
    """During the warm-up only the critic trains, and the KL is 0 whatever the coefficient."""
    settings = {**PPO, "critic_warmup_steps": 1, "warmup_steps": 0, "kl_coef": 0.1, "kl_target": 1.0}
    go(make_grpo(tmp_path, checkpoints, **settings))
    coefs = [line["train_rollouts/kl_coef"] for line in read_jsonl(tmp_path / "metrics.jsonl")]
    assert coefs[0] == coefs[1] == 0.1 > coefs[2]


def test_stop_ends_a_wait_for_the_critics_update_or_rewind(tmp_path, checkpoints):
    """The run stops during the wait for the last update; its next start stops during the rewind."""
    run, again = (make_grpo(tmp_path, checkpoints, **PPO) for _ in range(2))
    awaited = []

    async def served(step):
        awaited.append(step)
        if awaited.count(STEPS) == 1:  # the server is away
            await rewind(run)

    async def rewind(run=again, **_):
        run.stop.request()
        await asyncio.Event().wait()

    run.critic.wait_served = served
    with pytest.raises(Stopped, match=f"after step {STEPS}, whose checkpoint is written"):
        go(run)
    again.critic._client.rewind = rewind
    with pytest.raises(Stopped, match=r"^stopped before it had resumed; the next start resumes from the newest checkp"):
        go(again)


@pytest.mark.device
def test_an_abandoned_rollout_ends_at_its_next_forward(tmp_path, checkpoints):
    """No forward pass runs after the run has abandoned the rollout, even in the middle of a response."""
    run = make_grpo(tmp_path, checkpoints, **OFF_POLICY)
    forwards = []
    run.policy.generator.get_input_embeddings().register_forward_hook(lambda *_: forwards.append(None))
    go_until(run, run.policy, "decode", 2)
    counted = len(forwards)
    with pytest.raises(asyncio.CancelledError):
        run.policy.generator(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    assert len(forwards) == counted


LONG = [
    (os, "fsync"),
    (sample_metrics, "distinct_bigrams"),
    (rlhf_triton.actor.recording.recorder, "read_texts"),
    (rlhf_triton.actor.loop, "critic_payload"),
    (StepTraining, "make_batch"),
    (Policy, "decode"),
    (Policy, "logprobs"),
    (PolicyUpdate, "run"),
    (Scorer, "text_inputs"),
]


def test_long_calls_run_in_threads_off_the_event_loop(tmp_path, checkpoints, monkeypatch):
    """On the event loop, a long call would delay responses past their deadlines."""
    threads = {}

    def noted(name, function):
        def note(*args, **kwargs):
            threads.setdefault(name, set()).add(threading.get_ident())
            return function(*args, **kwargs)

        return note

    for owner, name in LONG:
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    go(make_ppo(tmp_path, checkpoints, steps=1, rollout_size=4, max_new_tokens=3))
    assert threads.keys() == {name for _, name in LONG}
    assert threading.get_ident() not in set().union(*threads.values())
