"""Versions of LoRA adapters on the real server: each instance merges them into version 0 and serves the result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bare_client import ask
from live_system import Checkpoints, LiveRun, make_run, start_system, training_inputs, wait_for
from test_reload import ROWS, SAVE, TOLERANCE, assert_serves, serve_values

from python_backend.models.modeling import load_critic
from python_backend.wire.contract import CRITIC_SAVE, CRITIC_TRAIN


def assert_serves_adapters(run: LiveRun, version: int) -> list[np.ndarray]:
    """The server serves `version`, whose folder transformers cannot load alone; returns its values."""
    values, served = serve_values(run)
    assert served == version
    critic = load_critic(run.store.folder(version))
    for ours, row in zip(values, ROWS, strict=True):
        np.testing.assert_allclose(ours, critic.values([row])[0], atol=TOLERANCE, rtol=0)
    return values


@pytest.mark.slow
def test_versions_of_adapters_are_served(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """By swap, and by the fresh process that a save brings."""
    settings = {"lora_rank": 2, "precision": "bfloat16", "publish": {"format": "adapter"}}
    system = start_system(make_run(tmp_path, checkpoints, trainer=settings))
    try:
        run, values = system.run, [assert_serves(system.run, 0)]
        for seed in (1, 2):
            answer = ask(run.url, CRITIC_TRAIN, training_inputs(seed=seed))
            values.append(assert_serves_adapters(run, int(answer["weights_version"][0])))
            assert max(float(np.abs(a - b).max()) for a, b in zip(*values[-2:], strict=True)) > 1e-5
        assert [run.store.manifest(version).base for version in (0, 1, 2)] == [None, 0, 0]
        pid = run.store.serving()[0].pid
        ask(run.url, CRITIC_SAVE, SAVE)
        wait_for(lambda: [record.pid for record in run.store.serving()] not in ([], [pid]), system.sidecar)
        assert_serves_adapters(run, 2)
    finally:
        system.stop()
