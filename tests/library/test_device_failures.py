"""Device failures: out-of-memory work is repeated in halves; after other errors the model refuses requests."""

import gc
import logging
import threading
import weakref
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from live_system import make_run
from model_inputs import random_rows, scoring_inputs
from out_of_memory import let_memory_be_short
from served_model import served_model
from tiny_checkpoints import save_tiny
from triton_python_backend_utils import Request
from tritonclient.utils import InferenceServerException
from waiting import wait_for

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.client.connection import attempt_failure
from rlhf_triton.client.errors import ErrorKind
from rlhf_triton.models.device_errors import is_device_error, is_out_of_memory
from rlhf_triton.models.modeling import RewardModel, load_reward
from rlhf_triton.models.out_of_memory import MemoryBudget, OutOfMemory
from rlhf_triton.python_backend.serving.ranks.controller import ServingRanks
from rlhf_triton.python_backend.serving.versions.follower import Version
from rlhf_triton.trainer.publish import initialise_store
from rlhf_triton.wire.contract import REWARDS, UNTIL_LOADED

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free."


REMEDY = "lower max_length"


NCCL = "NCCL error in: ProcessGroupNCCL.cpp:99, unhandled cuda error\nLast error:\nCuda failure 2 "


def fits(most):
    """Return work on rows that runs out of memory above `most` rows."""

    def work(rows):
        if len(rows) > most:
            raise torch.OutOfMemoryError(FULL)
        return list(rows)

    return work


@pytest.mark.parametrize("most", [1, 2, 3, 7, 100])
def test_halving_processes_each_row_once_and_in_order(most):
    budget = MemoryBudget("critic.token_budget", remedy=REMEDY)
    parts = budget.run_in_parts(fits(most), range(20))
    assert [row for part in parts for row in part] == list(range(20))
    assert budget.num_halvings == len(parts) - 1
    assert max(map(len, parts)) <= most


def test_failed_attempt_holds_no_memory_during_the_retry():
    held = weakref.WeakSet[torch.Tensor]()
    gc.freeze()  # what other tests left takes a second to examine

    def work(rows):
        gc.collect()
        assert len(held) == 0
        tensor = torch.zeros(3)
        held.add(tensor)
        return len(fits(1)(rows))

    assert MemoryBudget("x", remedy=REMEDY).run_in_parts(work, range(4)) == [1, 1, 1, 1]
    gc.unfreeze()


def test_halving_keeps_the_reduced_size(caplog):
    budget = MemoryBudget("actor.policy.token_budget", 1000, remedy=REMEDY)
    work = Mock(side_effect=lambda size: fits(30)(range(min(size, 100))) and size)
    with caplog.at_level(logging.WARNING):
        assert [budget.run(work, least=7, most=100) for _ in range(2)] == [25, 25]
    assert [call.args for call in work.call_args_list] == [(1000,), (50,), (25,), (25,)]
    assert budget.num_halvings == 2
    assert all("actor.policy.token_budget" in line and "2.00 GiB" not in line for line in caplog.messages)


def test_single_row_that_does_not_fit_raises_and_keeps_the_batch_size():
    budget = MemoryBudget("trainer.token_budget", 64, remedy=REMEDY)
    with pytest.raises(OutOfMemory, match=r"a single row.*CUDA out of memory.*; lower max_length$"):
        budget.run_in_parts(fits(0), range(4))
    with pytest.raises(OutOfMemory, match=r"a single row.*; lower max_length$"):
        budget.run(lambda size: fits(1)(range(size)), least=10, most=64)
    assert budget.size == 64  # other rows may fit
    assert (budget.new_halvings(), budget.new_halvings()) == (2 + 3, 0)


def test_halving_raises_other_errors_at_once():
    budget = MemoryBudget("x", 8, remedy=REMEDY)
    work = Mock(side_effect=RuntimeError("CUDA error: an illegal access"))
    for attempt in (lambda: budget.run_in_parts(work, [1, 2]), lambda: budget.run(work, least=1, most=8)):
        with pytest.raises(RuntimeError, match="illegal"):
            attempt()
    assert (budget.num_halvings, work.call_count) == (0, 2)


@pytest.mark.parametrize(
    ("error", "is_full", "is_broken"),
    [
        (torch.OutOfMemoryError(FULL), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, False),
        (torch.AcceleratorError("CUDA error: out of memory", 2), True, False),
        (torch.AcceleratorError("CUDA error: device-side assert triggered", 710), False, True),
        (RuntimeError(NCCL + "'out of memory'"), True, False),
        (RuntimeError(NCCL.replace("2", "700") + "'an illegal memory access was encountered'"), False, True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False, False),
        (ValueError("CUDA error"), False, False),
    ],
)
def test_gpu_errors_are_classified(error, is_full, is_broken):
    assert (is_out_of_memory(error), is_device_error(error)) == (is_full, is_broken)


