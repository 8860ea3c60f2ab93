"""The journal of samples: what a run records, how long it keeps it, and that steps replay bit for bit."""

from pathlib import Path
from typing import Any

import pytest
from live_system import Checkpoints
from test_loop import go, make_ppo

from rlhf_triton.tools.replay import replay

STEPS = 3
SETTINGS: dict[str, Any] = {
    "algorithm_name": "grpo",
    "responses_per_prompt": 2,
    "rollout_size": 4,
    "minibatch_size": 2,
    "lora_rank": 2,
    "steps": STEPS,
    "checkpoint_every": 2,
    "validation_size": 0,
    "lr": 1e-2,
    "kl_coef": 0.1,
    "kl_target": 0.01,
    "normalization": "running",
}


def train(folder: Path, checkpoints: Checkpoints, **settings: Any) -> None:
    go(make_ppo(folder, checkpoints, **{**SETTINGS, **settings}))


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Path:
    """A run of three steps that has resumed after the second one, whose third step another process had begun."""
    folder = tmp_path_factory.mktemp("grpo")
    train(folder, checkpoints)
    return folder


def test_steps_of_a_deterministic_run_replay_identically(grpo: Path, capsys: pytest.CaptureFixture[str]):
    assert replay(grpo, 1, STEPS) == 0
    out = capsys.readouterr().out
    assert out.startswith("from the start of the run\n")
    assert out.count(": identical (") == STEPS, out
    assert replay(grpo, 3, 3) == 0
    assert capsys.readouterr().out.startswith("from the checkpoint of step 2\nstep 3: identical")
