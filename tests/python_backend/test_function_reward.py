"""The Triton model of a reward function, outside a server and with a pool that starts no processes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizers import make_text_tokenizer
from triton_python_backend_utils import Request

from python_backend.rewards.pool import ScoreOutcome
from python_backend.wire.contract import PROBE_HEADER, REWARD_COMPONENT, REWARD_ERROR

PARAMETERS = {
    "function": "rewards.py:score",
    "timeout_s": "1",
    "workers": "1",
    "memory_mib": "100",
    "max_waiting_rows": "100",
    "max_sentence_bytes": "100",
    "max_request_tokens": "100",
    "max_request_bytes": "100",
}


class Pool:
    """Scores each row with 1 at once, and counts the rows."""

    num_waiting = num_scored = 0

    def submit(self, groups: Any) -> None:
        for group, done in groups:
            self.num_scored += len(group)
            done([ScoreOutcome(1.0)] * len(group))

    def close(self) -> None:
        pass


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def ask(pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Send two rows of tokens and return the response."""
    module = importlib.import_module("python_backend.serving.function_reward")
    monkeypatch.setattr(module, "WorkerPool", lambda *_, **__: pool)
    make_text_tokenizer("qwen2").save_pretrained(tmp_path)
    given = {**PARAMETERS, "tokenizer": str(tmp_path)}
    parameters = {name: {"string_value": value} for name, value in given.items()}
    model = module.TritonPythonModel()
    model.initialize({"model_config": json.dumps({"name": "m", "parameters": parameters})})

    def ask(**headers: str) -> Any:
        inputs = {"tokens": np.ones((2, 3), np.int64), "sequence_lengths": np.full((2, 1), 3)}
        request = Request(inputs, (REWARD_COMPONENT, REWARD_ERROR), json.dumps(headers))
        model.execute([request])
        response = request.responses.get(timeout=5)
        assert request.responses.empty()
        return response

    yield ask
    model.finalize()


def test_a_health_check_never_calls_the_function(ask: Callable[..., Any], pool: Pool) -> None:
    outputs = ask(**{PROBE_HEADER: "1"}).outputs
    assert (np.isnan(outputs[REWARD_COMPONENT]).all(), outputs[REWARD_ERROR].tolist()) == (True, [[b""], [b""]])
    assert pool.num_scored == 0
    assert ask().outputs[REWARD_COMPONENT].tolist() == [[1.0], [1.0]]
    assert pool.num_scored == 2


def test_scores_that_could_not_be_sent_become_errors(ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    send = Request.send

    def once(*_: object, **__: object) -> None:
        monkeypatch.setattr(Request, "send", send)
        raise MemoryError("/dev/shm is full")

    monkeypatch.setattr(Request, "send", once)
    assert ask().outputs[REWARD_ERROR].tolist() == [[b"/dev/shm is full"]] * 2
