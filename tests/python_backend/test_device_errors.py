"""A served model whose device fails: memory that is too small, and an error after which it cannot be used."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_system import Checkpoints, LiveRun, make_run, random_rows, scoring_inputs
from served_model import served_model
from triton_python_backend_utils import InferenceResponse, Request

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.client.connection import trouble_of
from python_backend.client.errors import Kind
from python_backend.models.modeling import load_reward
from python_backend.serving.versions.follower import Version
from python_backend.wire.contract import REWARDS, UNTIL_LOADED, TokenRow
from trainer.publish import initialise_store

ROWS = random_rows([3, 7, 5, 12, 9], seed=1)
PATIENCE_S = 60.0
ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


@pytest.fixture
def run(tmp_path: Path, checkpoints: Checkpoints) -> LiveRun:
    run = make_run(tmp_path, checkpoints)
    initialise_store(run.store, run.config.critic, run_id=run.run_id)
    return run


@pytest.fixture
def reward(run: LiveRun) -> Iterator[Any]:
    with served_model(run.config, "reward_model") as served:
        yield served


def ask(model: Any, rows: list[np.ndarray] = ROWS, outputs: tuple[str, ...] = (REWARDS,)) -> InferenceResponse:
    request = Request(scoring_inputs(rows), outputs)
    model.execute([request])
    return request.responses.get(timeout=PATIENCE_S)


@pytest.mark.parametrize("error", [torch.AcceleratorError(ILLEGAL), RuntimeError(ILLEGAL), RuntimeError("NCCL error")])
@pytest.mark.parametrize("at_launch", [True, False])
def test_after_a_device_error_the_model_refuses_requests_so_that_they_go_elsewhere(
    reward: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, at_launch: bool
):
    counted: list[tuple[int, ...]] = []
    monkeypatch.setattr(reward.served.compute._troubles, "add", counted.append)

    def fail(*_: object) -> Any:
        raise error

    # CUDA reports an error at a later call than the one that caused it.
    monkeypatch.setattr(reward.served, "forward", fail if at_launch else lambda *_: fail)
    for _ in range(2):
        refused = ask(reward).error
        assert refused is not None
        assert refused.startswith("UNAVAILABLE: reward_model has lost its device")
        assert UNTIL_LOADED in refused
    assert counted == [(1, 0)]


def test_a_version_is_not_blamed_for_a_device_error(reward: Any, monkeypatch: pytest.MonkeyPatch):
    """The thread that loads it never goes on, and so rejects no version."""
    monkeypatch.setattr("python_backend.serving.torch_scoring.threading.Event", lambda: pytest)
    monkeypatch.setattr(pytest, "wait", lambda: pytest.skip.Exception, raising=False)
    with pytest.raises(CheckpointError), reward.served.compute.blaming_the_device():
        raise CheckpointError("version 3 cannot be loaded") from RuntimeError(ILLEGAL)
    assert UNTIL_LOADED in str(ask(reward).error)


def test_a_pass_that_does_not_fit_is_halved_and_a_row_that_does_not_fit_is_refused(
    run: LiveRun, reward: Any, monkeypatch: pytest.MonkeyPatch
):
    expected = load_reward(run.config.reward.checkpoint).score(ROWS)
    most, sizes, halved = 2, [], []
    forward = reward.served.forward

    def limited(model: Any, rows: list[TokenRow], width: int) -> Any:
        sizes.append(len(rows))
        if len(rows) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 80 GiB.")
        return forward(model, rows, width)

    monkeypatch.setattr(reward.served, "forward", limited)
    monkeypatch.setattr(reward.served.compute._troubles, "add", halved.append)
    np.testing.assert_allclose(ask(reward).outputs[REWARDS], expected, rtol=0, atol=1e-6)
    assert sizes[0] == len(ROWS)
    assert halved == [(0, 2)]  # 5 rows as 2 + 3, and 3 as 1 + 2
    most = 0
    refused = ask(reward, ROWS[:1]).error
    assert refused is not None
    assert refused.startswith("INTERNAL: OutOfMemory:")
    assert "lower the model's max_length" in refused
    most = 2
    assert ask(reward).error is None


def test_idle_threads_keep_no_version_alive(run: LiveRun):
    with served_model(run.config, "critic") as critic:
        assert ask(critic, outputs=("values",)).error is None
        replaced = weakref.ref(critic.served.versions.version.model)
        critic.served.versions.version = Version(1, None)
        deadline = time.monotonic() + PATIENCE_S
        while replaced() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
            gc.collect()
        assert replaced() is None


@pytest.mark.parametrize(
    "message",
    [f"critic has lost its device: AcceleratorError; it {UNTIL_LOADED}", f"AcceleratorError: {ILLEGAL}"],
)
def test_the_actor_sends_such_a_request_to_another_server(message: str):
    from tritonclient.utils import InferenceServerException

    assert trouble_of(InferenceServerException(message, "500"), 1.0).kind is Kind.DEAD
