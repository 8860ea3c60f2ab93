"""Scoring on a card: host waits and copies of a forward pass, streams, placement, and lack of memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import simcuda
import torch
from live_system import Checkpoints, LiveRun, make_run, random_rows, scoring_inputs
from served_model import served_model
from simulated_cuda.device import memory_limit
from simulated_cuda.streams import Stream, current_stream
from simulated_cuda.threads import recorded_launches
from simulated_cuda.trace import Trace
from tiny_checkpoints import save_tiny
from torch.utils._python_dispatch import TorchDispatchMode
from triton_python_backend_utils import Request

from python_backend.models.card import streams
from python_backend.models.language_model import load_language_model
from python_backend.models.modeling import load_critic, load_reward
from python_backend.models.readout.token_reward import load_process_reward
from python_backend.wire.contract import REWARDS, VALUES
from trainer.publish import initialise_store

DEVICE = "cuda:3"
PATIENCE_S = 60.0
ROWS = random_rows([3, 7, 5, 12, 9], seed=1, vocab_size=40)
SERVED = {  # output -> loader, head of the checkpoint, method that launches a pass
    "rewards": (load_reward, "reward", "launch"),
    "values": (load_critic, "critic", "launch"),
    "token scores": (load_process_reward, "critic", "launch_token_scores"),
    "log-probs": (load_language_model, "language", "launch"),
}
CASES = [
    ("llama", "rewards", "bfloat16"),
    ("deberta-v3", "rewards", "float32"),
    ("gpt2", "values", "bfloat16"),
    ("bert", "values", "float32"),
    ("roberta", "token scores", "bfloat16"),
    ("qwen2", "token scores", "float32"),
    ("llama", "log-probs", "float32"),
    ("gpt2", "log-probs", "bfloat16"),
]


class Copy(NamedTuple):
    """A copy between host and card."""

    to_card: bool
    pinned: bool
    non_blocking: bool


class Copies(TorchDispatchMode):
    """Records the copies between host and card in its block."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Copy] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name
        if name in ("aten::_to_copy", "aten::copy_"):
            source = args[0] if name == "aten::_to_copy" else args[1]
            if source.is_cuda != out.is_cuda:
                non_blocking = bool(kwargs.get("non_blocking") or (name == "aten::copy_" and args[2:3] == (True,)))
                self.made.append(Copy(out.is_cuda, (source if out.is_cuda else out).is_pinned(), non_blocking))
        return out


@pytest.mark.parametrize(("family", "output", "dtype"), CASES)
def test_a_forward_pass_waits_once_for_its_results(tmp_path: Path, family: str, output: str, dtype: str):
    load, head, method = SERVED[output]
    save_tiny(tmp_path, family, head)
    launch = getattr(load(tmp_path, device=DEVICE, dtype=dtype), method)
    launch(ROWS, 12)()  # what is copied once
    with Copies() as copied, Trace() as launching:
        results = launch(ROWS, 12)
    with Trace() as waiting:
        found = results()
    assert launching.num_waits == 0, launching.where
    assert waiting.num_waits == 1, waiting.where
    assert copied.made == [Copy(True, True, True), Copy(False, True, True)]
    expected = getattr(load(tmp_path, device="cpu", dtype=dtype), method)(ROWS, 12)()
    tolerance = 1e-4 if dtype == "float32" else 0.1 * max(float(np.abs(each).max()) for each in expected)
    for ours, exact in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=0, atol=tolerance)


# ---- served models ----


def make_served_run(folder: Path, checkpoints: Checkpoints, **settings: Any) -> LiveRun:
    served = {"device": "cuda", "dtype": "float32", **settings}
    run = make_run(folder, checkpoints, reward=served, critic=served)
    initialise_store(run.store, run.config.critic, run_id=run.run_id)
    return run


def ask(model: Any, *batches: list[np.ndarray], output: str = REWARDS) -> list[np.ndarray]:
    """Send one request for each of `batches`, all at once; return the replies."""
    requests = [Request(scoring_inputs(rows), (output,)) for rows in batches]
    model.execute(requests)
    replies = [request.responses.get(timeout=PATIENCE_S) for request in requests]
    assert [reply.error for reply in replies] == [None] * len(replies)
    return [reply.outputs[output] for reply in replies]


@pytest.mark.parametrize(
    ("device", "card", "name", "output"), [("cuda", 3, "reward_model", REWARDS), ("cuda:1", 1, "critic", VALUES)]
)
def test_an_instance_uses_the_card_that_triton_gives_it_unless_the_configuration_does(
    tmp_path: Path, checkpoints: Checkpoints, name: str, output: str, device: str, card: int
):
    run = make_served_run(tmp_path, checkpoints, device=device)
    with (
        recorded_launches() as record,
        served_model(run.config, name, model_instance_device_id="3") as model,
    ):
        ask(model, ROWS, output=output)
        assert {each.device for each in model.served.versions.version.model.model.parameters()} == {
            torch.device("cuda", card)
        }
    assert {each.card for each in record.launches} == {card}
    assert record.strays == []


