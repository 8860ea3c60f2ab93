"""`max_staleness`: what the actor waits for, which update a version contains, and what it says about its rows."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_system import Checkpoints, make_run

from actor.data.rollout import Prompt, Rollout
from actor.loop import PPORun
from actor.run.metrics import MetricsLog
from actor.run.staleness import KEPT_VERSIONS, VersionSteps, needed_update, staleness_metrics
from actor.scoring.scorer import Scorer
from python_backend.checkpoints.tokenization import fingerprint, load_tokenizer
from python_backend.client.client import TrainAnswer
from python_backend.client.errors import ServerFailed
from python_backend.client.retry import RequestCounters
from python_backend.client.served import ServedModel
from python_backend.config import RunConfig
from python_backend.store.jsonl import read_jsonl
from python_backend.wire.contract import REWARDS, VALUES, WEIGHTS_VERSION

# ---- which update to wait for ----


@pytest.mark.parametrize(
    ("max_staleness", "expected"), [(0, [0, 1, 2, 3, 4, 5]), (1, [-1, 0, 1, 2, 3, 4]), (3, [-3, -2, -1, 0, 1, 2])]
)
def test_a_step_waits_for_the_update_before_it_less_the_allowed(max_staleness: int, expected: list[int]) -> None:
    assert [needed_update(step, max_staleness=max_staleness, every=1) for step in range(1, 7)] == expected


@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_with_rare_publishing_a_step_waits_for_what_is_published_and_sent(every: int, max_staleness: int) -> None:
    """Otherwise it would wait for ever, or be answered by weights that lack more than it allows."""
    for step in range(1, 40):
        needed = needed_update(step, max_staleness=max_staleness, every=every)
        assert needed % every == 0
        assert needed <= step - 1
        assert step - 1 - needed <= max(max_staleness, every - 1)


# ---- which update a version contains ----


def test_a_rewind_gives_a_step_a_new_number() -> None:
    """Versions 1 to 5 were of the steps 1 to 5; the run goes on from step 3 with version 6."""
    steps = VersionSteps(6, 3, every=1, save_every=3)
    assert steps.step_of(6, sent=3) == 3
    assert steps.step_of(5, sent=3) == 0, "an older one is no excuse"
    steps.learn(7, 4)
    steps.learn(8, 5)
    assert [steps.step_of(version, sent=5) for version in (6, 7, 8)] == [3, 4, 5]
    assert steps.histogram([7, 8, 8, 6], sent=5) == {0: 2, 1: 1, 2: 1}


def test_a_version_that_no_answer_has_named_yet_counts_on() -> None:
    steps = VersionSteps(0, 0, every=1, save_every=50)
    steps.learn(1, 1)
    assert steps.step_of(3, sent=3) == 3
    assert steps.histogram([1, 2, 3], sent=3) == {0: 1, 1: 1, 2: 1}


def test_a_rollback_moves_the_numbers_until_the_next_answer() -> None:
    """Someone publishes old weights as version 3: update 3 gets number 4."""
    steps = VersionSteps(0, 0, every=1, save_every=50)
    steps.learn(1, 1)
    steps.learn(2, 2)
    steps.learn(4, 3)
    assert steps.step_of(4, sent=3) == 3
    assert steps.histogram([4, 4], sent=3) == {0: 2}
    assert steps.histogram([2, 3], sent=3) == {1: 1, 3: 1}, "and version 3 is of none of the updates"


def test_a_rollback_is_as_stale_as_it_may_be():
    """Eight updates are served as versions 1 to 8 when someone publishes older weights as version 9."""
    steps = VersionSteps(0, 0, every=1, save_every=50)
    for step in range(1, 9):
        steps.learn(step, step)
    assert steps.histogram([9, 9, 9], sent=8) == {8: 3}


def test_a_manifest_says_how_old_a_rollback_is():
    steps = VersionSteps(0, 0, every=1, save_every=50, manifest_step={8: 8, 9: 6}.get)
    for step in range(1, 9):
        steps.learn(step, step)
    assert steps.histogram([7, 8, 9, 9], sent=9) == {1: 1, 2: 1, 3: 2}


def test_answers_may_come_in_any_order() -> None:
    steps = VersionSteps(10, 4, every=1, save_every=50)
    for step in (7, 5, 6):
        steps.learn(step + 6, step)
    assert [steps.step_of(version, sent=7) for version in range(10, 14)] == [4, 5, 6, 7]


def test_a_run_of_months_remembers_the_newest_versions_alone() -> None:
    steps = VersionSteps(0, 0, every=1, save_every=50)
    for step in range(1, KEPT_VERSIONS + 200):
        steps.learn(step + 7, step)
    assert len(steps._steps) == KEPT_VERSIONS
    assert steps.step_of(KEPT_VERSIONS, sent=KEPT_VERSIONS + 200) == KEPT_VERSIONS - 7
    assert steps.step_of(8, sent=KEPT_VERSIONS + 200) == 0, "an older one is no excuse"


def test_with_rare_publishing_an_answer_names_weights_that_lack_its_step() -> None:
    """Published: 3, 6, 7 (a save), 9. The answers to 4 and 5 name version 1, and nothing names the save's version."""
    steps = VersionSteps(0, 0, every=3, save_every=7)
    for step, version in ((1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 2), (7, 2)):
        steps.learn(version, step)
    assert [steps.step_of(version, sent=7) for version in range(4)] == [0, 3, 6, 7]
    steps.learn(3, 8)
    steps.learn(4, 9)
    assert [steps.step_of(version, sent=9) for version in range(5)] == [0, 3, 6, 7, 9]


