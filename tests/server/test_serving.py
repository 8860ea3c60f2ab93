"""Served scores: equal to a direct forward, whatever they are batched with; batched at all; wrong rows fail alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bare_client import Refused, ask, ask_all
from live_system import (
    Checkpoints,
    System,
    direct_rewards,
    direct_values,
    random_rows,
    scoring_inputs,
)
from settled import settled_statistics

from python_backend.store.weights import WeightsStore
from python_backend.wire.contract import CRITIC, CRITIC_INFER, REWARD_MODEL
from trainer.control_plane import ControlPlane

TOLERANCE = 1e-5
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 127, 128)
NUM_CONCURRENT = 64


def mixed_rows(count: int, *, seed: int, longest: int = 128) -> list[np.ndarray]:
    """Rows of many different lengths."""
    return random_rows(np.random.default_rng(seed).integers(1, longest + 1, count).tolist(), seed=seed)


def expected_values(store: WeightsStore, rows: list[np.ndarray], versions: np.ndarray) -> list[np.ndarray]:
    """Each row's direct values under the version that its answer names."""
    by_version = {v: direct_values(store.folder(v), rows) for v in {int(v) for v in versions.flat}}
    return [by_version[int(v)][i] for i, v in enumerate(versions.flat)]


def assert_scores(system: System, checkpoints: Checkpoints, rows: list[np.ndarray], answers: list[Any]) -> None:
    """`answers[i]` are the three outputs of row i, padded to any S."""
    versions = np.asarray([answer["weights_version"][0, 0] for answer in answers])
    rewards = np.asarray([answer["rewards"][0, 0] for answer in answers])
    np.testing.assert_allclose(rewards, direct_rewards(checkpoints.reward, rows), atol=TOLERANCE, rtol=0)
    for row, answer, values in zip(rows, answers, expected_values(system.run.store, rows, versions), strict=True):
        np.testing.assert_allclose(answer["values"][0, : row.size], values, atol=TOLERANCE, rtol=0)
        assert not answer["values"][0, row.size :].any()


def test_rows_alone(live: System, checkpoints: Checkpoints) -> None:
    rows = random_rows(LENGTHS, seed=1)
    answers = [ask(live.run.url, CRITIC_INFER, scoring_inputs([row])) for row in rows]
    assert [answer["values"].shape for answer in answers] == [(1, row.size) for row in rows]
    assert_scores(live, checkpoints, rows, answers)


def test_rows_in_one_request_are_padded_to_its_own_width(live: System, checkpoints: Checkpoints) -> None:
    rows = random_rows(LENGTHS[::-1], seed=2)
    answer = ask(live.run.url, CRITIC_INFER, scoring_inputs(rows, width=140))  # wider than the model's 128 positions
    assert {name: array.shape for name, array in answer.items()} == {
        "rewards": (12, 1),
        "reward_version": (12, 1),
        "values": (12, 140),
        "weights_version": (12, 1),
    }
    assert {name: array.dtype for name, array in answer.items()} == {
        "rewards": np.float32,
        "reward_version": np.int64,
        "values": np.float32,
        "weights_version": np.int64,
    }
    by_row = [{name: array[i : i + 1] for name, array in answer.items()} for i in range(len(rows))]
    assert_scores(live, checkpoints, rows, by_row)


def test_concurrent_requests_batch_and_do_not_touch_each_other(live: System, checkpoints: Checkpoints) -> None:
    rows = mixed_rows(NUM_CONCURRENT, seed=3)
    with live.without_probes(REWARD_MODEL), ControlPlane(live.run.config.server.grpc_url) as control:
        before = {model: settled_statistics(control, model) for model in (REWARD_MODEL, CRITIC)}
        answers = ask_all(live.run.url, [(CRITIC_INFER, scoring_inputs([row])) for row in rows])
        assert mean_batch(before[CRITIC], settled_statistics(control, CRITIC)) > 4
        # The reward model, second in the ensemble, gets its requests as the critic finishes them: so ask it alone.
        between = settled_statistics(control, REWARD_MODEL)
        alone = ask_all(live.run.url, [(REWARD_MODEL, scoring_inputs([row])) for row in rows])
        assert mean_batch(between, settled_statistics(control, REWARD_MODEL)) > 4
    assert between.inference_count - before[REWARD_MODEL].inference_count == NUM_CONCURRENT
    assert_scores(live, checkpoints, rows, answers)
    rewards = [answer["rewards"][0, 0] for answer in alone if not isinstance(answer, Refused)]
    np.testing.assert_allclose(rewards, direct_rewards(checkpoints.reward, rows), atol=TOLERANCE, rtol=0)


def test_requests_with_and_without_lengths_do_not_mix(live: System, checkpoints: Checkpoints) -> None:
    rows = mixed_rows(32, seed=5)
    inputs = [scoring_inputs([row]) if i % 2 else {"tokens": row[None]} for i, row in enumerate(rows)]
    assert_scores(live, checkpoints, rows, ask_all(live.run.url, [(CRITIC_INFER, arrays) for arrays in inputs]))


def test_values_alone_do_not_run_the_reward_model(live: System) -> None:
    rows = mixed_rows(8, seed=6)
    with live.without_probes(REWARD_MODEL), ControlPlane(live.run.config.server.grpc_url) as control:
        before = settled_statistics(control, REWARD_MODEL)
        answer = ask(live.run.url, CRITIC_INFER, scoring_inputs(rows), ["values", "weights_version"])
        after = settled_statistics(control, REWARD_MODEL)
    assert sorted(answer) == ["values", "weights_version"]
    assert sorted(ask(live.run.url, CRITIC_INFER, scoring_inputs(rows), ["values"])) == ["values"]
    assert sorted(ask(live.run.url, CRITIC_INFER, scoring_inputs(rows), ["rewards"])) == ["rewards"]
    assert after.inference_count == before.inference_count


@pytest.mark.parametrize("model", [REWARD_MODEL, CRITIC])
def test_the_models_behind_the_ensemble_answer_too(live: System, checkpoints: Checkpoints, model: str) -> None:
    rows = random_rows([4, 40], seed=7)
    whole = ask(live.run.url, CRITIC_INFER, scoring_inputs(rows))
    answer = ask(live.run.url, model, scoring_inputs(rows))
    answer.pop("after_critic", None)
    for name, array in answer.items():
        np.testing.assert_allclose(array, whole[name], atol=TOLERANCE, rtol=0)


def mean_batch(before: Any, after: Any) -> float:
    """Rows per execution between two looks at the statistics."""
    return (after.inference_count - before.inference_count) / (after.execution_count - before.execution_count)
