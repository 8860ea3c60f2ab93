"""`actor.run.checkpoints`, `recorder`, `settings` and `metrics`: resuming, pruning of checkpoints, the best policy,
settings that may not change, and the metrics in Prometheus, files and trackers.
"""

import asyncio
import json
import logging
import math
import shutil
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from live_system import make_run
from prompts import one_prompt
from safetensors.torch import save_file
from samples import a_sample, rewarded
from settings import nested
from tiny_checkpoints import change_config

import rlhf_triton.tools.run
from rlhf_triton.actor.algorithms.kl import KLControl
from rlhf_triton.actor.algorithms.stages import RewardShaper
from rlhf_triton.actor.recording.learning_warnings import ConstantTerms, LearningWarnings
from rlhf_triton.actor.recording.metrics import ActorMetrics, MetricsLog
from rlhf_triton.actor.recording.recorder import Recorder
from rlhf_triton.actor.recording.trackers import Trackers
from rlhf_triton.actor.run.checkpoints import RunCheckpoints, RunState
from rlhf_triton.actor.run.remote_critic import RemoteCritic
from rlhf_triton.actor.run.settings import describe_changes, find_changes, write_settings
from rlhf_triton.actor.run.validation import Validation
from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.client.errors import RequestFailed
from rlhf_triton.client.retry import RequestCounters
from rlhf_triton.config.actor import ActorSection, PolicySection, Tracker
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.optimizer import OptimizerSection
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.jsonl import read_jsonl
from rlhf_triton.store.sealed_folder import saved_steps
from rlhf_triton.store.weights import Origin, WeightsStore
from rlhf_triton.training_engine.ranks import ALONE
from rlhf_triton.training_engine.trained import TrainedModel
from rlhf_triton.wire.contract import STEP_AHEAD

SHARD = "shard-00001-model-00001-of-00001.safetensors"


class TinyPolicy:
    """The parts of a policy that checkpoints save, without generation."""

    ranks = ALONE

    def __init__(self, **settings):
        self.settings = PolicySection(**settings)
        self.model = torch.nn.Linear(2, 2)
        self.trained = TrainedModel(
            self.model, self.settings, OptimizerSection(), section="actor.policy", remedy="none", total_steps=0
        )
        self.fingerprint = "of its start"

    def save(self, folder):
        save_file(self.model.state_dict(), folder / "model.safetensors")


class Server:
    """Records critic_save; refuses it while `fails` is set, which a real server does not do on demand."""

    def __init__(self):
        self.counters = RequestCounters()
        self.saved = []
        self.rewound = []
        self.fails = False
        self.received = 1000  # the newest step that the critic has been sent

    async def save(self, *, run_id, step, keep_steps):
        if self.fails:
            raise RequestFailed("critic_save is away")
        self.saved.append((step, keep_steps))
        return step

    async def rewind(self, *, run_id, step):
        if step > self.received:
            why = f"rewind_to: {step}, {STEP_AHEAD} 'test' is {self.received}"
            raise RequestFailed(f"critic_save refused: {why}", why)
        self.rewound.append(step)
        return 70 + step


@pytest.fixture
def server():
    return Server()


class Recorded:
    """The objects with which a run records, before and after `start`."""

    def __init__(self, folder, server, reference_folder=Path("start"), **actor):
        settings = nested(ActorSection, {"keep_checkpoints": 2, "steps": 4, "validation_every": 1, **actor})
        sections = {"run": {"dir": folder}, "actor": settings, "reference": {"model": reference_folder}}
        self.config = RunConfig.model_validate(sections)
        self.policy = TinyPolicy()
        shaper = RewardShaper(self.config.actor.rewards, max_new_tokens=9)
        kl = KLControl(self.config.actor.kl.coef, target=self.config.actor.kl.target)
        self.state = RunState(self.policy, shaper, kl, one_prompt())
        client = server
        self.critic = RemoteCritic(client, self.config.run, is_trained=True, publish_every=1)
        self.checkpoints = RunCheckpoints(self.config, self.state, self.critic)

    async def start(self):
        """Resume; return the recorder of the next steps."""
        first_step = await self.checkpoints.resume() + 1
        return Recorder(self.config, self.state, self.critic, RequestCounters(), first_step=first_step)

    async def save(self, *steps):
        for step in steps:
            await self.checkpoints.save(step)
            await asyncio.gather(*self.critic._saves)


def validation(reward, version=None):
    """Return a validation with the fields that are logged."""
    score = rewarded(reward, reward_version=version)
    return Validation([(a_sample([1, 1], score=score),)], 0.5, None)


async def validates(run, *results):
    """Record validations of these steps in a new start; return its recorder, and the best step after each."""
    recorder = await run.start()
    best = []
    file = run.config.run.dir / "best" / "best.json"
    for step, result in results:
        await recorder.validations.add("between", step, result, seconds=0.1)
        best.append(json.loads(file.read_text())["step"] if file.exists() else None)
    return recorder, best