def test_what_is_logged() -> None:
    assert staleness_metrics({0: 6, 2: 2}) == {
        "train_rollouts/staleness": 2.0,
        "train_rollouts/staleness_mean": 0.5,
        "train_rollouts/staleness_rows": {"0": 6, "2": 2},
    }


def test_the_histogram_reaches_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, first_step=1)
    log.write(1, staleness_metrics({0: 6, 2: 2}))
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (drawn,) = events.Histograms("train_rollouts/staleness_rows")
    assert (drawn.histogram_value.num, drawn.histogram_value.sum, drawn.histogram_value.max) == (8, 4, 2)
    assert read_jsonl(tmp_path / "metrics.jsonl")[0]["train_rollouts/staleness_rows"] == {"0": 6, "2": 2}


# ---- the loop, against a critic whose answers are held back ----

STEPS, SAVE_EVERY, FIRST_VERSION = 8, 5, 17


class SlowCritic:
    """Stands for server and sidecar: serves an update no sooner than the actor waits for it."""

    def __init__(self, tokenizer: Any, *, every: int) -> None:
        self.counters = RequestCounters()
        self.parameters = {"tokenizer_fingerprint": fingerprint(tokenizer)}
        self.every = every
        self.awaited = 0  # the last update that the actor has waited for
        self.versions = {FIRST_VERSION: 0}  # and the updates in each
        self.trained = self.sent = 0
        self.scored: dict[int, Counter[int]] = {}  # updates sent -> rows by what their weights lacked

    async def describe(self, model: str) -> ServedModel:
        return ServedModel.of(self.parameters)

    async def rewind(self, *, run_id: str, step: int) -> int:
        return FIRST_VERSION

    async def score(
        self, rows: list[np.ndarray], outputs: tuple[str, ...], metadata: object = None
    ) -> dict[str, np.ndarray]:
        version, count = max(self.versions), len(rows)
        self.scored.setdefault(self.sent, Counter())[self.sent - self.versions[version]] += count
        values = np.zeros((count, max(row.size for row in rows)), np.float32)
        return {REWARDS: values[:, :1], VALUES: values, WEIGHTS_VERSION: np.full((count, 1), version)}

    async def train(self, payload: object, *, run_id: str, step: int) -> TrainAnswer:
        self.sent = step
        while self.trained < step - 1 or self.awaited < step:
            await asyncio.sleep(0.001)
        self.trained = step
        if step % self.every == 0:
            self.publish()
        return TrainAnswer(0.0, max(self.versions))

    async def save(self, *, run_id: str, step: int, keep_steps: list[int]) -> int:
        while self.trained < step:
            await asyncio.sleep(0.001)
        if self.versions[max(self.versions)] < self.trained == step:
            self.publish()
        return max(self.versions)

    def publish(self) -> None:
        self.versions[max(self.versions) + 1] = self.trained


def watched_run(config: RunConfig, critic: SlowCritic) -> PPORun:
    """A run that tells the critic what it waits for."""
    run = PPORun(config, critic)  # type: ignore[arg-type]
    served = run.critic.served

    async def watched(step: int) -> int:
        critic.awaited = max(critic.awaited, step)
        return await served(step)

    run.critic.served = watched  # type: ignore[method-assign]
    return run


