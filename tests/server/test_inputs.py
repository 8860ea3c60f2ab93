"""What a scoring request may hold: sentences, conversations, prompt lengths, INT32; and what it is refused for."""

from __future__ import annotations

import json
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
)
from transformers import AutoTokenizer

from python_backend.wire.contract import CRITIC, CRITIC_INFER, REWARD_MODEL

MESSAGES = [{"role": "user", "content": "Read the file."}]


def texts(*items: str | bytes) -> np.ndarray:
    """BYTES [B, 1]."""
    return np.asarray([[item.encode() if isinstance(item, str) else item] for item in items], dtype=np.object_)


def metadata(*rows: Any) -> np.ndarray:
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
        metadata=metadata({"messages": MESSAGES}, {"messages": MESSAGES}, {"label": 3}),
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
        rewards_of(live, sentences=texts("x"), metadata=metadata({"messages": messages}))
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