@pytest.mark.parametrize(
    ("components", "prompt", "warnings"),
    [  # values of each step's two responses by term
        ([{"a": [1.0, 1.0]}] * 4, "Why?", ["the reward 'a' is 1 for all 6 responses of the first 3 steps"]),
        ([{"a": [0.0, math.nan], "b": [0.0, 0.5]}] * 4, "<think>\n", ["the reward 'a' is 0 for all 6 responses"]),
        ([{"a": [0.0, 0.0]}, {"a": [0.0, 1.0]}, *[{"a": [0.0, 0.0]}] * 2], "Why?", []),
        ([{}] * 4, "Why?", ["the reward is 0.5 for all 6 responses"]),
    ],
)
def test_reward_term_that_stays_constant_is_warned_about_once(components, prompt, warnings, caplog):
    constants = ConstantTerms(3)
    row = a_sample([1, 1])
    row = replace(row, prompt=replace(row.prompt, text=prompt))
    for step in components:
        terms = [{name: each[i] for name, each in step.items()} for i in range(2)]
        constants.add([(replace(row, score=rewarded(0.5, components=each)),) for each in terms])
    assert [message[: len(begin)] for message, begin in zip(caplog.messages, warnings, strict=True)] == warnings
    assert ("end with <think>, which" in caplog.text) == (prompt == "<think>\n" and bool(warnings))


# ---- checkpoints ----


async def test_resume_rewinds_the_critic_to_the_step_of_the_actors_checkpoint(tmp_path, server):
    run = Recorded(tmp_path, server)
    resumed = Recorded(tmp_path, server)
    await run.checkpoints.resume()
    run.critic.weights_version = 91  # as with each answer
    await run.save(3)
    state = json.loads((tmp_path / "checkpoints" / "actor" / "3" / "state.json").read_text())
    assert (state["step"], state["weights_version"]) == (3, 91)
    assert await resumed.checkpoints.resume() == 3
    assert server.rewound == [0, 3]
    assert resumed.critic.weights_version == 73


async def test_staleness_of_a_rolled_back_version_uses_its_manifests_step(tmp_path, server):
    """`rlhf-triton weights rollback` publishes step 1 as version 3, while 5 updates have been sent."""
    run = Recorded(tmp_path, server)
    store = WeightsStore(run.config.run.weights_dir)
    for step in (0, 1, 4, 1):
        store.add(TinyPolicy().save, Origin(run_id="test", step=step, parent=None, epoch=0), reuse=False)
    await run.checkpoints.resume()
    assert run.critic.staleness([2, 3, 3, 9], step=6)["train_rollouts/staleness_rows"] == {"1": 1, "4": 2, "5": 1}


@pytest.mark.parametrize(("keep", "received", "usable"), [(2, 5, 4), (3, 3, 2)])
async def test_checkpoints_ahead_of_the_critic_are_set_aside(tmp_path, server, keep, received, usable):
    """The run ended while no server answered; the one before counts, also after the critic has that step again.

    All that a resume skips are kept, until a later one skips others.
    """
    root = tmp_path / "checkpoints" / "actor"
    await Recorded(tmp_path, server, keep_checkpoints=keep).save(2, 4, 6)
    kept = [2, 4, 6][-keep:]
    assert server.saved == [(2, [2]), (4, [2, 4]), (6, kept)], "a save does not name the checkpoints that exist"
    assert saved_steps(root) == kept
    for server.received in (received, 6):
        assert await Recorded(tmp_path, server).checkpoints.resume() == usable
        assert saved_steps(root) == [usable]
        skipped = {f"{step}.set-aside/state.json" for step in kept if step > usable}
        assert {str(path.relative_to(root)) for path in root.glob("*.set-aside/state.json")} == skipped
    assert server.rewound == [usable, usable]
    await Recorded(tmp_path, server).save(8)
    assert await Recorded(tmp_path, server).checkpoints.resume() == usable
    assert [path.name for path in root.glob("*.set-aside")] == ["8.set-aside"]


@pytest.mark.parametrize(
    ("before", "target", "coef"), [(None, None, 0.5), (6.0, None, 0.5), (None, 6.0, 0.5), (6.0, 3.0, 0.1)]
)
async def test_resume_restores_the_kl_coefficient_only_if_it_is_adaptive(tmp_path, server, before, target, coef):
    await Recorded(tmp_path, server, kl_coef=0.1, kl_target=before).save(2)
    resumed = Recorded(tmp_path, server, kl_coef=0.5, kl_target=target)
    await resumed.checkpoints.resume()
    assert resumed.state.kl.coef == coef


def lose_every_step(server, root, run):
    """Make the critic lack every step, as with another run's journal."""
    server.received = 0


def damage_all(server, root, run):
    for step in (2, 4):
        (root / str(step) / SHARD).unlink()


def start_elsewhere(server, root, run):
    run.policy.fingerprint = "of another"


def add_adapters(server, root, run):
    run.policy.trained = TinyPolicy(lora_rank=2).trained


