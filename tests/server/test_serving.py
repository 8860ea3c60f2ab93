"""Served scores: what a request may hold, equal to a direct forward whatever they are batched with, batched at all."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import numpy as np
import pytest
from bare_client import Refused, ask, ask_all
from live_system import (
    POSITIONS,
    Checkpoints,
    FinishedRun,
    System,
    direct_rewards,
    direct_values,
    random_rows,
    reload_model,
    scoring_inputs,
    wait_for,
)
from settled import settled_statistics
from transformers import AutoTokenizer

from python_backend.store.weights import WeightsStore
from python_backend.wire.contract import CRITIC, CRITIC_INFER, REWARD_MODEL
from trainer.control_plane import ControlPlane

TOLERANCE = 1e-5
MESSAGES = [{"role": "user", "content": "Read the file."}]
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 127, 128)
NUM_CONCURRENT = 64


# ---- rows of tokens ----


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


def mean_batch(before: Any, after: Any) -> float:
    """Rows per execution between two looks at the statistics."""
    return (after.inference_count - before.inference_count) / (after.execution_count - before.execution_count)


def texts(*items: str | bytes) -> np.ndarray:
    """BYTES [B, 1]."""
    return np.asarray([[item.encode() if isinstance(item, str) else item] for item in items], dtype=np.object_)


def metadata_of(*rows: Any) -> np.ndarray:
    """BYTES [B, 1] of JSON."""
    return texts(*(json.dumps(row) for row in rows))


def tokenized(checkpoints: Checkpoints, text: str) -> np.ndarray:
    """What the reward's own tokenizer, which adds no special token, makes of a text, cut to the model's positions."""
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoints.reward))
    return np.asarray(tokenizer(text)["input_ids"][:POSITIONS], np.int64)


def rewards_of(live: System, **inputs: np.ndarray) -> np.ndarray:
    """What reward_model answers."""
    return ask(live.run.url, REWARD_MODEL, inputs)["rewards"][:, 0]


# ---- sentences ----


def test_sentences_are_tokenised_and_cut(live: System, checkpoints: Checkpoints) -> None:
    sentences = ["Open the file.", "bad weather " * 200, "y"]
    rows = [tokenized(checkpoints, text) for text in sentences]
    assert rows[1].size == POSITIONS
    found = rewards_of(live, sentences=texts(*sentences))
    np.testing.assert_allclose(found, direct_rewards(checkpoints.reward, rows), atol=1e-5)


def test_messages_are_rendered_with_the_sentence_as_the_reply(live: System, checkpoints: Checkpoints) -> None:
    found = rewards_of(
        live,
        sentences=texts("I did.", "", "No conversation."),
        metadata=metadata_of({"messages": MESSAGES}, {"messages": MESSAGES}, {"label": 3}),
    )
    rendered = ["u Read the file.</s>a I did.</s>", "u Read the file.</s>", "No conversation."]
    rows = [tokenized(checkpoints, text) for text in rendered]
    np.testing.assert_allclose(found, direct_rewards(checkpoints.reward, rows), atol=1e-5)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("hello", "metadata[0].messages: hello, must be a list of"),
        ([{"role": "user"}], "metadata[0].messages: [{'role': 'user'}], must be a list of"),
        ([{"role": "nobody", "content": "x"}], "the chat template rejects the messages: nobody cannot speak"),
    ],
)
def test_a_conversation_that_cannot_be_rendered_is_refused(live: System, messages: Any, reason: str) -> None:
    with pytest.raises(Refused) as caught:
        rewards_of(live, sentences=texts("x"), metadata=metadata_of({"messages": messages}))
    assert caught.value.code == "400"
    assert reason in caught.value.message


# ---- response positions ----


def test_values_of_response_positions_alone(live: System) -> None:
    rows = random_rows([9, 5, 3], seed=3)
    inputs = {**scoring_inputs(rows), "prompt_lengths": np.asarray([[4], [1], [3]])}
    answer = ask(live.run.url, CRITIC_INFER, inputs, ["response_values", "weights_version"])
    version = int(answer["weights_version"][0, 0])
    expected = direct_values(live.run.store.folder(version), rows)
    assert sorted(answer) == ["response_values", "weights_version"]
    assert answer["response_values"].shape == (3, 5)  # the longest response has 9 - 4 tokens
    np.testing.assert_allclose(answer["response_values"][0], expected[0][3:8], atol=1e-5)
    np.testing.assert_allclose(answer["response_values"][1], [*expected[1][0:4], 0.0], atol=1e-5)
    assert not answer["response_values"][2].any()  # no response


def test_response_values_need_prompt_lengths_that_fit(live: System) -> None:
    inputs = scoring_inputs(random_rows([6, 4], seed=4))
    assert "response_values" not in ask(live.run.url, CRITIC, inputs)
    for extra, reason in (
        ({}, "prompt_lengths: missing; the output response_values requires it"),
        (
            {"prompt_lengths": np.asarray([[2], [5]])},
            "prompt_lengths[1]: 5, must be between 1 and 4, the number of tokens sent",
        ),
        (
            {"prompt_lengths": np.asarray([[0], [1]])},
            "prompt_lengths[0]: 0, must be between 1 and 6, the number of tokens sent",
        ),
        (
            {"prompt_lengths": np.asarray([[1], [1]]), "sentences": texts("x", "y")},
            "prompt_lengths: only valid with tokens, but sentences was sent",
        ),
    ):
        with pytest.raises(Refused) as caught:
            ask(live.run.url, CRITIC, {**inputs, **extra}, ["response_values"])
        assert (caught.value.code, caught.value.message) == ("400", reason)


# ---- INT32 ----


@pytest.mark.slow
def test_int32_tokens_where_they_are_declared(finished: FinishedRun, checkpoints: Checkpoints) -> None:
    rows = random_rows([7, 30], seed=5)
    inputs = scoring_inputs(rows)
    narrow = {**inputs, "tokens": inputs["tokens"].astype(np.int32)}

    def declare(config: dict[str, Any], dtype: str = "TYPE_INT32") -> None:
        (tokens,) = (tensor for tensor in config["input"] if tensor["name"] == "tokens")
        tokens["data_type"] = dtype

    reload_model(finished.run, REWARD_MODEL, declare)
    found = ask(finished.run.url, REWARD_MODEL, narrow)["rewards"][:, 0]
    np.testing.assert_allclose(found, direct_rewards(checkpoints.reward, rows), atol=1e-5)
    with pytest.raises(Refused, match="data-type is 'INT64', but model 'reward_model' expects 'INT32'"):
        ask(finished.run.url, REWARD_MODEL, inputs)
    reload_model(finished.run, REWARD_MODEL, lambda config: declare(config, "TYPE_INT64"))


# ---- one real batch with every kind of bad request ----


# ---- limits of the queue ----


@pytest.mark.slow
def test_full_queue_and_passed_deadline_are_503(finished: FinishedRun) -> None:
    def one_forward_a_row(config: dict[str, Any]) -> None:
        config["parameters"]["token_budget"]["string_value"] = "1"
        config["dynamic_batching"].setdefault("default_queue_policy", {})["max_queue_size"] = 4

    reload_model(finished.run, REWARD_MODEL, one_forward_a_row)
    many = scoring_inputs(random_rows([POSITIONS] * 200, seed=7))
    row = scoring_inputs(random_rows([5], seed=8))
    answers = ask_all(
        finished.run.url, [(REWARD_MODEL, many)] + [(REWARD_MODEL, row)] * 40 + [(REWARD_MODEL, row, (), 1000)] * 2
    )
    refused = [answer for answer in answers if isinstance(answer, Refused)]
    assert {answer.code for answer in refused} == {"503"}
    assert any("Exceeds maximum queue size" in answer.message for answer in refused)
    reload_model(finished.run, CRITIC, one_forward_a_row)
    for _ in range(8):  # through the ensemble, too: 2.51 crashed when both its steps were refused
        answers = ask_all(finished.run.url, [(CRITIC_INFER, many), *[(CRITIC_INFER, row)] * 32])
        assert {answer.code for answer in answers if isinstance(answer, Refused)} == {"503"}


# ---- workers ----


def set_parameters(finished: FinishedRun, **values: str) -> None:
    """Load the reward model with these parameters."""

    def change(config: dict[str, Any]) -> None:
        for name, value in values.items():
            config["parameters"][name]["string_value"] = value

    reload_model(finished.run, REWARD_MODEL, change)


@pytest.mark.slow
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


@pytest.mark.slow
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