@pytest.mark.parametrize(("max_staleness", "every"), [(0, 1), (1, 1), (3, 1), (0, 2), (1, 3), (4, 3)])
def test_no_row_is_staler_than_allowed(
    tmp_path: Path, checkpoints: Checkpoints, max_staleness: int, every: int
) -> None:
    """The critic lags as far as it may; what the actor logs is what the critic saw."""
    run = make_run(
        tmp_path,
        checkpoints,
        trainer={"publish": {"every": every}},
        actor={
            "steps": STEPS,
            "max_staleness": max_staleness,
            "checkpoint_every": SAVE_EVERY,
            "validation_size": 0,
            "rollout_size": 4,
            "max_new_tokens": 3,
        },
    )
    critic = SlowCritic(load_tokenizer(checkpoints.policy), every=every)
    asyncio.run(asyncio.wait_for(watched_run(run.config, critic).run(), 60))
    seen = [dict(sorted(critic.scored[sent].items())) for sent in range(STEPS)]
    assert max(max(rows) for rows in seen) <= max(max_staleness, every - 1)
    if every == 1:
        assert seen == [{min(sent, max_staleness): 4} for sent in range(STEPS)], "and it lagged as far as it may"
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert [line["train_rollouts/staleness_rows"] for line in lines] == [
        {str(value): count for value, count in rows.items()} for rows in seen
    ]


class LateCritic(SlowCritic):
    """Trains when the run has come to its end."""

    saving: asyncio.Event

    async def train(self, payload: object, *, run_id: str, step: int) -> TrainAnswer:
        await self.saving.wait()
        return await super().train(payload, run_id=run_id, step=step)

    async def save(self, *, run_id: str, step: int, keep_steps: list[int]) -> int:
        self.saving.set()
        return await super().save(run_id=run_id, step=step, keep_steps=keep_steps)


def test_a_run_out_of_time_drops_a_rollout_and_no_update(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """The rollout ahead waits for the last update when it is dropped: the checkpoint names that step."""
    run = make_run(
        tmp_path,
        checkpoints,
        actor={
            "max_minutes": 1e-6,
            "max_staleness": 0,
            "one_step_off_policy": True,
            "validation_size": 0,
            "rollout_size": 4,
            "max_new_tokens": 3,
        },
    )
    critic = LateCritic(load_tokenizer(checkpoints.policy), every=1)

    async def main() -> dict[str, Any]:
        critic.saving = asyncio.Event()
        return await asyncio.wait_for(watched_run(run.config, critic).run(), 20)

    summary = asyncio.run(main())
    assert critic.trained == summary["steps"] == 1
    assert summary["weights_version"] == FIRST_VERSION + 1


class FailingCritic(SlowCritic):
    """Answers some steps with an error, and goes on with the next."""

    fails: tuple[int, ...] = ()

    async def train(self, payload: object, *, run_id: str, step: int) -> TrainAnswer:
        if step not in self.fails:
            return await super().train(payload, run_id=run_id, step=step)
        self.sent = step
        while self.trained < step - 1:
            await asyncio.sleep(0.001)
        self.trained = step
        raise ServerFailed(f"critic_train refused: the gradients of {step} are not finite")


@pytest.mark.parametrize("fails", [(3,), (1, 4)], ids=str)
def test_a_failed_critic_update_is_told_and_the_run_goes_on(
    tmp_path: Path, checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture, fails: tuple[int, ...]
) -> None:
    """4 is the last step: the run ends as well as goes on."""
    run = make_run(
        tmp_path,
        checkpoints,
        actor={"steps": 4, "validation_size": 0, "rollout_size": 4, "max_new_tokens": 3, "checkpoint_every": 2},
    )
    critic = FailingCritic(load_tokenizer(checkpoints.policy), every=1)
    critic.fails = fails
    summary = asyncio.run(asyncio.wait_for(watched_run(run.config, critic).run(), 60))
    assert summary["failed_critic_updates"] == len(fails)
    assert summary["weights_version"] == FIRST_VERSION + 4 - len(fails)
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["client/failed_critic_updates"] == sum(step < 4 for step in fails)
    told = [
        record.getMessage() for record in caplog.records if "update failed, the run continues" in record.getMessage()
    ]
    assert all(f"the gradients of {step} are not finite" in text for step, text in zip(fails, told, strict=True))


# ---- one row, one version ----


@pytest.mark.parametrize("versions", [[[4], [5]], [[4, 4]]])
def test_values_of_two_versions_are_never_taken(checkpoints: Checkpoints, versions: list[list[int]]) -> None:
    """A server that broke its promise would mix two critics in one advantage."""
    import torch

    class Mixing:
        async def score(self, rows: list[np.ndarray], *_: object) -> dict[str, np.ndarray]:
            values = np.zeros((2, 3), np.float32)
            return {REWARDS: values[:, :1], VALUES: values, WEIGHTS_VERSION: np.asarray(versions)}

    prompts = [Prompt(str(i), "", np.ones(1, np.int64)) for i in range(2)]
    rollout = Rollout(prompts, torch.ones(2, 3, dtype=torch.int64), *torch.tensor([[3, 3], [1, 1], [1, 1]]))
    scorer = Scorer(Mixing(), load_tokenizer(checkpoints.policy), rows_per_request=2)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"the versions of 2 rows|one request was scored by"):
        asyncio.run(scorer.score(rollout))