@pytest.mark.parametrize(
    ("trouble", "kind", "message"),
    [
        (lose_every_step, RequestFailed, "rewind_to: 2"),
        (damage_all, CheckpointError, rf"2/{SHARD} cannot be read.*there is no earlier checkpoint"),
        (start_elsewhere, CheckpointError, "which has different weights, config.json or tokenizer"),
        (add_adapters, CheckpointError, r"was saved with actor\.policy\.lora_rank: .*; restore it"),
    ],
)
async def test_resume_raises_and_leaves_checkpoints_if_none_is_usable(tmp_path, server, trouble, kind, message):
    """The checkpoints stay unchanged, and the critic is not rewound."""
    root = tmp_path / "checkpoints" / "actor"
    run = Recorded(tmp_path, server)
    await Recorded(tmp_path, server).save(2, 4)
    trouble(server, root, run)
    with pytest.raises(kind, match=message):
        await run.checkpoints.resume()
    assert (saved_steps(root), server.rewound) == ([2, 4], [])


@pytest.mark.parametrize("name", [SHARD, "state.json"])
async def test_a_damaged_checkpoint_is_skipped_at_a_resume(tmp_path, server, caplog, name):
    """The run resumes from the previous checkpoint, and the critic rewinds to its step."""
    root = tmp_path / "checkpoints" / "actor"
    run, resumed = (Recorded(tmp_path, server) for _ in range(2))
    weight = run.policy.model.weight.detach().clone()
    await run.save(2)
    run.policy.model.weight.data += 1
    await run.save(4)
    damaged = root / "4" / name
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"0000")
    assert await resumed.checkpoints.resume() == 2
    assert torch.equal(resumed.policy.model.weight, weight)
    assert (server.rewound, saved_steps(root)) == ([2], [2])
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert str(damaged) in warning
    assert "kept as 4.set-aside, resuming from step 2 instead" in warning


async def test_resume_refuses_a_served_reference_with_other_weights(tmp_path, server, monkeypatch):
    """A reference whose files are not on this machine is not compared."""
    served = {"kl_reference": "triton", "kl_coef": 0.1}
    weights = {"one": "a.1", "other": "b.1", "same weights": "a.2", "of 0.1.0": "a"}
    monkeypatch.setattr("rlhf_triton.actor.run.checkpoints.fingerprint_model", lambda folder: weights[folder.name])
    for name in weights:
        (tmp_path / name).mkdir()
    await Recorded(tmp_path, server, tmp_path / "one", **served).save(2)
    different = r"measured against .*/one, but reference\.model has different weights"
    others = [Recorded(tmp_path, server, tmp_path / name, **served) for name in ("other", "same weights")]
    for other in (*others, Recorded(tmp_path, server)):
        with pytest.raises(CheckpointError, match=different):
            await other.checkpoints.resume()
    assert server.rewound == []
    for folder in ("one", "elsewhere"):
        assert await Recorded(tmp_path, server, tmp_path / folder, **served).checkpoints.resume() == 2
    await Recorded(tmp_path, server, tmp_path / "of 0.1.0", **served).save(2)  # had no hash of config.json
    assert await Recorded(tmp_path, server, tmp_path / "same weights", **served).checkpoints.resume() == 2


async def test_failed_critic_save_is_logged_and_retried_at_the_end(tmp_path, server, caplog):
    """If the retry fails, too, the run ends with an error."""
    run = Recorded(tmp_path, server)
    await run.save(1)
    server.fails = True
    await run.save(2)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["saving the critic's checkpoint of step 2 failed: critic_save is away"]
    with pytest.raises(RequestFailed, match="critic_save is away"):
        await run.checkpoints.finish(4)
    server.fails = False
    await run.checkpoints.finish(4)
    assert server.saved == [(1, [1]), (2, [1, 2])]


# ---- steps that teach nothing ----


def line_of(ended=1.0, advantage=1.0, gradient=1.0):
    names = ("rollouts/fraction_of_samples_properly_ended", "rollouts/advantages_std", "optim/grad_norm")
    values = zip(names, (ended, advantage, gradient), strict=True)
    return {"train_rollouts/advantages_mean": 0.0, **{f"train_{n}": value for n, value in values if value is not None}}


GRPO = {"algorithm_name": "grpo", "responses_per_prompt": 2}
FINE = line_of()
EQUAL = line_of(advantage=0.0, gradient=0.0)
CUT_OFF = line_of(ended=0.0)
NOT_ENDED = (
    "step 1: no response ended within actor.generation.max_new_tokens (128) by '</s>' (1) or '<end>' (7): raise it"
)
EQUAL_IN_GROUPS = "all rewards are equal within each group; check what the reward returns"


@pytest.mark.parametrize(
    ("settings", "lines", "said"),
    [
        ({}, [FINE, CUT_OFF, EQUAL, FINE], ["step 3 has no signal: all advantages are 0; check"]),
        ({}, [CUT_OFF] * 4, [NOT_ENDED]),
        (
            GRPO,
            [EQUAL] * 5,
            [f"step 1 has no signal: {EQUAL_IN_GROUPS}", f"0 in each of the first 3 steps: {EQUAL_IN_GROUPS}"],
        ),
        (
            {**GRPO, "mask_unfinished": True},
            [line_of(0.0, 0.0, 0.0)] * 4,
            [NOT_ENDED, "0 in each of the first 3 steps: no response counts"],
        ),
        (
            {"steps": 2},
            [line_of(gradient=0.0)] * 2,
            ["of the first 2 steps: there are advantages, so check actor.policy"],
        ),
        ({}, [line_of(gradient=None), *[line_of(gradient=0.0)] * 3], ["in each of the first 3 steps"]),  # a warm-up
    ],
)
def test_recorder_warns_once_if_the_policy_learns_nothing(tmp_path, server, caplog, settings, lines, said):
    run = Recorded(tmp_path, server, **{"mask_unfinished": False, **settings})
    tokenizer = types.SimpleNamespace(convert_ids_to_tokens={1: "</s>", 7: "<end>"}.get)
    policy = types.SimpleNamespace(tokenizer=tokenizer, eos_ids=[1, 7])
    warnings = LearningWarnings(run.config.actor, policy)
    for step, line in enumerate(lines, 1):
        warnings.check(step, line, (), set() if line == line_of(0.0, 0.0, 0.0) else {0})
    found = [record.message for record in caplog.records]
    assert len(found) == len(said)
    assert all(part in message for part, message in zip(said, found, strict=True))


