"""critic_save's waiting callers: told when the sidecar is silent, by heartbeats seen, whatever the clocks say."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from triton_python_backend_utils import InferenceResponse, Request

from python_backend.serving import journal_model
from python_backend.serving.critic_save import TritonPythonModel
from python_backend.serving.triton import TritonModel
from python_backend.store import heartbeat as heartbeat_module
from python_backend.store.heartbeat import HeartbeatWatch
from python_backend.store.journal import Entry, Heartbeat, Journal, Result
from python_backend.wire.contract import STATUS, WEIGHTS_VERSION

HOUR_S = 3600.0


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TritonModel]:
    """critic_save of run `run`; 0.4 s of silence are too long."""
    monkeypatch.setattr(journal_model, "FOLLOWER_GRACE_S", 0.05)
    parameters = {"journal": str(tmp_path), "run_id": "run", "heartbeat_timeout_s": "0.4"}
    config = {"name": "critic_save", "parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    model = TritonPythonModel()
    model.initialize({"model_config": json.dumps(config)})
    yield model
    model.finalize()


class Sent(Request):
    """A request with the header that names its sender."""

    def __init__(self, sender: str, **inputs: int | list[int]) -> None:
        arrays = {name: np.atleast_1d(np.asarray(value, np.int64)) for name, value in inputs.items()}
        super().__init__(arrays, (STATUS, WEIGHTS_VERSION))
        self._sender = sender

    def parameters(self) -> str:
        return json.dumps({"X-Triton-Sender": self._sender})


def ask(model: TritonModel, request: Request | None = None) -> Callable[[], InferenceResponse]:
    """Send a request, by default a rewind; returns what waits for its response."""
    request = request or Sent("", rewind_to=0)
    model.execute([request])

    def response() -> InferenceResponse:
        try:
            return request.responses.get(timeout=20)
        except queue.Empty:
            pytest.fail("the caller hangs")

    return response


@pytest.mark.parametrize("ahead_s", [HOUR_S, 0.0, -HOUR_S])
def test_a_silent_sidecar_is_told_whatever_the_clock_of_its_heartbeat_says(
    model: TritonModel, tmp_path: Path, ahead_s: float
):
    journal = Journal(tmp_path, "run")
    with journal.lock():
        journal.beat(Heartbeat(1, 7, 0, "training", time.time() + ahead_s))
        error = ask(model)().error
    assert error is not None
    assert "the sidecar has made no progress for" in error
    assert "(step 7, micro-batch 0, training)" in error


def test_a_sidecar_whose_clock_is_behind_is_not_silent(
    model: TritonModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model.served, "_silence_s", 5.0)
    journal = Journal(tmp_path, "run")
    with journal.lock():
        response = ask(model)
        for i in range(20):
            journal.beat(Heartbeat(1, 7, i, "training", time.time() - HOUR_S))
            time.sleep(0.02)
        (entry,) = journal.entries()
        journal.finish(entry, Result(entry.name, 3))
        assert response().outputs[WEIGHTS_VERSION].tolist() == [3]


def test_silence_begins_when_nothing_new_is_seen(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(heartbeat_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    beats = [Heartbeat(1, 1, 1, "training", HOUR_S)]
    watch = HeartbeatWatch(lambda: beats[-1])
    assert watch.silence_s() == 0
    now[0] += 7
    assert watch.silence_s() == 7
    beats.append(Heartbeat(1, 1, 2, "training", 0.0))
    now[0] += 1
    assert (watch.silence_s(), watch.last) == (0, beats[-1])


# ---- requests that arrive late ----


class Follower:
    """As much of a sidecar as answers rewinds and saves, and trains steps without a payload."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.kept: list[list[int] | None] = []

    def train(self, *steps: int) -> None:
        for step in steps:
            entry = Entry(step, 0, "train")
            self.journal.finish(entry, Result(entry.name, step, digest=str(step)))

    def follow(self) -> None:
        for entry in self.journal.entries():
            if entry.kind == "rewind":
                owners = self.journal.owners(entry)
                self.journal.set_aside_after(entry)
                self.journal.finish(entry, Result(entry.name, 100 + entry.target, owners=owners))
            if entry.kind == "save":
                self.kept.append(self.journal.keep_steps(entry))
                self.journal.finish(entry, Result(entry.name, 100))
            self.journal.drop(entry)


@pytest.fixture
def follower(model: TritonModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Follower]:
    monkeypatch.setattr(model.served, "_silence_s", 60.0)
    with model.served.journal.lock():
        yield Follower(model.served.journal)


def test_a_rewind_that_was_stuck_does_not_rewind_the_live_run(model: TritonModel, follower: Follower):
    """A server hung with the first attempt; the second was done by another one, and the actor has trained on."""
    follower.train(1, 2, 3)
    done = ask(model, Sent("actor/1", rewind_to=1))
    follower.follow()
    assert done().outputs[WEIGHTS_VERSION].tolist() == [101]
    follower.train(2, 3, 4)
    late = ask(model, Sent("actor/1", rewind_to=1))
    follower.follow()
    assert late().outputs[WEIGHTS_VERSION].tolist() == [101]  # the answer that it had
    assert model.served.journal.last_step() == 4
    again = ask(model, Sent("actor/2", rewind_to=1))  # whoever asks anew is served
    follower.follow()
    assert again().error is None
    assert model.served.journal.last_step() == 1


@pytest.mark.parametrize(
    "late", [Sent("old/1", rewind_to=1), Sent("old/1", dummy_var=0, step=3, keep_steps=[1, 3]), Sent("new/0", step=3)]
)
def test_what_an_earlier_owner_sent_is_refused(model: TritonModel, follower: Follower, late: Request):
    follower.train(1, 2, 3)
    for sender in ("old/1", "new/1"):
        done = ask(model, Sent(sender, rewind_to=2))
        follower.follow()
        assert done().error is None
        follower.train(3)
    late.inputs.setdefault("dummy_var", np.zeros(1, np.int64))
    response = ask(model, late)
    follower.follow()
    assert "INVALID_ARG: run 'run' was rewound after this request was sent" in str(response().error)
    assert (model.served.journal.last_step(), follower.kept) == (3, [])


def test_a_rewind_that_failed_takes_the_run_from_nobody(model: TritonModel, follower: Follower):
    follower.train(1, 2)
    first = ask(model, Sent("old/1", rewind_to=1))
    follower.follow()
    assert first().error is None
    second = ask(model, Sent("new/1", rewind_to=0))
    (entry,) = model.served.journal.entries()
    owners = model.served.journal.owners(entry)
    model.served.journal.finish(entry, Result(entry.name, 1, error="0 cannot be reached", owners=owners[1:]))
    model.served.journal.drop(entry)
    assert "cannot be reached" in str(second().error)
    saved = ask(model, Sent("old/1", dummy_var=0, step=1, keep_steps=[1]))
    follower.follow()
    assert (saved().error, follower.kept) == (None, [[1]])


@pytest.mark.parametrize("sender", ["", "curl", "5", "/1", "a/-1"])
def test_whoever_does_not_say_who_it_is_is_served(model: TritonModel, follower: Follower, sender: str):
    follower.train(1, 2)
    for target in (1, 1, 0):
        response = ask(model, Sent(sender, rewind_to=target))
        follower.follow()
        assert response().outputs[WEIGHTS_VERSION].tolist() == [100 + target]
