"""Scoring on a GPU: host synchronisations and copies per forward pass, streams, placement, out of memory."""

import threading

import numpy as np
import pytest
import simcuda
import torch
from live_system import make_run
from model_inputs import random_rows, scoring_inputs
from ranks import serving_ranks
from served_model import served_model
from simulated_cuda.streams import Stream, current_stream
from simulated_cuda.threads import recorded_launches
from simulated_cuda.trace import Trace
from tiny_checkpoints import save_tiny
from triton_python_backend_utils import Request

from rlhf_triton.models import gpu
from rlhf_triton.models.language_model import load_language_model
from rlhf_triton.models.modeling import load_critic, load_reward
from rlhf_triton.models.token_reward import load_process_reward
from rlhf_triton.trainer.publish import initialise_store
from rlhf_triton.wire.contract import REWARDS, VALUES

DEVICE = "cuda:3"
PATIENCE_S = 120.0
ROWS = random_rows([3, 7, 5, 12, 9], seed=1, vocab_size=40)
SERVED = {  # output -> loader, head of the checkpoint, method that launches a pass
    "rewards": (load_reward, "reward", "launch"),
    "values": (load_critic, "critic", "launch"),
    "token scores": (load_process_reward, "critic", "launch_token_scores"),
    "log-probs": (load_language_model, "language", "launch"),
}
CASES = [
    ("deberta-v3", "rewards", "float32"),
    ("gpt2", "values", "bfloat16"),
    ("roberta", "token scores", "bfloat16"),
    ("llama", "log-probs", "float32"),
]


@pytest.mark.parametrize(("family", "output", "dtype"), CASES)
def test_scoring_forward_synchronises_with_the_gpu_once(tmp_path, family, output, dtype):
    load, head, method = SERVED[output]
    save_tiny(tmp_path, family, head)
    launch = getattr(load(tmp_path, device=DEVICE, dtype=dtype), method)
    launch(ROWS, 12)()  # what is copied once
    with Trace() as launching:
        results = launch(ROWS, 12)
    with Trace() as waiting:
        found = results()
    assert launching.num_waits == 0, launching.where
    assert waiting.num_waits == 1, waiting.where
    expected = getattr(load(tmp_path, device="cpu", dtype=dtype), method)(ROWS, 12)()
    tolerance = 1e-4 if dtype == "float32" else 0.1 * max(float(np.abs(each).max()) for each in expected)
    for ours, exact in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=0, atol=tolerance)


# ---- served models ----


def make_served_run(folder, checkpoints, **settings):
    served = {"device": "cuda", "dtype": "float32", **settings}
    run = make_run(folder, checkpoints, reward=served, critic=served)
    initialise_store(run.store, run.config.critic, run_id=run.run_id)
    return run


def ask(model, *batches, output=REWARDS):
    """Send one request for each of `batches`, all at once; return the replies."""
    requests = [Request(scoring_inputs(rows), (output,)) for rows in batches]
    model.execute(requests)
    replies = [request.responses.get(timeout=PATIENCE_S) for request in requests]
    assert [reply.error for reply in replies] == [None] * len(replies)
    return [reply.outputs[output] for reply in replies]


@pytest.mark.parametrize(
    ("device", "gpu", "name", "output"), [("cuda", 3, "reward_model", REWARDS), ("cuda:1", 1, "critic", VALUES)]
)
def test_configured_device_overrides_tritons_instance_device(tmp_path, checkpoints, name, output, device, gpu):
    run = make_served_run(tmp_path, checkpoints, device=device)
    with (
        recorded_launches() as record,
        served_model(run.config, name, model_instance_device_id="3") as model,
    ):
        ask(model, ROWS, output=output)
        devices = {each.device for each in model.served.versions.version.model.model.parameters()}
    assert devices == {torch.device("cuda", gpu)}
    assert {each.gpu for each in record.launches} == {gpu}
    assert record.strays == []


def watch_passes(model):
    """Record by thread: launch or wait, its host synchronisations, GPU and stream."""
    events = {}
    forward = model.served.forward

    def noted(what, work):
        with Trace() as trace:
            found = work()
        event = (what, trace.num_waits, torch.cuda.current_device(), current_stream().stream_id)
        events.setdefault(threading.current_thread().name, []).append(event)
        return found

    def watched(*arguments):
        results = noted("launch", lambda: forward(*arguments))
        return lambda: noted("wait", results)

    model.served.forward = watched
    return events