# ---- validations ----


async def test_resume_repeats_validations_of_later_steps(tmp_path, server):
    path = tmp_path / "validations.jsonl"
    one, *others = (Recorded(tmp_path, server) for _ in range(4))
    recorder, _ = await validates(one, (2, validation(2.0)))
    file = path.stat().st_ino
    await one.save(2)
    for step in (4, 6):
        await recorder.validations.add("between", step, validation(float(step)), seconds=0.1)
    assert path.stat().st_ino == file, "the file is rewritten with each line"
    for run, steps in zip(others, ((), (4, 8), (2,)), strict=True):
        await validates(run, *((step, validation(float(step))) for step in steps))
        lines = [(line["step"], line["reward"]) for line in read_jsonl(path)]
        assert lines == [(step, step) for step in sorted({2, *steps})]


NO_SCORE = math.nan


@pytest.mark.parametrize(
    ("results", "best"),
    [
        ([(NO_SCORE, None)], [None]),
        ([(0.5, None), (0.2, None), (NO_SCORE, None), (0.1, None)], [1, 1, 1, 1]),
        ([(0.1, None), (0.6, None)], [1, 2]),
        ([(0.9, 0), (0.5, 0), (0.1, 1), (0.3, 1), (0.2, 1)], [1, 1, 3, 4, 4]),  # 0 and 1 are not compared
    ],
)
async def test_best_validation_has_the_highest_reward_within_one_reward_version(tmp_path, server, results, best):
    run = Recorded(tmp_path, server, validation_every=0)  # a run that validates only before and after
    _, found = await validates(run, *((step, validation(*result)) for step, result in enumerate(results, 1)))
    assert found == best
    lines = [line["reward"] for line in read_jsonl(tmp_path / "validations.jsonl")]
    assert lines == [None if math.isnan(reward) else pytest.approx(reward) for reward, _ in results]  # JSON has no NaN
    files = sorted(path.name for path in (tmp_path / "best").glob("*"))
    assert files == (["best.json", "model.safetensors"] if best[-1] else [])


@pytest.mark.parametrize(("num_failed", "best"), [(1, 2), (2, 1)])
async def test_validation_that_lost_too_many_scores_is_not_the_best(tmp_path, server, caplog, num_failed, best):
    """An outage of the reward leaves the easiest prompt, whose reward is no mean of all."""
    run = Recorded(tmp_path, server, validation_every=0, max_failed_fraction=0.1)
    scores = [rewarded(0.9)] * (10 - num_failed) + [rewarded(0.0, failure="away")] * num_failed
    partial = Validation([(a_sample([1, 1], score=score),) for score in scores], 0.5, None)
    _, found = await validates(run, (1, validation(0.5)), (2, partial))
    assert found == [1, best]
    assert ("2 of 10 responses have no score, so best/ is unchanged" in caplog.text) == (num_failed == 2)


@pytest.mark.parametrize(
    ("settings", "sections", "changed_files", "best"),
    [
        ({}, {}, {}, 1),
        ({"steps": 9, "validation_every": 2}, {}, {}, 1),
        ({}, {}, {"contents.json": '{"actor.algorithm.loss": "b", "rewards.a.function": "a"}'}, 1),
        ({}, {}, {"contents.json": '{"actor.algorithm.loss": "a", "rewards.a.function": "b"}'}, 2),
        ({}, {}, {"held_out.jsonl": '{"text": "another file"}'}, 2),
        ({"validation_size": 3}, {}, {}, 2),
        ({"validation_greedy": True}, {}, {}, 2),
        ({"max_new_tokens": 3}, {}, {}, 2),
        ({"generation_batch_size": 3}, {}, {}, 1),
        ({}, {"rewards": {"a": {"function": "mine.py:other"}}}, {}, 2),
        ({}, {}, {"best/best.json": '{"step": 1, "reward": 0.9}'}, 1),  # written by an earlier version
    ],
)
async def test_best_validation_counts_only_among_those_of_equal_prompts_and_reward(
    tmp_path, server, settings, sections, changed_files, best
):
    files = {"contents.json": '{"actor.algorithm.loss": "a", "rewards.a.function": "a"}', "held_out.jsonl": "{}"}
    given = {"validation_prompts": tmp_path / "held_out.jsonl"}
    runs = Recorded(tmp_path, server, **given), Recorded(tmp_path, server, **given, **settings)
    rewards = {"rewards": {"a": {"function": "mine.py:reward"}}}
    for run, added in zip(runs, (rewards, {**rewards, **sections}), strict=True):
        run.config = RunConfig.model_validate({**run.config.model_dump(exclude_unset=True), **added})
    for run, written, result in zip(runs, (files, changed_files), ((1, 0.9), (2, 0.3)), strict=True):
        for name, text in written.items():
            (tmp_path / name).write_text(text)
        _, found = await validates(run, (result[0], validation(result[1])))
    assert found == [best]


