"""The critic's client for other trainers against server and sidecar, and the example that trains with it."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from live_system import TRAINING_KEY, Checkpoints, System, direct_rewards, direct_values, random_rows

from critic_client import AsyncCriticClient, CriticClient, RequestRefused

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ppo_with_triton_critic.py"
ROWS = random_rows([3, 17, 40], seed=5)


def client(system: System, **changes: Any) -> CriticClient:
    return CriticClient(system.run.url, **{"run_id": "test", "training_key": TRAINING_KEY, **changes})


def refused(call: Any, *arguments: Any) -> str:
    with pytest.raises(RequestRefused) as caught:
        call(*arguments)
    return caught.value.why


def test_values_updates_checkpoints_and_rewinds(live: System) -> None:
    done = live.run.next_step() - 1
    with client(live) as critic:
        critic.rewind(done)
        before = critic.values(ROWS)
        folder = live.run.store.folder(before.weights_version)
        for ours, direct in zip(before.values, direct_values(folder, ROWS), strict=True):
            np.testing.assert_allclose(ours, direct, atol=1e-5, rtol=0)
        scored = critic.score(ROWS)
        np.testing.assert_allclose(scored.rewards, direct_rewards(live.run.config.reward.checkpoint, ROWS), atol=1e-5)
        assert (scored.errors, scored.weights_version) == ([""] * 3, before.weights_version)

        old = [row[:-1] for row in before.values]
        update = (ROWS, [row + 5 for row in old], old, [np.ones(row.size) for row in old])
        answers = [critic.train(done + 1 + i, *update) for i in range(4)]
        losses, versions = [a.loss_mean for a in answers], [a.weights_version for a in answers]
        assert losses[0] == pytest.approx(0.5 * 5**2)
        assert max(losses[1:]) < losses[0]
        assert versions == sorted({*versions, before.weights_version})[1:]
        assert critic.values(ROWS).weights_version == versions[-1]
        assert critic.train(done + 4, *update) == answers[-1], "a repeated step is not trained again"

        assert critic.save(done + 2) >= versions[-1]
        assert critic.rewind(done + 2) > versions[-1]
        again = critic.train(done + 3, *update)
        assert again.loss_mean == pytest.approx(answers[2].loss_mean)


def test_what_does_not_fit_is_refused_by_name(live: System) -> None:
    done = live.run.next_step() - 1
    update = (ROWS, *([np.ones(row.size - 1) for row in ROWS] for _ in range(3)))
    with client(live) as first, client(live, run_id="stranger") as stranger, client(live, training_key="no") as thief:
        assert "header x-triton-training-key: missing or wrong" in refused(thief.rewind, done)
        assert "run_id: 'stranger', but this critic belongs to run 'test'" in refused(stranger.rewind, 0)
        assert f"the last step of run 'test' is {done}" in refused(first.rewind, done + 5)
        first.rewind(done)
        assert f"send step {done + 1} first" in refused(first.train, done + 3, *update)
        assert "tokens[0, 1]: 5000 is outside the vocabulary" in refused(first.values, [[3, 5000]])
        with client(live) as second:
            second.rewind(done)
            assert "was rewound after this request was sent" in refused(first.train, done + 1, *update)
            second.train(done + 1, *update)
            assert "was rewound after this request was sent" in refused(first.save, done + 1)


def test_async_values_are_served_while_an_update_trains(live: System) -> None:
    done = live.run.next_step() - 1

    async def run() -> None:
        async with AsyncCriticClient(live.run.url, run_id="test", training_key=TRAINING_KEY) as critic:
            before = await critic.rewind(done)
            update = (ROWS, *([np.ones(row.size - 1) for row in ROWS] for _ in range(3)))
            training = asyncio.create_task(critic.train(done + 1, *update))
            meanwhile = await critic.values(ROWS)
            answer = await training
            assert before <= meanwhile.weights_version <= answer.weights_version
            assert (await critic.values(ROWS)).weights_version == answer.weights_version

    asyncio.run(run())


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ppo_with_triton_critic", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_trains(
    live: System, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINING_KEY", TRAINING_KEY)
    torch.manual_seed(0)
    done = live.run.next_step() - 1
    history = example().train(str(checkpoints.policy), live.run.url, "test", done=done, steps=3)
    versions = [version for _, _, version in history]
    assert versions == sorted(set(versions))
    assert live.run.journal.last_step() == done + 3
    assert capsys.readouterr().out.count("critic version") == 3
    code = [line for line in EXAMPLE.read_text().partition('"""\n\n')[2].splitlines() if line.strip()]
    assert len([line for line in code if not line.strip().startswith(("#", '"""'))]) <= 60