@pytest.fixture
def priorities(monkeypatch):
    """The priorities of the streams that the test creates, by their ids."""
    created = {}
    begin = Stream.__init__

    def noted(stream, *args, **settings):
        begin(stream, *args, **settings)
        if "stream_id" not in settings:
            created[stream.stream_id] = stream.priority

    monkeypatch.setattr(Stream, "__init__", noted)
    gpu._staging_stream.cache_clear()
    return created


@pytest.mark.parametrize(("name", "output"), [("reward_model", REWARDS), ("critic", VALUES)])
def test_next_forward_is_launched_before_waiting_for_the_first(tmp_path, checkpoints, priorities, name, output):
    run = make_served_run(tmp_path, checkpoints, token_budget=1)
    with served_model(run.config, name, model_instance_device_id="3") as model:
        ask(model, ROWS[:1], output=output)
        events = watch_passes(model)
        ask(model, *[[row] for row in random_rows([9, 9], seed=2)], output=output)
    used = {own[0][3] for own in events.values()}
    assert len(used) == len(events) == 1
    for own in events.values():
        launches = [("launch", 0, 3, own[0][3])] * 2
        waits = [("wait", 1, 3, own[0][3])] * 2
        assert own == launches + waits
    assert {priorities[stream] for stream in used} == {gpu.HIGH}


@pytest.mark.parametrize("name", ["reward_model", "critic"])
def test_a_version_is_staged_on_a_stream_of_low_priority(tmp_path, checkpoints, priorities, name):
    run = make_served_run(tmp_path, checkpoints)
    with served_model(run.config, name, model_instance_device_id="3") as model:
        served = model.served.versions.version.model
        folder = run.config.reward.model if name == "reward_model" else run.store.folder(0)
        with Trace(places=False) as trace:
            staged = model.served.compute.load(folder, served)
    assert staged is not served
    ((number, stream),) = trace.streams
    assert (number, priorities[stream]) == (3, gpu.LOW)
    assert gpu.LOW > gpu.HIGH
    assert trace.waits["stream.synchronize"] == 1


def test_staging_thread_keeps_its_own_gpu_current():
    """Leaving a stream makes the previous GPU current again: the first one, in a thread that has chosen none."""
    found = []

    def load():
        with gpu.staging(torch.device("cuda:2")):
            pass
        found.append(torch.cuda.current_device())

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert found == [2]


# ---- a model split over two GPUs: the memory of a swap ----

FIRST_GPU = 4
SWAP = 2.1  # times the weights: the served version, the next one, and one tensor of its file
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 6, "num_attention_heads": 4}


def test_swap_of_a_tensor_parallel_model_holds_two_versions_in_served_precision(tmp_path):
    versions = [tmp_path / f"version-{seed}" for seed in (1, 2)]  # in float32 files
    for seed, folder in enumerate(versions, 1):
        save_tiny(tmp_path / f"checkpoint-{seed}", "llama", "critic", seed=seed, **SIZES)
        folder.mkdir()
        load_critic(tmp_path / f"checkpoint-{seed}").write(folder)
    exact = [load_critic(folder, dtype="bfloat16") for folder in versions]
    settings = {"dtype": "bfloat16"}
    with serving_ranks(f"cuda:{FIRST_GPU}") as ranks:
        before = simcuda.allocated(FIRST_GPU)
        served = ranks.load("load_critic", versions[0], None, settings)
        weights = simcuda.allocated(FIRST_GPU) - before
        assert weights < 0.6 * 2 * sum(p.numel() for p in exact[0].model.parameters())  # bytes of half
        simcuda.reset_peak(FIRST_GPU)
        following = ranks.load("load_critic", versions[1], served, settings)
        assert simcuda.peak(FIRST_GPU) - before <= SWAP * weights
        for model, whole in zip((served, following), exact, strict=True):
            with ranks.forward(model, ROWS, 12):
                found = model.values(ROWS, 12)
            assert {parameter.device.index for parameter in model.model.parameters()} == {FIRST_GPU}
            for ours, expected in zip(found, whole.values(ROWS, 12), strict=True):
                np.testing.assert_allclose(ours, expected, rtol=0, atol=0.1 * np.abs(expected).max())