# ---- settings: a run does not resume silently with another reward, algorithm or policy ----


CODE = "def verify(sample):\n    return 1.0\n"
GAME = {"class": "game.py:Game", "options": {"workers": 1}}
OPENENV = {"class": "rlhf_triton.actor.environments.openenv:OpenEnv", "options": {"url": "http://a"}}
COSINE = {"lr": 5e-5, "min_lr": 0.0}  # a schedule that ends with the run


def config_of(run, weight=1.0, timeout_s=2.0, **actor):
    (run.parent / "mine.py").touch()
    options = {name: actor.pop(name) for name in ("workers",) if name in actor}
    environment = actor.pop("environment", None)
    function = f"{run.parent / 'mine.py'}:verify"
    term = {"function": function, "weight": weight, "timeout_s": timeout_s, "options": options}
    settings = nested(ActorSection, {"algorithm_name": "reinforce++", **actor})
    sections = {"run": {"dir": run}, "rewards": {"verdict": term}, "actor": settings, "environment": environment}
    return RunConfig.model_validate(sections)


def after_five_steps(run, **settings):
    (run / "checkpoints" / "actor" / "5").mkdir(parents=True)
    write_settings(config_of(run, **settings), {})
    return run


@pytest.mark.parametrize(
    ("before", "now", "line", "is_guarded"),
    [
        ({}, {}, None, False),
        ({}, {"steps": 900, "client_deadline_s": 70.0}, None, False),
        ({}, {"lr": 0.5}, "actor.optimizer.lr: 9e-07 -> 0.5", False),
        ({}, {"weight": 2.0}, "rewards.verdict.weight: 1.0 -> 2.0", True),
        ({"workers": 1}, {"workers": 2}, "rewards.verdict.options.workers: 1 -> 2", True),
        ({"algorithm_loss_mean": "token"}, {}, "actor.algorithm.loss_mean: token -> auto", True),
        ({}, {"model": "other"}, "actor.policy.model: checkpoints/policy -> other", True),
        *(
            ({"environment": GAME}, {"environment": {**GAME, key: new}}, f"environment.{key}: {old} -> {new}", guarded)
            for key, old, new, guarded in (
                ("class", "game.py:Game", "game.py:Hard", True),
                ("max_tokens", 4096, 999, True),
                ("workers", 1, 2, False),
            )
        ),
        (
            {"environment": GAME},
            {"environment": {**GAME, "options": {"workers": 9}}},
            "environment.options.workers: 1 -> 9",
            True,
        ),
        (
            {"environment": OPENENV},
            {"environment": {**OPENENV, "options": {"url": "http://b"}}},
            None,
            False,
        ),
        *(
            (
                {"environment": {**each, "options": {**each["options"], name: "a"}}},
                {"environment": {**each, "options": {**each["options"], name: "b"}}},
                f"environment.options.{name}: a -> b",
                True,
            )
            for each, name in ((GAME, "url"), (OPENENV, "url_map"))
        ),
        (
            {"prompts_files": [{"path": "a"}]},
            {"prompts_files": [{"path": "a", "weight": 2.0}]},
            "actor.prompts.files: [{'path': 'a', 'weight': 1.0}] -> [{'path': 'a', 'weight': 2.0}]",
            False,
        ),
        ({**COSINE, "steps": 5}, {**COSINE, "steps": 10}, "actor.steps: 5 -> 10", False),
        ({"kl_target": 6.0}, {"kl_target": 6.0, "kl_coef": 0.5}, "actor.kl.coef (without effect): 0.01 -> 0.5", False),
    ],
)
def test_changed_settings_are_listed_and_recorded(tmp_path, before, now, line, is_guarded):
    run = tmp_path / "run"
    config = config_of(run, **now)
    assert find_changes(config, accepted=False) == {}  # it begins
    after_five_steps(run, **before)
    if is_guarded:
        with pytest.raises(ConfigError, match=r"after step 5 with other settings (.|\n)*--accept-changes") as caught:
            find_changes(config, accepted=False)
        assert line in str(caught.value)
    changed = find_changes(config, accepted=is_guarded)
    assert describe_changes(changed) == ([line] if line else [])
    assert not (run / "changes.jsonl").exists()
    write_settings(config, changed)
    recorded = read_jsonl(run / "changes.jsonl")
    assert [(row["step"], row["changed"]) for row in recorded] == ([(5, changed)] if line else [])
    assert find_changes(config, accepted=False) == {}


