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


EACH = {"every": 1, "save_every": 50}
RARE = {"every": 3, "save_every": 7}  # published: 3, 6, 7 (a save), 9
ANSWERS = [(0, 1), (0, 2), (1, 3), (1, 4), (1, 5), (2, 6), (2, 7)]  # those to 4 and 5 name version 1, none the save's


@pytest.mark.parametrize(
    ("start", "rules", "answers", "sent", "contained"),
    [  # the first version and its step; (version, step) of each answer; updates sent; version -> the updates in it
        pytest.param((6, 3), EACH, [], 3, {6: 3, 5: 0}, id="an older version is no excuse"),
        pytest.param((6, 3), EACH, [(7, 4), (8, 5)], 5, {6: 3, 7: 4, 8: 5}, id="rewound to step 3, as version 6"),
        pytest.param((0, 0), EACH, [(1, 1)], 3, {1: 1, 2: 2, 3: 3}, id="a version that no answer has named yet"),
        pytest.param((0, 0), EACH, [(1, 1), (2, 2), (4, 3)], 3, {2: 2, 3: 0, 4: 3}, id="version 3 is a rollback"),
        pytest.param((0, 0), EACH, [(n, n) for n in range(1, 9)], 8, {8: 8, 9: 0}, id="and as stale as it may be"),
        pytest.param((10, 4), EACH, [(13, 7), (11, 5), (12, 6)], 7, {10: 4, 11: 5, 12: 6, 13: 7}, id="in any order"),
        pytest.param((0, 0), RARE, ANSWERS, 7, {0: 0, 1: 3, 2: 6, 3: 7}, id="rare publishing"),
        pytest.param((0, 0), RARE, [*ANSWERS, (3, 8), (4, 9)], 9, {0: 0, 1: 3, 2: 6, 3: 7, 4: 9}, id="goes on"),
    ],
)
def test_a_version_contains_the_updates_up_to_a_step(
    start: tuple[int, int], rules: dict[str, int], answers: Any, sent: int, contained: dict[int, int]
) -> None:
    steps = VersionSteps(*start, **rules)
    for version, step in answers:
        steps.learn(version, step)
    assert {version: steps.step_of(version, sent=sent) for version in contained} == contained
    assert steps.histogram(list(contained), sent=sent) == Counter(sent - step for step in contained.values())


def test_a_manifest_says_how_old_a_rollback_is():
    steps = VersionSteps(0, 0, every=1, save_every=50, manifest_step={8: 8, 9: 6}.get)
    for step in range(1, 9):
        steps.learn(step, step)
    assert steps.histogram([7, 8, 9, 9], sent=9) == {1: 1, 2: 1, 3: 2}


def test_a_run_of_months_remembers_the_newest_versions_alone() -> None:
    steps = VersionSteps(0, 0, every=1, save_every=50)
    for step in range(1, KEPT_VERSIONS + 200):
        steps.learn(step + 7, step)
    assert len(steps._steps) == KEPT_VERSIONS
    assert steps.step_of(KEPT_VERSIONS, sent=KEPT_VERSIONS + 200) == KEPT_VERSIONS - 7
    assert steps.step_of(8, sent=KEPT_VERSIONS + 200) == 0, "an older one is no excuse"


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
