"""Runs `rlhf_triton.python_backend.serving.scoring` outside a server, with the tests' stand-in for Triton's module."""

import importlib
import sys

import pytest

from rlhf_triton.python_backend.serving.parameters import Parameters


@pytest.fixture
def scoring():
    """The imported module; restores the thread switch interval, which serving changes."""
    interval = sys.getswitchinterval()
    yield importlib.import_module("rlhf_triton.python_backend.serving.scoring")
    sys.setswitchinterval(interval)


class Compute:
    """Runs the forward passes where they are launched."""

    passes_in_flight = 1
    refuse_all = None

    def __init__(self, parameters):
        self.parameters = parameters

    def launch(self, forward, model, rows, width):
        return forward(model, rows, width)

    def prepare_thread(self):
        pass

    def failed(self, error):
        pass

    def publish(self):
        pass

    def close(self):
        pass


def started(model, *, token_budget, queue_timeout_s=0):
    """Start an engine with one worker for `model`: what has a version, and the parts `read`, `forward` and `reply`.

    Returns what Triton loads.
    """
    values = {
        "token_budget": token_budget,
        "queue_timeout_s": queue_timeout_s,
    }
    triton = importlib.import_module("rlhf_triton.python_backend.serving.triton")
    scoring = importlib.import_module("rlhf_triton.python_backend.serving.scoring")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring.Engine, "_overhead_tokens", lambda *_: 64)
        engine = scoring.Engine(
            Compute(Parameters("m", {key: str(value) for key, value in values.items()})),
            read=model.read,
            versions=model,
            forward=model.forward,
            reply=model.reply,
            max_length=64,
        )
    loaded = triton.TritonModel()
    loaded.served = engine
    return loaded