def test_kl_coefficient_from_which_adaptation_starts_is_listed_as_effective(tmp_path):
    run = after_five_steps(tmp_path / "run")
    changes = find_changes(config_of(run, kl_coef=0.5, kl_target=6.0), accepted=False)
    assert changes == {"actor.kl.coef": [0.01, 0.5], "actor.kl.target": [None, 6.0]}


def test_changed_seed_and_deterministic_setting_are_listed(tmp_path):
    run = after_five_steps(tmp_path / "run")
    config = config_of(run)
    changed = config.model_copy(update={"run": config.run.model_copy(update={"seed": 7, "deterministic": True})})
    lines = describe_changes(find_changes(changed, accepted=False))
    assert lines == ["run.seed: 0 -> 7", "run.deterministic: False -> True"]


def test_changed_reward_model_is_listed_with_both_paths(tmp_path, checkpoints):
    """Its content differs as well, but is not listed separately."""
    run = {"run": {"dir": after_five_steps(tmp_path / "run")}, "critic": {}}
    before, now = (
        RunConfig.model_validate({**run, "reward": {"model": str(model)}})
        for model in (checkpoints.reward, checkpoints.critic)
    )
    write_settings(before, {})
    line = f"reward.model: {checkpoints.reward} -> {checkpoints.critic}"
    assert describe_changes(find_changes(now, accepted=True)) == [line]


def test_an_absolute_path_of_the_same_place_is_no_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("score.py").write_text(CODE)
    run = {"run": {"dir": after_five_steps(tmp_path / "run")}, "critic": {}}
    before, now = (
        RunConfig.model_validate(
            {
                **run,
                "reward": {"model": f"{folder}models/reward"},
                "rewards": {"model": {}, "score": {"function": f"{folder}score.py:score"}},
                "critic": {"pretrain": [f"{folder}a.jsonl"]},
            }
        )
        for folder in ("", f"{tmp_path}/")
    )
    write_settings(before, {})
    assert find_changes(now, accepted=False) == {}


def test_edited_config_or_chat_template_of_the_reward_model_is_refused(tmp_path, checkpoints):
    model = shutil.copytree(checkpoints.reward, tmp_path / "reward")
    run = after_five_steps(tmp_path / "run")
    config = RunConfig.model_validate({"run": {"dir": run}, "critic": {}, "reward": {"model": str(model)}})
    write_settings(config, {})
    found = json.loads((run / "contents.json").read_text())["reward.model"]
    (run / "contents.json").write_text(json.dumps({"reward.model": found.partition(".")[0]}))  # written by 0.1.0
    assert find_changes(config, accepted=False) == {}
    write_settings(config, {})
    change_config(model, rope_theta=1.0)
    with pytest.raises(ConfigError, match=r"reward\.model: the file's content"):
        find_changes(config, accepted=False)
    write_settings(config, {})
    (model / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
    with pytest.raises(ConfigError, match=r"reward\.model: the file's content"):
        find_changes(config, accepted=False)


def test_edited_reward_template_is_refused(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ response }}")
    run = after_five_steps(tmp_path / "run")
    config = RunConfig.model_validate({"run": {"dir": run}, "critic": {}, "reward": {"template": str(template)}})
    write_settings(config, {})
    assert find_changes(config, accepted=False) == {}
    template.write_text("{{ prompt }}{{ response }}")
    with pytest.raises(ConfigError, match=r"reward\.template: the file's content"):
        find_changes(config, accepted=False)


def test_changed_critic_model_has_no_effect_once_weights_are_published(tmp_path):
    run = after_five_steps(tmp_path / "run", name="ppo")
    config = config_of(run, name="ppo")
    other = config.model_copy(update={"critic": config.critic.model_copy(update={"model": Path("other")})})
    assert describe_changes(find_changes(other, accepted=False)) == ["critic.model: checkpoints/critic -> other"]
    (run / "weights" / "critic").mkdir(parents=True)
    (run / "weights" / "critic" / "CURRENT").touch()
    (line,) = describe_changes(find_changes(other, accepted=False))
    assert line == "critic.model (without effect): checkpoints/critic -> other"


def test_changed_code_of_a_reward_or_environment_is_refused(tmp_path):
    code, score, verify = (tmp_path / name for name in ("game.py", "score.py", "mine.py"))
    game = {"class": f"{code}:Game", "reward": f"{score}:score"}
    agent = {"agent": f"{code}:run"}
    for file, environment, key in (
        (code, game, "environment.class"),
        (score, game, "environment.reward"),
        (code, agent, "environment.agent"),
        (verify, None, "rewards.verdict.function"),
    ):
        for each in (code, score, verify):
            each.write_text(CODE)
        run = after_five_steps(tmp_path / key, environment=environment)
        file.write_text(f"{CODE}# edited\n")
        config = config_of(run, environment=environment)
        with pytest.raises(ConfigError, match=rf"(?m)^  {key}: the file's content$"):
            find_changes(config, accepted=False)
    assert describe_changes(find_changes(config, accepted=True)) == [f"{key}: the file's content"]
    verify.unlink()  # this machine does not score
    assert find_changes(config, accepted=False) == {}
    (run / "settings.json").write_text("{")
    with pytest.raises(ConfigError, match=r"settings.json is damaged: .*; delete it to go on"):
        find_changes(config, accepted=False)


