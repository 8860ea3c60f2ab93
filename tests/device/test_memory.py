"""The memory of simulated GPUs: updates and log-probs that run out of it, and where it is reported."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest
import simcuda
import torch
import triton_python_backend_utils as stub
from policy_training import (
    random_batch,
    samples_of,
    trainable_policy,
    update_of,
    weights_of,
)
from recorded_run import RecordedRun
from run_checkpoints import make_tokenizer
from served_model import served_model
from simulated_cuda.device import TOTAL_MEMORY, memory_limit
from tiny_checkpoints import save_tiny

from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.models.out_of_memory import MemoryBudget, OutOfMemory, gpu_bytes
from rlhf_triton.store.heartbeat import Heartbeat
from rlhf_triton.store.journal import Journal
from rlhf_triton.tools import status
from rlhf_triton.trainer.critic_update import UpdateReport
from rlhf_triton.trainer.progress import SidecarProgress

GPU = 1
DEVICE = "cuda:1"
LENGTHS = [9, 40, 12, 61, 33, 50, 18, 57]
PROMPT = 3
BUDGET = 130  # three micro-batches: the first ones fit, so that their gradients must not count twice


def make_policy(checkpoint, **settings):
    section = {"lr": 1e-2, "minibatch_size": 4, "token_budget": BUDGET, "algorithm_name": "grpo"}
    torch.manual_seed(0)
    return trainable_policy(**{**section, "model": checkpoint, "device": DEVICE, "precision": "float32", **settings})


def make_batch(seed):
    return random_batch(LENGTHS, prompt=PROMPT, seed=seed)


def update(policy, seed):
    return update_of(policy).run(make_batch(seed), seed=seed, kl_coef=0.1).metrics


def needed(work):
    """Return the result of `work` and the bytes that it allocates in addition."""
    before = simcuda.allocated(GPU)
    simcuda.reset_peak(GPU)
    return work(), simcuda.peak(GPU) - before


def with_room_for(num_bytes, work):
    with memory_limit(GPU, simcuda.allocated(GPU) + int(num_bytes)):
        return work()


@pytest.mark.parametrize(("settings", "share"), [({}, 0.75), ({"lora_rank": 2}, 0.6)], ids=str)
def test_out_of_memory_does_not_change_a_policy_update(checkpoint, settings, share, caplog):
    large = make_policy(checkpoint, **settings)
    small = make_policy(checkpoint, **settings)
    for policy in (large, small):
        update(policy, 0)  # creates the optimizer's state
    expected, most = needed(lambda: update(large, 1))
    stats = with_room_for(share * most, lambda: update(small, 1))
    assert small.trained.memory.num_halvings >= 1
    assert small.trained.memory in small.halvings
    assert "(actor.policy.token_budget)" in caplog.text
    assert stats == pytest.approx(expected, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(weights_of(small), weights_of(large), rtol=0, atol=1e-4)


@pytest.mark.parametrize("is_set", [False, True])
def test_policy_update_that_does_not_fit_names_the_settings_to_change(checkpoint, is_set):
    policy = make_policy(checkpoint, gradient_checkpointing=is_set)
    more = "" if is_set else r" or set actor\.policy\.gradient_checkpointing"
    with pytest.raises(OutOfMemory, match=rf"; lower actor\.generation\.max_new_tokens{more}$"):
        with_room_for(1, lambda: update(policy, 0))


@pytest.mark.parametrize("reference", [False, True])
def test_logprobs_are_computed_in_halves_if_memory_runs_out(checkpoint, reference):
    policy = make_policy(checkpoint, kl_reference="actor", token_budget=1000)
    rollout = samples_of(make_batch(0), prompt=PROMPT)
    policy.logprobs(rollout, reference=reference)
    expected, most = needed(lambda: policy.logprobs(rollout, reference=reference))
    halves = with_room_for(0.6 * most, lambda: policy.logprobs(rollout, reference=reference))
    assert policy.trained.memory.num_halvings >= 1
    torch.testing.assert_close(halves, expected, rtol=0, atol=1e-5)


# ---- where it is shown: metrics, lines of the files, `rlhf-triton status` ----

GIB = 1 << 30


def test_gpu_bytes_reports_allocated_peak_and_total_memory():
    before = torch.cuda.memory_allocated(2)
    torch.cuda.reset_peak_memory_stats(2)
    kept = torch.zeros(100, device="cuda:2")
    kept = torch.zeros(50, device="cuda:2")
    assert gpu_bytes(torch.device("cuda:2")) == {
        "gpu_bytes": before + kept.nbytes,
        "gpu_peak_bytes": before + 600,
        "gpu_reserved_bytes": before + kept.nbytes,
        "gpu_size_bytes": TOTAL_MEMORY,
    }
    assert gpu_bytes(torch.device("cpu")) == {}


def test_served_model_exports_the_memory_of_its_own_gpu(tmp_path, monkeypatch):
    shown = {}

    class Family(stub.MetricFamily):
        def __init__(self, *, name, **_):
            self._name = name

        def Metric(self, *, labels):
            return Family(name="/".join([self._name, *labels.values()]))

        def set(self, value):
            shown[self._name] = value

    monkeypatch.setattr(stub, "MetricFamily", Family)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    save_tiny(tmp_path, "llama", "reward", vocab_size=len(tokenizer))
    config = RunConfig.model_validate({"reward": {"model": str(tmp_path), "device": "cuda"}})
    with served_model(config, "reward_model", model_instance_device_id="3") as model:
        model.served.compute.publish()
        assert shown["rlhf_gpu_bytes/reward_model/reward_model_0_0"] == torch.cuda.memory_allocated(3) > 0
    assert {name.split("/")[0] for name in shown} >= {f"rlhf_{name}" for name in gpu_bytes(torch.device("cuda:3"))}


def test_status_shows_the_memory_of_actor_and_sidecar(tmp_path):
    run = RecordedRun(tmp_path, device=DEVICE).start().steps(1)
    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert written.items() >= gpu_bytes(torch.device(DEVICE)).items()
    run.config.run.journal_dir.mkdir()
    journal = Journal(run.config.run.journal_dir, run.config.run.identity)
    progress = SidecarProgress(run.config, journal, epoch=1, stop=threading.Event())
    sizes = {"gpu_bytes": 1, "gpu_peak_bytes": 40, "gpu_reserved_bytes": 41, "gpu_size_bytes": 80}
    memory = {name: size * GIB for name, size in sizes.items()}
    progress.log_update(
        1,
        1,
        UpdateReport(
            loss_mean=0.5, grad_norm=1.0, lr=1e-5, optimizer_steps=1, skipped_steps=0, seconds=2.0, memory=memory
        ),
        None,
    )
    critic = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")))  # a line without a GPU's memory
    failed = SimpleNamespace(trained=SimpleNamespace(memory=MemoryBudget("x", remedy="y")), critic=critic)
    failed.trained.memory.num_halvings = 3
    publisher = SimpleNamespace(rejected=0)
    progress.log_failure(2, 1, "no memory", publisher, failed)
    exported = {each.name: each.samples[0].value for each in progress._exporter.collect() if each.samples}
    assert exported["rlhf_trainer_gpu_peak_bytes"] == 40 * GIB
    assert exported["rlhf_trainer_out_of_memory"] == 3
    journal.write_heartbeat(Heartbeat(epoch=1, step=1, micro_batch=0, state="idle", time=0.0))
    (actor,) = [line for line in status.status(run.config) if line.startswith("actor")]
    assert actor.endswith("; 0.0 GiB on its GPU of 80.0 GiB, at most 0.0")
    assert "; 1.0 GiB on its GPU of 80.0 GiB, at most 40.0;" in status._sidecar(run.config)
