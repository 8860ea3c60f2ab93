"""Runs `python_backend.serving.scoring` outside a server, with the tests' stand-in for Triton's module."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def scoring() -> Iterator[Any]:
    """The imported module; restores the thread switch interval, which serving changes."""
    interval = sys.getswitchinterval()
    yield importlib.import_module("python_backend.serving.scoring")
    sys.setswitchinterval(interval)


def started(model: Any, *, token_budget: int) -> Any:
    """Start serving with `model`, a `ScoringModel`, and one worker; return the model."""
    values = {
        "token_budget": token_budget,
        "micro_batch_rows": 64,
        "forward_overhead_tokens": 64,
        "workers": 1,
        "strip_sequence_length_to_multiple": 1,
        "queue_timeout_s": "0",
    }
    config = {"name": "m", "parameters": {key: {"string_value": str(value)} for key, value in values.items()}}
    model.set_up(sys.modules["python_backend.serving.triton"].Parameters({"model_config": json.dumps(config)}))
    model.start()
    return model
