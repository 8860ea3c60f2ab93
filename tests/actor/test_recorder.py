"""`actor.run.recorder`: an actor's checkpoint names the critic's and those still needed; a failed save is reported."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from actor.algorithms.kl import KLControl
from actor.algorithms.stages import RewardShaper
from actor.data.rollout import Prompt, Rollout, Scores
from actor.policy.checkpoint import RunState, critic_steps, saved_steps
from actor.policy.policy import Policy
from actor.run.recorder import Recorder
from actor.run.validation import Validation
from python_backend.checkpoints.inspection import CheckpointError
from python_backend.client.errors import RequestFailed
from python_backend.client.retry import RequestCounters
from python_backend.config import ActorSection, PolicySection, RunConfig
from python_backend.store.jsonl import read_jsonl
from python_backend.store.weights import WeightsStore
from python_backend.training.ranks import ALONE
from python_backend.wire.contract import STEP_AHEAD
from tests.support.prompts import one_prompt
from tests.support.settings import nested


class TinyPolicy:
    """What checkpoints are made of, and nothing that generates."""

    ranks = ALONE
    write_state, read_state = Policy.write_state, Policy.read_state

    def __init__(self) -> None:
        self.settings = PolicySection()
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.optimizer_step = 0
        self.fingerprint = "of its start"

    def save(self, folder: Path) -> None:
        save_file(self.model.state_dict(), folder / "model.safetensors")

    def load(self, folder: Path) -> None:
        self.model.load_state_dict(load_file(folder / "model.safetensors"))


class Server:
    """Takes critic_save down; refuses it while `fails` is set, which the real one does not do on demand."""

    def __init__(self) -> None:
        self.counters = RequestCounters()
        self.saved: list[tuple[int, list[int]]] = []
        self.rewound: list[int] = []
        self.fails = False
        self.received = 1000  # the newest step that the critic has been sent

    async def save(self, *, run_id: str, step: int, keep_steps: list[int]) -> int:
        if self.fails:
            raise RequestFailed("critic_save is away")
        self.saved.append((step, keep_steps))
        return step

    async def rewind(self, *, run_id: str, step: int) -> int:
        if step > self.received:
            raise RequestFailed(f"critic_save refused: rewind_to: {step}, {STEP_AHEAD} 'test' is {self.received}")
        self.rewound.append(step)
        return 70 + step


@pytest.fixture
def server() -> Server:
    return Server()


def recorder_of(folder: Path, server: Server, reference_folder: Path = Path("start"), **actor: Any) -> Recorder:
    settings = {"keep_checkpoints": 2, "steps": 4, "validation_every": 1, **actor}
    reference = {"checkpoint": reference_folder}
    config = RunConfig.model_validate(
        {"run": {"dir": folder}, "actor": nested(ActorSection, settings), "reference": reference}
    )
    state = RunState(
        TinyPolicy(),
        RewardShaper(config.actor.rewards, max_new_tokens=9),
        KLControl(0.1, target=None, horizon=1),
        one_prompt(),
    )  # type: ignore[arg-type]
    return Recorder(config, state, server, has_critic=True)  # type: ignore[arg-type]


async def checkpoints(recorder: Recorder, *steps: int) -> None:
    for step in steps:
        await recorder.checkpoint(step)
        await asyncio.gather(*recorder.saves)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def test_a_checkpoint_names_the_critics_and_a_resumed_actor_goes_back_to_it(tmp_path: Path, server: Server):
    async def first() -> None:
        recorder = recorder_of(tmp_path, server)
        await recorder.resume()
        recorder.weights_version = 91  # as the loop does with each answer
        await checkpoints(recorder, 3)

    run(first())
    state = json.loads((tmp_path / "checkpoints" / "actor" / "3" / "state.json").read_text())
    assert (state["step"], state["critic_step"], state["weights_version"]) == (3, 3, 91)
    resumed = recorder_of(tmp_path, server)
    assert run(resumed.resume()) == 3
    assert server.rewound == [0, 3]
    assert resumed.weights_version == 73


def test_a_rollback_is_as_stale_as_its_manifest_says(tmp_path: Path, server: Server):
    """`tools weights rollback` publishes step 1 as version 3, while 5 updates have been sent."""

    def write(folder: Path) -> None:
        save_file({"w": torch.zeros(1)}, folder / "model.safetensors")

    recorder = recorder_of(tmp_path, server)
    store = WeightsStore(recorder._weights.root)
    for step in (0, 1, 4, 1):
        store.add(write, run_id="test", step=step, parent=None, epoch=0, reuse=False)

    async def reads() -> dict[str, Any]:
        await recorder.resume()
        yes = torch.ones(4).bool()
        scores = Scores(torch.zeros(4), torch.zeros(4, 2), torch.tensor([2, 3, 3, 9]), yes, [])
        return recorder._critic_metrics(scores, step=6)

    assert run(reads())["train_rollouts/staleness_rows"] == {"1": 1, "4": 2, "5": 1}


def test_the_event_loop_runs_while_large_files_are_written(tmp_path: Path, server: Server):
    """Otherwise an answer that arrives meanwhile is taken for one that came after its deadline."""

    async def writes() -> list[bool]:
        recorder, loop = recorder_of(tmp_path, server), asyncio.get_running_loop()
        recorder._settings = recorder._settings.model_copy(update={"validation_every": 1})
        plain, ran = recorder._policy.save, []

        def save(folder: Path) -> None:
            looped = threading.Event()
            loop.call_soon_threadsafe(looped.set)
            ran.append(looped.wait(5))
            plain(folder)

        recorder._policy.save = save
        await recorder.resume()
        await recorder.checkpoint(1)
        await recorder.log_validation("between", 1, validation(1.0), seconds=0.1)
        await recorder.finish(scorer=None, seconds=1.0, steps=1)  # type: ignore[arg-type]
        return ran

    assert run(writes()) == [True, True, True]


def test_each_save_says_which_checkpoints_are_there_still(tmp_path: Path, server: Server):
    run(checkpoints(recorder_of(tmp_path, server), 2, 4, 6))
    assert server.saved == [(2, [2]), (4, [2, 4]), (6, [4, 6])]
    root = tmp_path / "checkpoints" / "actor"
    assert saved_steps(root) == critic_steps(root) == [4, 6]


def test_a_checkpoint_that_the_critic_never_received_is_set_aside(tmp_path: Path, server: Server):
    """The run ended while no server answered; the one before counts, also after the critic has that step again."""
    root = tmp_path / "checkpoints" / "actor"
    run(checkpoints(recorder_of(tmp_path, server), 2, 4))
    server.received = 3
    assert run(recorder_of(tmp_path, server).resume()) == 2
    assert saved_steps(root) == [2]
    assert (root / "4.set-aside" / "state.json").is_file()
    server.received = 4
    assert run(recorder_of(tmp_path, server).resume()) == 2
    assert server.rewound == [2, 2]


def lose_every_step(server: Server, root: Path, recorder: Recorder) -> None:
    """The critic's journal may be another run's."""
    server.received = 0


def damage_all(server: Server, root: Path, recorder: Recorder) -> None:
    for step in (2, 4):
        (root / str(step) / "model.safetensors").unlink()


def start_elsewhere(server: Server, root: Path, recorder: Recorder) -> None:
    recorder._policy.fingerprint = "of another"


@pytest.mark.parametrize(
    ("trouble", "kind", "message"),
    [
        (lose_every_step, RequestFailed, "rewind_to: 2"),
        (damage_all, CheckpointError, r"2/model\.safetensors cannot be read.*there is no earlier checkpoint"),
        (start_elsewhere, CheckpointError, "the KL would be measured against a different reference"),
    ],
)
def test_a_run_without_a_checkpoint_to_resume_from_does_not_start_anew(
    tmp_path: Path, server: Server, trouble: Callable[..., None], kind: type[Exception], message: str
):
    """Its checkpoints stay as they are, and the critic does not go back."""
    root = tmp_path / "checkpoints" / "actor"
    run(checkpoints(recorder_of(tmp_path, server), 2, 4))
    recorder = recorder_of(tmp_path, server)
    trouble(server, root, recorder)
    with pytest.raises(kind, match=message):
        run(recorder.resume())
    assert (saved_steps(root), server.rewound) == ([2, 4], [])


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture, name: str
):
    """The one before it counts, and the critic goes back to that."""
    root = tmp_path / "checkpoints" / "actor"
    recorder = recorder_of(tmp_path, server)
    run(checkpoints(recorder, 2))
    weight = recorder._policy.model.weight.detach().clone()
    with torch.no_grad():
        recorder._policy.model.weight += 1
    run(checkpoints(recorder, 4))
    damaged = root / "4" / name
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"0000")
    resumed = recorder_of(tmp_path, server)
    assert run(resumed.resume()) == 2
    assert torch.equal(resumed._policy.model.weight, weight)
    assert server.rewound == [2]
    assert saved_steps(root) == [2]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert str(damaged) in warning
    assert "kept as 4.set-aside, resuming from step 2 instead" in warning


def test_another_served_reference_is_refused(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch):
    """One that cannot be seen from here is not compared."""
    served = {"kl_reference": "triton", "kl_coef": 0.1}
    weights = {"one": "a", "other": "b"}
    monkeypatch.setattr("actor.policy.checkpoint.fingerprint_weights", lambda folder: weights[folder.name])
    for name in weights:
        (tmp_path / name).mkdir()
    run(checkpoints(recorder_of(tmp_path, server, reference_folder=tmp_path / "one", **served), 2))
    with pytest.raises(
        CheckpointError, match=r"measured against .*/one, but reference\.checkpoint has different weights"
    ):
        run(recorder_of(tmp_path, server, reference_folder=tmp_path / "other", **served).resume())
    with pytest.raises(CheckpointError, match=r"reference\.checkpoint has different weights"):
        run(recorder_of(tmp_path, server).resume())  # the policy's own start
    assert server.rewound == []
    for folder in ("one", "elsewhere"):
        assert run(recorder_of(tmp_path, server, reference_folder=tmp_path / folder, **served).resume()) == 2


async def ends(recorder: Recorder) -> None:
    await recorder.resume()
    await recorder.finish(scorer=None, seconds=1.0, steps=4)  # type: ignore[arg-type]


def test_a_failed_save_is_logged_at_once_and_repeated_at_the_end(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
):
    """Where it fails again, the run ends with an error."""

    async def whole() -> None:
        recorder = recorder_of(tmp_path, server)
        await checkpoints(recorder, 1)
        server.fails = True
        await checkpoints(recorder, 2)
        assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
            "saving the critic's checkpoint of step 2 failed: critic_save is away"
        ]
        with pytest.raises(RequestFailed, match="critic_save is away"):
            await ends(recorder)
        server.fails = False
        await ends(recorder)

    run(whole())
    assert server.saved == [(1, [1]), (2, [1, 2])]


def validation(reward: float, version: int | None = None) -> Validation:
    """As far as it is written down."""
    one, yes = torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool)
    prompt = Prompt("1", "a", np.ones(1, np.int64))
    rollout = Rollout([prompt], torch.ones(1, 2, dtype=torch.int64), one + 1, one, yes)
    scores = Scores(torch.tensor([reward]), torch.zeros(1, 2), one, yes, [])
    if version is not None:
        scores = dataclasses.replace(scores, reward_versions=one * version)
    return Validation(rollout, scores, kl=0.5, explained_variance=None)


def test_a_validation_is_added_to_the_file_and_not_written_with_all_before_it(tmp_path: Path, server: Server):
    path = tmp_path / "validations.jsonl"

    async def validates(*steps: int) -> list[int]:
        recorder = recorder_of(tmp_path, server)
        await recorder.resume()
        files = []
        for step in steps:
            await recorder.log_validation("between", step, validation(float(step)), seconds=0.1)
            files.append(path.stat().st_ino)
            if step == 2:
                await checkpoints(recorder, 2)
        return files

    assert len(set(run(validates(2, 4, 6)))) == 1
    run(validates())  # resumed from step 2: those of later steps are owed again
    assert [line["step"] for line in read_jsonl(path)] == [2]
    run(validates(4, 8))
    run(validates(2))
    assert [(line["step"], line["reward"]) for line in read_jsonl(path)] == [(2, 2.0)]


def best_step(folder: Path) -> int:
    return json.loads((folder / "best" / "best.json").read_text())["step"]


def test_a_validation_without_scores_does_not_replace_the_best(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
):
    async def validates(*rewards: float) -> None:
        recorder = recorder_of(tmp_path, server, validation_every=0)  # a run that validates only before and after
        await recorder.resume()
        for step, reward in enumerate(rewards, 1):
            await recorder.log_validation("between", step, validation(reward), seconds=0.1)

    run(validates(math.nan))
    assert not (tmp_path / "best").exists()
    (line,) = read_jsonl(tmp_path / "validations.jsonl")
    assert line["reward"] is None  # JSON has no NaN
    run(validates(0.5, 0.2, math.nan, 0.1))
    assert best_step(tmp_path) == 1
    assert "validation at step 3: no response has a score, so best/ is unchanged" in caplog.text
    run(validates(0.1, 0.6))
    assert best_step(tmp_path) == 2
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["best.json", "model.safetensors"]


def test_rewards_of_different_versions_are_not_compared(tmp_path: Path, server: Server):
    async def validates() -> list[int]:
        recorder = recorder_of(tmp_path, server)
        await recorder.resume()
        best = []
        for step, (reward, version) in enumerate([(0.9, 0), (0.5, 0), (0.1, 1), (0.3, 1), (0.2, 1)], 1):
            await recorder.log_validation("between", step, validation(reward, version), seconds=0.1)
            best.append(best_step(tmp_path))
        return best

    assert run(validates()) == [1, 1, 3, 4, 4]
