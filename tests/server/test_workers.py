"""The line of forwards inside the real server: several workers, long requests among short ones, early answers."""

from __future__ import annotations

import urllib.request
from typing import Any

import numpy as np
import pytest
from bare_client import ask_all
from live_system import (
    POSITIONS,
    Checkpoints,
    FinishedRun,
    direct_rewards,
    random_rows,
    reload_model,
    scoring_inputs,
    wait_for,
)

from python_backend.wire.contract import REWARD_MODEL

pytestmark = pytest.mark.slow


def set_parameters(finished: FinishedRun, **values: str) -> None:
    """Load the reward model with these parameters."""

    def change(config: dict[str, Any]) -> None:
        for name, value in values.items():
            config["parameters"][name]["string_value"] = value

    reload_model(finished.run, REWARD_MODEL, change)


def test_rows_of_many_requests_are_scored_right_by_several_workers(
    finished: FinishedRun, checkpoints: Checkpoints
) -> None:
    set_parameters(finished, workers="3", token_budget="200")
    generator = np.random.default_rng(7)
    batches = [random_rows(generator.integers(1, POSITIONS + 1, count).tolist(), seed=count) for count in range(1, 25)]
    answers = ask_all(finished.run.url, [(REWARD_MODEL, scoring_inputs(rows)) for rows in batches])
    for rows, answer in zip(batches, answers, strict=True):
        assert isinstance(answer, dict), answer
        np.testing.assert_allclose(answer["rewards"][:, 0], direct_rewards(checkpoints.reward, rows), atol=1e-5)


def test_forwards_and_padding_are_counted(finished: FinishedRun) -> None:
    with finished.without_probes():
        set_parameters(
            finished,
            workers="1",
            token_budget="1000",
            forward_overhead_tokens="0",
            strip_sequence_length_to_multiple="16",
        )
        before = counts(finished)
        answers = ask_all(finished.run.url, [(REWARD_MODEL, scoring_inputs(random_rows([5, 9, 5, 9, 120], seed=3)))])
        assert isinstance(answers[0], dict)
        padding = 2 * 11 + 2 * 7 + 8  # to multiples of 16
        # Published twice a second, this one last, perhaps in the middle of the request's three forwards.
        all_padding = before["forward_padding_tokens"] + padding
        wait_for(lambda: counts(finished)["forward_padding_tokens"] >= all_padding, finished.server)
        found = {name: count - before[name] for name, count in counts(finished).items()}
    assert found == {"forwards": 3, "forward_rows": 5, "forward_tokens": 148, "forward_padding_tokens": padding}


def counts(finished: FinishedRun) -> dict[str, float]:
    """The reward model's counters."""
    names = ("forwards", "forward_rows", "forward_tokens", "forward_padding_tokens")
    return {name: metric(finished, name) for name in names}


def metric(finished: FinishedRun, name: str) -> float:
    """A counter of the reward model in the server's metrics."""
    with urllib.request.urlopen(f"http://{finished.run.config.server.metrics_url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    start = f'rlhf_{name}_total{{model="{REWARD_MODEL}"}} '
    return next((float(line.removeprefix(start)) for line in lines if line.startswith(start)), 0.0)