def test_run_command_refuses_a_changed_reward_before_it_starts_anything(tmp_path, checkpoints, capsys):
    (tmp_path / "mine.py").write_text(CODE)
    actor = {"algorithm_name": "grpo", "responses_per_prompt": 2}
    term = {"function": f"{tmp_path / 'mine.py'}:verify"}
    run = make_run(tmp_path / "run", checkpoints, rewards={"length": term}, actor=actor)
    (run.config.run.dir / "checkpoints" / "actor" / "3").mkdir(parents=True)
    write_settings(load_config(run.path, []), {})
    assert rlhf_triton.tools.run.main(["--config", str(run.path), "rewards.length.weight=2"]) == 2
    assert "rewards.length.weight: 1.0 -> 2.0" in capsys.readouterr().err
    assert not (run.config.run.dir / "changes.jsonl").exists()


# ---- metrics: for Prometheus, metrics.jsonl and TensorBoard ----

LINE = {
    "train_rollouts/rollout_size": 8.0,
    "train_rollouts/masked_samples": 1.0,
    "train_rollouts/rewards": 0.5,
    "train_rollouts/staleness": 2.0,
    "train_rollouts/staleness_rows": {"0": 6, "2": 2},
    "timers/step_time": 4.0,
    "timers/generate": 3.0,
    "train_optim/grad_norm": 0.25,
    "tokens_per_s": 60.0,
}


def log_of(folder, *trackers, first_step=1, **more):
    made = Trackers(trackers, folder, "my-run", {"actor.steps": 3})
    return MetricsLog(folder, first_step=first_step, trackers=made, **more)


def shown(config, counters, log):
    metrics = ActorMetrics(config, counters, lambda: 2)
    log(metrics)
    samples = [sample for family in metrics.exporter.collect() for sample in family.samples]
    return {s.name.removeprefix("rlhf_actor_") + "".join(s.labels.values()): s.value for s in samples}


def test_step_metrics_are_exported_to_prometheus_and_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {"run": {"dir": tmp_path}, "actor": {"steps": 9, "max_staleness": 0}}
    config = RunConfig.model_validate({**settings, "trainer": {"publish": {"every": 3}}})
    before = shown(config, RequestCounters(requests=5), lambda _: None)
    assert (before["steps_planned"], before["allowed_staleness"], before["requests_total"]) == (9, 2, 5)
    assert before["step_timestamp_seconds"] > 0  # when the run started: the alert on old steps needs a time
    assert "step" not in before

    def two_steps(metrics):
        log = log_of(tmp_path, exported=metrics)
        log.write(1, LINE)
        log.write(2, {**LINE, "train_rollouts/rewards": 0.75, "timers/score_wait": 1.0})
        log.chart({"val_rollouts/rewards": 0.875}, 2)
        log.close()

    found = shown(config, RequestCounters(requests=5, retries=1), two_steps)
    expected = {
        "step": 2,
        "rows_total": 16,
        "masked_rows_total": 2,
        "reward": 0.75,
        "staleness": 2,
        "step_seconds": 4,
        "phase_secondsgenerate": 3,
        "phase_secondsscore_wait": 1,
        "grad_norm": 0.25,
        "tokens_per_second": 60,
        "validation_reward": 0.875,
        "retries_total": 1,
        "requests_total": 5,
        "failed_critic_updates_total": 2,
    }
    assert {name: found[name] for name in expected} == expected
    assert not {"phase_secondsstep_time", "kl_nats"} & found.keys()  # this run has no reference
    assert read_jsonl(tmp_path / "metrics.jsonl")[0]["train_rollouts/staleness_rows"] == {"0": 6, "2": 2}
    drawn = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Histograms("train_rollouts/staleness_rows")[0]
    assert (drawn.histogram_value.num, drawn.histogram_value.sum, drawn.histogram_value.max) == (8, 4, 2)
    without = {"run": {"dir": tmp_path}, "actor": {"algorithm": {"name": "grpo", "responses_per_prompt": 4}}}
    assert "allowed_staleness" not in shown(RunConfig.model_validate(without), RequestCounters(), lambda _: None)


def test_resumed_metrics_log_drops_repeated_steps(tmp_path):
    log = log_of(tmp_path)
    for step in (1, 2, 3):
        log.write(step, {"a": float(step)})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "a"')  # killed while writing
    log = log_of(tmp_path, first_step=3)
    log.write(3, {"a": 30.0})
    log.close()
    assert [(line["step"], line["a"]) for line in read_jsonl(tmp_path / "metrics.jsonl")] == [(1, 1), (2, 2), (3, 30)]


# ---- trackers: no package of theirs is a dependency, so accelerate's classes for two of them are replaced ----


class RecordingTracker(GeneralTracker):
    """Adds its calls to `calls`."""

    requires_logging_directory = False

    def __init__(self, project, **options):
        super().__init__()
        self._say("init", project, options)

    @property
    def tracker(self):
        """Nothing: no package is behind it."""

    def _say(self, what, *values):
        self.calls.append((f"{self.name}.{what}", *values))

    def store_init_configuration(self, values):
        self._say("settings", values)

    def log(self, values, step=None, **_):
        self._say("log", values, step)

    def finish(self):
        self._say("finish")