class Event(NamedTuple):
    """What a worker did with a pass: launch it, or wait for its results."""

    worker: str
    what: str
    waits: int
    stream: int
    card: int


def watch_passes(model: Any, meet: Callable[[], object] = lambda: None) -> list[Event]:
    """Record the passes of a served model from now on; `meet` is called before each launch."""
    events: list[Event] = []
    forward = model.served.forward

    def noted(what: str, trace: Trace) -> None:
        card, stream = torch.cuda.current_device(), current_stream().stream_id
        events.append(Event(threading.current_thread().name, what, trace.num_waits, stream, card))

    def watched(version: Any, rows: Any, width: int) -> Callable[[], Any]:
        meet()
        with Trace() as trace:
            results = forward(version, rows, width)
        noted("launch", trace)

        def wait() -> Any:
            with Trace() as trace:
                found = results()
            noted("wait", trace)
            return found

        return wait

    model.served.forward = watched
    return events


@pytest.fixture
def priorities(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The priorities of the streams that the test creates, by their ids."""
    created: dict[int, int] = {}
    begin = Stream.__init__

    def noted(stream: Stream, *args: Any, **settings: Any) -> None:
        begin(stream, *args, **settings)
        if "stream_id" not in settings:
            created[stream.stream_id] = stream.priority

    monkeypatch.setattr(Stream, "__init__", noted)
    streams._staging_stream.cache_clear()
    return created


@pytest.mark.parametrize(("name", "output", "workers"), [("reward_model", REWARDS, 2), ("critic", VALUES, 1)])
def test_each_worker_launches_the_next_pass_on_its_own_stream_before_it_waits(
    tmp_path: Path, checkpoints: Checkpoints, priorities: dict[int, int], name: str, output: str, workers: int
):
    run = make_served_run(tmp_path, checkpoints, workers=workers, token_budget=12, micro_batch_rows=1)
    both = threading.Barrier(workers)
    with served_model(run.config, name, model_instance_device_id="3") as model:
        ask(model, ROWS[:1], output=output)
        events = watch_passes(model, lambda: both.wait(PATIENCE_S))
        ask(model, *[[row] for row in random_rows([9] * 2 * workers, seed=2)], output=output)
    for worker in {event.worker for event in events}:
        own = [event for event in events if event.worker == worker]
        assert [(event.what, event.waits) for event in own] == [*[("launch", 0)] * 2, *[("wait", 1)] * 2]
        assert {event.card for event in own} == {3}
    used = {event.worker: event.stream for event in events}
    assert len(used) == len(set(used.values())) == workers
    assert {priorities[stream] for stream in used.values()} == {streams.HIGH}


@pytest.mark.parametrize("name", ["reward_model", "critic"])
def test_a_version_is_staged_on_a_stream_of_low_priority(
    tmp_path: Path, checkpoints: Checkpoints, priorities: dict[int, int], name: str
):
    run = make_served_run(tmp_path, checkpoints)
    with served_model(run.config, name, model_instance_device_id="3") as model:
        served = model.served.versions.version.model
        folder = run.config.reward.checkpoint if name == "reward_model" else run.store.folder(0)
        with Trace(places=False) as trace:
            staged = model.served.compute.load("load_critic", folder, served)
    assert staged is not served
    ((card, stream),) = trace.streams
    assert (card, priorities[stream]) == (3, streams.LOW)
    assert streams.LOW > streams.HIGH
    assert trace.waits["stream.synchronize"] == 1


def test_a_pass_that_runs_out_of_memory_is_halved_with_the_same_scores(
    tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    run = make_served_run(tmp_path, checkpoints, token_budget=4096)
    rows, counted = random_rows([40] * 16, seed=3), []
    with served_model(run.config, "reward_model", model_instance_device_id="3") as model:
        monkeypatch.setattr(model.served.compute._troubles, "add", counted.append)
        (expected,) = ask(model, rows)
        simcuda.reset_peak(3)
        before = simcuda.allocated(3)
        ask(model, rows)
        needed = simcuda.peak(3) - before
        assert counted == []
        with memory_limit(3, before + needed // 3):
            (found,) = ask(model, rows)
    assert counted == [(0, 3)]  # 16 rows as 4 times 4
    assert "token_budget of reward_model" in caplog.text
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_a_thread_that_loads_a_version_leaves_the_first_card_alone():
    """Leaving a stream makes the card current that was so before: the first one, in a thread that has chosen none."""
    found: list[int] = []

    def load() -> None:
        with streams.staging(torch.device("cuda:2")):
            pass
        found.append(torch.cuda.current_device())

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert found == [2]
