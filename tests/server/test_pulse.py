"""A model's process that was stopped for a second exits before its answer reaches another caller."""

import threading

import numpy as np
import pytest
from tiny_models import stub_of, tiny_server
from tritonclient.http import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException
from waiting import wait_for

from rlhf_triton.python_backend.serving import pulse
from rlhf_triton.python_backend.serving.pulse import HANDED_OVER_S, MAX_WAKE_S, TICK_S, WAKE_S, Pulse

ECHO = """
import time
from pathlib import Path
from rlhf_triton.python_backend.serving.triton import answer_each, triton_model

class Echo:
    def execute(self, calls):
        answer_each(calls, self.answer)

    def answer(self, call):
        seconds = call.array("seconds")
        Path(BEGUN).touch()
        time.sleep(float(seconds[0]))
        call.answer({"seconds": seconds})

    def finalize(self):
        pass

TritonPythonModel = triton_model(lambda args: Echo())
"""
CONFIG = """
name: "echo"
backend: "python"
input { name: "seconds" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "seconds" data_type: TYPE_FP32 dims: [ 1 ] }
instance_group { count: 1 kind: KIND_CPU }
"""


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "repository" / "echo"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "1" / "model.py").write_text(f"BEGUN = {str(tmp_path / 'begun')!r}\n{ECHO}")
    with tiny_server(tmp_path) as running:
        running.wait_ready()
        yield running


def echoed(server, seconds):
    """Return the answer of a model that computes for `seconds`."""
    tensor = InferInput("seconds", [1], "FP32")
    tensor.set_data_from_numpy(np.array([seconds], np.float32))
    with InferenceServerClient(server.section.http_url) as client:
        return float(client.infer("echo", [tensor]).as_numpy("seconds")[0])


def test_process_suspended_during_a_request_exits_when_it_resumes(server, tmp_path):
    process = stub_of(server, "echo")
    begun = tmp_path / "begun"
    assert echoed(server, 2.0) == 2.0  # a long request is no stop; by its end, the process is watched
    begun.unlink()
    threading.Thread(target=lambda: (wait_for(begun.exists), process.suspend())).start()
    with pytest.raises(InferenceServerException, match="is not healthy"):
        echoed(server, 20.0)
    process.resume()
    wait_for(lambda: "its answers could reach the wrong callers" in server.log_path.read_text())
    with pytest.raises(InferenceServerException, match="is not healthy"):  # a dead process, not an answer to another
        echoed(server, 0.0)
    assert server.poll() is None


class Watched(Pulse):
    """A pulse with a manual clock and wake-ups; it sets `ended` instead of exiting."""

    def __init__(self, monkeypatch):
        super().__init__("model")
        self.now = self._woke_at = self._checked_at = 1000.0
        self.wakes = self._wakes = 7
        self.stops = 0
        self._sleeper = 1
        self._watches = True
        self.ended = False
        monkeypatch.setattr(pulse, "_num_switches", lambda thread: self.stops if thread else self.wakes)
        monkeypatch.setattr(pulse.time, "time", lambda: self.now)

    def run(self, seconds, every=TICK_S, wake_s=WAKE_S):
        """Let time pass, with a look every so many seconds and a wake-up of Triton's thread every `wake_s`."""
        begin = self.now
        before = self.wakes
        while self.now < begin + seconds:
            self.now += every
            self.wakes = before + int((self.now - begin) / wake_s)
            self.check()

    def _end(self):
        self.ended = True


@pytest.mark.parametrize("every", [TICK_S, 0.7, 10.0])
def test_process_with_busy_threads_does_not_count_as_stopped(monkeypatch, every):
    watched = Watched(monkeypatch)
    with watched.handing_over():
        watched.run(30.0, every, MAX_WAKE_S)
    assert not watched.ended


@pytest.mark.parametrize("switches", [0, 1, 2, 3])
@pytest.mark.parametrize("is_stopped", [False, True], ids=["starved", "stopped"])
def test_process_exits_after_a_second_without_wakeups_only_during_a_request(monkeypatch, is_stopped, switches):
    """The clock is the wall clock, like Triton's: a paused machine or a changed clock also counts."""
    for within in (True, False):
        watched = Watched(monkeypatch)
        watched.run(3.0)
        watched._is_handing_over = within
        watched.now += 1.0
        watched.wakes += switches if is_stopped else min(switches, 1)
        watched.stops += is_stopped
        watched.check()
        assert watched.ended == within


@pytest.mark.parametrize(("later", "ended"), [(0.0, True), (HANDED_OVER_S + 2 * WAKE_S, False)])
def test_process_exits_if_a_request_arrived_while_it_was_stopped(monkeypatch, later, ended):
    watched = Watched(monkeypatch)
    watched.run(3.0)
    watched.now += 2.0
    watched.check()
    watched.run(later)
    with watched.handing_over():
        pass
    assert watched.ended == ended
