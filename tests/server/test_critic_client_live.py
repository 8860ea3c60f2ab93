"""The critic's client for other trainers against server and sidecar, and the example that trains with it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from live_system import TRAINING_KEY, Checkpoints, System, direct_rewards, direct_values, random_rows

from critic_client import CriticClient

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ppo_with_triton_critic.py"
ROWS = random_rows([3, 17, 40], seed=5)


def client(system: System, **changes: Any) -> CriticClient:
    return CriticClient(system.run.url, **{"run_id": "test", "training_key": TRAINING_KEY, **changes})


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