class WithTable(RecordingTracker):
    name = "wandb"

    def log_table(self, name, columns, data, step):
        self._say("table", name, columns, data, step)


class WithArtifact(RecordingTracker):
    name = "mlflow"

    def log_artifact(self, path):
        self._say("artifact", path)


@pytest.fixture
def said(monkeypatch):
    """Return the calls of both trackers, in order."""
    calls = []
    monkeypatch.setattr(RecordingTracker, "calls", calls, raising=False)
    for kind in (WithTable, WithArtifact):
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, kind.name, kind)
        monkeypatch.setitem(sys.modules, kind.name, types.ModuleType(kind.name))
    return calls


def test_trackers_receive_the_logged_metrics_and_texts(said, tmp_path):
    log = log_of(tmp_path, "wandb", "mlflow")
    log.write(1, {"train_rollouts/rewards": 0.5, "train_rollouts/staleness_rows": {"0": 3}})
    columns = ["step", "prompt", "response", "reward", "error"]  # which not every row has
    rows = [[1, "Once", " upon a time", 0.5, None], [1, "Twice", "…", None, "lost"]]
    whole = [dict(zip(columns, row, strict=True)) for row in rows]
    del whole[0]["error"]
    log.add_texts(whole)
    log.add_texts([])
    log.close()
    point = {"train_rollouts/rewards": 0.5}  # no histogram: TensorBoard's
    named = {"id": "my-run", "name": "my-run", "resume": "allow", "dir": str(tmp_path)}
    assert said == [
        ("wandb.init", "rlhf-on-triton", named),
        ("wandb.settings", {"actor.steps": 3}),
        ("mlflow.init", "rlhf-on-triton", {"run_name": "my-run"}),
        ("mlflow.settings", {"actor.steps": 3}),
        ("wandb.log", point, 1),
        ("mlflow.log", point, 1),
        ("wandb.table", "train_rollouts/table", columns, rows, 1),
        ("wandb.finish",),
        ("mlflow.artifact", str(tmp_path / "rollouts.jsonl")),
        ("mlflow.finish",),
    ]
    assert read_jsonl(tmp_path / "rollouts.jsonl") == whole
    log_of(tmp_path).close()  # a run that repeats step 1
    assert read_jsonl(tmp_path / "rollouts.jsonl") == []


def test_a_tracker_that_is_named_twice_is_started_once(said, tmp_path):
    log_of(tmp_path, "wandb", "wandb").close()
    assert [name for name, *_ in said] == ["wandb.init", "wandb.settings", "wandb.finish"]


def test_a_tracker_that_cannot_be_imported_is_an_error_at_the_start(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RlhfError, match=r"actor\.trackers: wandb cannot be imported: .*; repair or remove it"):
        Trackers(["wandb"], tmp_path, "run", {})


def test_tracker_names_match_accelerates():
    assert {*get_args(Tracker), "tensorboard"} == LOGGER_TYPE_TO_CLASS.keys()


def test_failing_tracker_is_disabled_and_the_other_one_continues(said, tmp_path, monkeypatch, caplog):
    def refuse(self, values, step):
        raise ConnectionError("the tracking server is away")

    monkeypatch.setattr(WithArtifact, "log", refuse)
    trackers = Trackers(["mlflow", "wandb"], tmp_path, "run", {})
    for step in (1, 2):
        trackers.log({"x": 1.0}, step)
    trackers.finish()
    assert [call[2] for call in said if call[0] == "wandb.log"] == [1, 2]
    assert ("mlflow.finish",) not in said
    (message,) = caplog.messages
    assert message.startswith(
        "mlflow is disabled after an error; metrics.jsonl still has all metrics: ConnectionError: "
    )


def test_a_tracker_that_hangs_delays_neither_steps_nor_the_end(said, tmp_path, monkeypatch, caplog):
    """If it answers later, it receives a bounded number of calls in order; its daemon thread blocks no exit."""
    monkeypatch.setattr("rlhf_triton.actor.recording.trackers.MAX_PENDING", 4)
    monkeypatch.setattr("rlhf_triton.actor.recording.trackers.FINISH_S", 0.1)
    hanging = threading.Event()
    answer = threading.Event()
    threads = []

    def hang(self, values, step):
        threads.append(threading.current_thread())
        hanging.set()
        answer.wait(120)
        said.append(("mlflow.log", step))

    monkeypatch.setattr(WithArtifact, "log", hang)
    trackers = Trackers(["mlflow"], tmp_path, "run", {})
    trackers.log({"x": 1.0}, 0)
    assert hanging.wait(120)
    for step in range(1, 7):
        trackers.log({"x": 1.0}, step)  # returns at once
    trackers.finish()
    behind, late = caplog.messages
    assert behind == "trackers are 4 calls behind: some metrics are in metrics.jsonl only"
    assert late == "trackers are not done after 0.1 s: the latest metrics are in metrics.jsonl only"
    assert threads[0].daemon
    answer.set()
    threads[0].join(120)
    assert said[2:] == [*(("mlflow.log", step) for step in range(5)), ("mlflow.finish",)]
    assert set(threads) == {threads[0]}