# ---- served models ----

ROWS = random_rows([3, 7, 5, 12, 9], seed=1)
ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


@pytest.fixture
def reward(tmp_path, checkpoints):
    with served_model(make_run(tmp_path, checkpoints).config, "reward_model") as served:
        yield served


def ask(model, rows=ROWS, outputs=(REWARDS,)):
    request = Request(scoring_inputs(rows), outputs)
    model.execute([request])
    return request.responses.get(timeout=120)


@pytest.mark.parametrize("at_launch", [True, False])
def test_model_refuses_requests_after_a_device_error(reward, monkeypatch, at_launch):
    counted = []
    monkeypatch.setattr(reward.served.compute._failures, "add", counted.append)
    fail = Mock(side_effect=torch.AcceleratorError(ILLEGAL))
    # CUDA reports an error at a later call than the one that caused it.
    monkeypatch.setattr(reward.served, "forward", fail if at_launch else lambda *_: fail)
    for _ in range(2):
        refused = str(ask(reward).error)
        assert refused.startswith("UNAVAILABLE: reward_model has lost its device")
        assert UNTIL_LOADED in refused
        assert attempt_failure(InferenceServerException(refused, "500"), 1.0).kind is ErrorKind.DEAD
    wait_for(lambda: bool(counted))  # it is counted after the answer
    assert counted == [(1, 0)]


def test_device_error_while_loading_does_not_reject_the_version(reward, monkeypatch):
    """The thread that loads it never goes on, and so rejects no version."""
    monkeypatch.setattr("rlhf_triton.python_backend.serving.torch_scoring.threading.Event", lambda: pytest)
    monkeypatch.setattr(pytest, "wait", lambda: pytest.skip.Exception, raising=False)
    with pytest.raises(CheckpointError), reward.served.compute.loading_version():
        raise CheckpointError("version 3 cannot be loaded") from RuntimeError(ILLEGAL)
    assert UNTIL_LOADED in str(ask(reward).error)


def test_served_forward_is_halved_on_out_of_memory_and_a_single_row_is_refused(reward, checkpoints, monkeypatch):
    expected = load_reward(checkpoints.reward).score(ROWS)
    most = 2
    sizes = []
    halved = []
    forward = reward.served.forward

    def limited(model, rows, width):
        sizes.append(len(rows))
        fits(most)(rows)
        return forward(model, rows, width)

    monkeypatch.setattr(reward.served, "forward", limited)
    monkeypatch.setattr(reward.served.compute._failures, "add", halved.append)
    np.testing.assert_allclose(ask(reward).outputs[REWARDS], expected, rtol=0, atol=1e-6)
    assert (sizes[0], halved) == (len(ROWS), [(0, 2)])  # 5 rows as 2 + 3, and 3 as 1 + 2
    most = 0
    refused = str(ask(reward, ROWS[:1]).error)
    assert refused.startswith("INTERNAL: OutOfMemory:")
    assert "lower the model's max_length" in refused
    most = 2
    assert ask(reward).error is None


def test_idle_threads_release_replaced_versions(tmp_path, checkpoints):
    run = make_run(tmp_path, checkpoints)
    initialise_store(run.store, run.config.critic, run_id=run.run_id)
    with served_model(run.config, "critic") as critic:
        assert ask(critic, outputs=("values",)).error is None
        replaced = weakref.ref(critic.served.versions.version.model)
        critic.served.versions.version = Version(1, None)
        wait_for(lambda: gc.collect() is not None and replaced() is None)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_lost_serving_rank_reports_that_it_ran_out_of_memory(tmp_path, monkeypatch, rank):
    save_tiny(tmp_path / "reward", "llama", "reward")
    if rank:
        let_memory_be_short(monkeypatch, tmp_path, "rlhf_triton.models.modeling", "RewardModel", "launch")
    lost = []
    ranks = ServingRanks(2, "cpu", 1, lost.append)
    try:
        model = ranks.load("load_reward", tmp_path / "reward", None, {"dtype": "float32"})

        def full(*_):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        if not rank:
            monkeypatch.setattr(RewardModel, "score", full)

        def forward():
            with ranks.forward(model, [np.arange(3, 20)], 32):
                model.score([np.arange(3, 20)], 32)

        threading.Thread(target=forward, daemon=True).start()  # never returns: its requests are answered elsewhere
        wait_for(lambda: bool(lost))
    finally:
        ranks.close()
        torch.distributed.destroy_process_group()
    expected = f"rank {rank} ran out of memory on cpu (CUDA out of memory); lower token_budget"
    assert [reason.endswith(expected) for reason in lost] == [True]
