"""Requests to the real server: scores however they are batched, refusals by field, and what each key opens.

`RLHF_WRITE_KEYS=1` writes the table of keys into docs/operating.md instead of comparing it.
"""

import contextlib
import gc
import http.client
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from bare_client import Refused, ask, ask_all
from live_system import (
    KEY,
    POSITIONS,
    TRAINING_KEY,
    Checkpoints,
    FinishedRun,
    System,
    direct_rewards,
    direct_values,
    identity,
    make_run,
    random_rows,
    reload_model,
    scoring_inputs,
    training_inputs,
    wait_for,
)
from pytriton.client import FuturesModelClient
from settled import settled_statistics
from transformers import AutoTokenizer
from tritonclient.grpc import service_pb2, service_pb2_grpc

from rlhf_triton.client.control_plane import ControlPlane, ControlPlaneError
from rlhf_triton.store.control_key import GRPC_HEADER, HEADER, control_key
from rlhf_triton.tools.serve import ensure_first_version
from rlhf_triton.tools.server.shared_memory import SHARED_MEMORY
from rlhf_triton.tools.server.triton_home import ServerStartError
from rlhf_triton.wire.contract import CRITIC, CRITIC_INFER, CRITIC_SAVE, CRITIC_TRAIN, REWARD_MODEL, texts_array

TOLERANCE = 1e-5
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 127, 128)
NUM_CONCURRENT = 64
TIMEOUT_S = 120.0
SAVE = {"dummy_var": np.zeros(1, np.int64)}


# ---- rows of tokens ----


def mixed_rows(count: int, *, seed: int, longest: int = 128) -> list[np.ndarray]:
    """Rows of many different lengths."""
    return random_rows(np.random.default_rng(seed).integers(1, longest + 1, count).tolist(), seed=seed)


def assert_scores(system: System, checkpoints: Checkpoints, rows: list[np.ndarray], answers: list[Any]) -> None:
    """`answers[i]` are the outputs of row i, padded to any S: the values are those of the version that it names."""
    assert not [answer for answer in answers if isinstance(answer, Refused)]
    versions = [int(answer["weights_version"][0, 0]) for answer in answers]
    rewards = np.asarray([answer["rewards"][0, 0] for answer in answers])
    np.testing.assert_allclose(rewards, direct_rewards(checkpoints.reward, rows), atol=TOLERANCE, rtol=0)
    direct = {version: direct_values(system.run.store.folder(version), rows) for version in {*versions}}
    for i, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        expected = direct[versions[i]][i]
        np.testing.assert_allclose(answer["values"][0, : row.size], expected, atol=TOLERANCE, rtol=0)
        assert not answer["values"][0, row.size :].any()


def test_rows_alone_and_in_one_request_that_is_padded_to_its_own_width(live: System, checkpoints: Checkpoints) -> None:
    rows = random_rows(LENGTHS, seed=1)
    answers = [ask(live.run.url, CRITIC_INFER, scoring_inputs([row])) for row in rows]
    assert [answer["values"].shape for answer in answers] == [(1, row.size) for row in rows]
    assert_scores(live, checkpoints, rows, answers)
    rows = random_rows(LENGTHS[::-1], seed=2)
    answer = ask(live.run.url, CRITIC_INFER, scoring_inputs(rows, width=140))  # wider than the model's 128 positions
    assert {name: (array.shape, array.dtype) for name, array in answer.items()} == {
        "rewards": ((12, 1), np.float32),
        "reward_version": ((12, 1), np.int64),
        "values": ((12, 140), np.float32),
        "weights_version": ((12, 1), np.int64),
    }
    by_row = [{name: array[i : i + 1] for name, array in answer.items()} for i in range(len(rows))]
    assert_scores(live, checkpoints, rows, by_row)


def test_concurrent_requests_batch_and_do_not_touch_each_other(live: System, checkpoints: Checkpoints) -> None:
    rows = mixed_rows(NUM_CONCURRENT, seed=3)
    with live.without_probes(REWARD_MODEL), ControlPlane(live.run.config.server.grpc_url) as control:
        before = {model: settled_statistics(control, model) for model in (REWARD_MODEL, CRITIC)}
        answers = ask_all(live.run.url, [(CRITIC_INFER, scoring_inputs([row])) for row in rows])
        assert mean_batch(before[CRITIC], settled_statistics(control, CRITIC)) > 2
        # The reward model, second in the ensemble, gets its requests as the critic finishes them: so ask it alone.
        between = settled_statistics(control, REWARD_MODEL)
        alone = ask_all(live.run.url, [(REWARD_MODEL, scoring_inputs([row])) for row in rows])
        assert mean_batch(between, settled_statistics(control, REWARD_MODEL)) > 2
    assert between.inference_count - before[REWARD_MODEL].inference_count == NUM_CONCURRENT
    assert_scores(live, checkpoints, rows, answers)
    rewards = [answer["rewards"][0, 0] for answer in alone if not isinstance(answer, Refused)]
    np.testing.assert_allclose(rewards, direct_rewards(checkpoints.reward, rows), atol=TOLERANCE, rtol=0)
    mixed = [scoring_inputs([row]) if i % 2 else {"tokens": row[None]} for i, row in enumerate(rows)]
    assert_scores(live, checkpoints, rows, ask_all(live.run.url, [(CRITIC_INFER, inputs) for inputs in mixed]))


def mean_batch(before: Any, after: Any) -> float:
    """Rows per execution between two looks at the statistics."""
    return (after.inference_count - before.inference_count) / (after.execution_count - before.execution_count)


def test_values_alone_do_not_run_the_reward_model(live: System) -> None:
    rows = scoring_inputs(mixed_rows(8, seed=6))
    with live.without_probes(REWARD_MODEL), ControlPlane(live.run.config.server.grpc_url) as control:
        before = settled_statistics(control, REWARD_MODEL)
        for outputs in (["values", "weights_version"], ["values"]):
            assert sorted(ask(live.run.url, CRITIC_INFER, rows, outputs)) == outputs
        assert settled_statistics(control, REWARD_MODEL).inference_count == before.inference_count
        assert sorted(ask(live.run.url, CRITIC_INFER, rows, ["rewards"])) == ["rewards"]


def test_sentences_are_tokenised_and_messages_rendered_with_the_sentence_as_the_reply(
    live: System, checkpoints: Checkpoints
) -> None:
    messages = {"messages": [{"role": "user", "content": "Read the file."}]}
    given = [
        ("Open the file.", {}, "Open the file."),
        ("I did.", messages, "u Read the file.</s>a I did.</s>"),
        ("", messages, "u Read the file.</s>"),
        ("No conversation.", {"label": 3}, "No conversation."),
    ]
    sentences, metadata, rendered = zip(*given, strict=True)
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoints.reward))  # it adds no special token
    rows = [np.asarray(tokenizer(text)["input_ids"], np.int64) for text in rendered]
    inputs = {"sentences": texts_array([*sentences]), "metadata": texts_array([json.dumps(each) for each in metadata])}
    found = ask(live.run.url, REWARD_MODEL, inputs)["rewards"][:, 0]
    np.testing.assert_allclose(found, direct_rewards(checkpoints.reward, rows), atol=TOLERANCE)
    with pytest.raises(Refused, match=rf"sentences\[1\]: at least \d+ tokens, the model takes {POSITIONS}"):
        ask(live.run.url, REWARD_MODEL, {"sentences": texts_array(["Open the file.", "bad weather " * 200])})


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


@pytest.mark.slow
def test_int32_tokens_where_they_are_declared_and_several_workers(
    finished: FinishedRun, checkpoints: Checkpoints
) -> None:
    def change(config: dict[str, Any]) -> None:
        (tokens,) = (tensor for tensor in config["input"] if tensor["name"] == "tokens")
        tokens["data_type"] = "TYPE_INT32"
        config["parameters"] |= {"workers": {"string_value": "3"}, "token_budget": {"string_value": "200"}}

    reload_model(finished.run, REWARD_MODEL, change)
    generator = np.random.default_rng(7)
    batches = [random_rows(generator.integers(1, POSITIONS + 1, count).tolist(), seed=count) for count in range(1, 25)]
    inputs = [scoring_inputs(rows) for rows in batches]
    narrow = [(REWARD_MODEL, {**each, "tokens": each["tokens"].astype(np.int32)}) for each in inputs]
    for rows, answer in zip(batches, ask_all(finished.run.url, narrow), strict=True):
        assert isinstance(answer, dict), answer
        np.testing.assert_allclose(answer["rewards"][:, 0], direct_rewards(checkpoints.reward, rows), atol=TOLERANCE)
    with pytest.raises(Refused, match="data-type is 'INT64', but model 'reward_model' expects 'INT32'"):
        ask(finished.run.url, REWARD_MODEL, inputs[0])
    reload_model(finished.run, REWARD_MODEL, lambda config: None)


@pytest.mark.slow
def test_full_queue_and_passed_deadline_are_503(finished: FinishedRun) -> None:
    """Each row is a forward pass of its own here, so the counters of a request are exact."""

    def one_forward_a_row(config: dict[str, Any]) -> None:
        for name, value in (("token_budget", "1"), ("strip_sequence_length_to_multiple", "16")):
            config["parameters"][name] = {"string_value": value}
        config["dynamic_batching"].setdefault("default_queue_policy", {})["max_queue_size"] = 4

    with finished.without_probes():
        reload_model(finished.run, REWARD_MODEL, one_forward_a_row)
        before = forward_counters(finished)
        ask(finished.run.url, REWARD_MODEL, scoring_inputs(random_rows([5, 9, 5, 9, 120], seed=3)))
        # Published twice a second. The padding is that to multiples of 16.
        expected = {"forwards": 5, "forward_rows": 5, "forward_tokens": 148, "forward_padding_tokens": 44}
        wait_for(lambda: forward_counters(finished)["forward_tokens"] >= before["forward_tokens"] + 148)
        found = {name: count - before[name] for name, count in forward_counters(finished).items()}
    assert found == expected
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
    for model in (REWARD_MODEL, CRITIC):  # the next tests send more at once
        reload_model(finished.run, model, lambda config: None)


def forward_counters(system: System) -> dict[str, float]:
    """The reward model's counters of its forward passes; 0 before the first one."""
    names = ("forwards", "forward_rows", "forward_tokens", "forward_padding_tokens")
    with urllib.request.urlopen(f"http://{system.run.config.server.metrics_url}/metrics", timeout=120) as answer:
        page = answer.read().decode()
    found = {
        name: re.search(rf'^rlhf_{name}_total{{model="{REWARD_MODEL}"}} (\S+)', page, re.MULTILINE) for name in names
    }
    return {name: float(match[1]) if match else 0.0 for name, match in found.items()}


# ---- the replaced system's client ----


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_calls_of_the_replaced_system_word_for_word(finished: FinishedRun, checkpoints: Checkpoints) -> None:
    """PyTriton's FuturesModelClient. Calls, names, dtypes and shapes: reference/nemo_aligner.md section 1."""

    def client(model: str) -> FuturesModelClient:  # one per endpoint; PyTriton warns where little of 60 s is left
        return FuturesModelClient(finished.run.url, model, init_timeout_s=4 * TIMEOUT_S, inference_timeout_s=TIMEOUT_S)

    batches, width = [random_rows([5, 24, 1, 13], seed=seed) for seed in range(6)], 24
    before = finished.run.journal.last_step()
    with client("critic_infer") as critic:
        futures = [critic.infer_batch(**scoring_inputs(rows, width=width)) for rows in batches]
        answers = [future.result(timeout=TIMEOUT_S) for future in futures]
    with client("critic_train") as train, client("critic_save") as save:
        trained = train.infer_sample(**training_inputs(seed=12, width=width)).result(timeout=TIMEOUT_S)
        saved = save.infer_sample(dummy_var=np.asarray([0])).result(timeout=TIMEOUT_S)
    with client("reward_model") as reward:
        sentences = np.char.encode(np.asarray([["Open the file."], ["Bad weather."]]), "utf-8")
        assert reward.infer_batch(sentences=sentences).result(timeout=TIMEOUT_S)["rewards"].shape == (2, 1)
    for rows, answer in zip(batches, answers, strict=True):
        assert (answer["rewards"].shape, answer["values"].shape) == ((4, 1), (4, width))
        assert_scores(finished, checkpoints, rows, [{k: v[i : i + 1] for k, v in answer.items()} for i in range(4)])
    assert (trained["loss_mean"].shape, trained["loss_mean"].dtype) == ((1,), np.float32)
    assert np.isfinite(trained["loss_mean"]).all()
    assert saved["status"].tolist() == [0]
    assert finished.run.journal.last_step() == before + 1
    assert (finished.run.config.run.dir / "checkpoints" / "critic" / str(before + 1)).is_dir()
    gc.collect()  # PyTriton leaves sockets open: their warnings are ignored here, and would be another test's later


# ---- refusals ----


def refusal(system: System, model: str, arrays: dict[str, np.ndarray], outputs: Sequence[str] = ()) -> str:
    """What the server says to a request that it must refuse; printed, to be read with `pytest -s`."""
    with pytest.raises(Refused) as caught:
        ask(system.run.url, model, arrays, outputs, headers=KEY)
    print(f"\n{model} {caught.value.code}: {caught.value.message}")
    assert caught.value.code == "400"
    return caught.value.message


def changed(array: np.ndarray, index: tuple[int, ...], value: Any) -> np.ndarray:
    """A copy with one other entry."""
    copy = array.copy()
    copy[index] = value
    return copy


ROW = scoring_inputs(random_rows([6], seed=0))
TWO_ROWS = scoring_inputs(random_rows([6, 3], seed=0))


def chat(messages: Any) -> dict[str, np.ndarray]:
    return {"sentences": texts_array(["x"]), "metadata": texts_array([json.dumps({"messages": messages})])}


# One of each kind: tests/library/test_contract.py has all of them.
BAD_SCORING = [
    (
        {**TWO_ROWS, "tokens": changed(TWO_ROWS["tokens"], (1, 2), -5)},
        "tokens[1, 2]: -5 is outside the vocabulary [0, 200)",
    ),
    (
        scoring_inputs(random_rows([POSITIONS + 1], seed=0)),
        f"tokens[0]: {POSITIONS + 1} tokens, the model has {POSITIONS} positions",
    ),
    (
        {**ROW, "sequence_lengths": np.asarray([[7]])},
        "sequence_lengths[0]: 7, must be between 1 and 6, the number of tokens sent",
    ),
    ({"tokens": np.zeros((1, 0), np.int64)}, "sequence_lengths[0]: 0, an empty sequence cannot be scored"),
    ({"sequence_lengths": np.asarray([[6]])}, "tokens: missing; send tokens or sentences"),
    ({"sentences": texts_array(["A list", ""])}, "sentences[1]: '' has no tokens, an empty sequence cannot be scored"),
    ({"sentences": np.asarray([[b"A \xff list"]], dtype=np.object_)}, "sentences[0]: not UTF-8"),
    ({"sentences": texts_array(["x"]), "metadata": texts_array(["{"])}, "metadata[0]: '{' is not JSON"),
    # An exception that leaves `execute` answers the other requests of the batch twice: heap corruption.
    (chat("\ud800 \x1b[2J"), "\\ud800 \\x1b[2J"),
    (chat([{"role": "user"}]), "metadata[0].messages[0].content: missing or null, must be a text"),
]


@pytest.mark.parametrize("model", [REWARD_MODEL, CRITIC, CRITIC_INFER])
def test_a_bad_scoring_request_fails_alone(live: System, checkpoints: Checkpoints, model: str) -> None:
    """Sent at once with good rows, so that they share batches."""
    rows = random_rows(range(3, 35), seed=6)
    bad = [(model, arrays) for arrays, _ in BAD_SCORING]
    answers = ask_all(live.run.url, [*bad, *((model, scoring_inputs([row])) for row in rows), *bad])
    for answer, (_, sentence) in zip(answers[: len(bad)] + answers[-len(bad) :], BAD_SCORING * 2, strict=True):
        assert isinstance(answer, Refused)
        assert (answer.code, sentence in answer.message) == ("400", True), (sentence, answer.message)
    good = answers[len(bad) : -len(bad)]
    assert not [answer for answer in good if isinstance(answer, Refused)]
    if model != CRITIC:
        found = [answer["rewards"][0, 0] for answer in good]
        np.testing.assert_allclose(found, direct_rewards(checkpoints.reward, rows), atol=TOLERANCE)


def demanding(model: str, **parameters: Any) -> tuple[Any, ...]:
    return model, ROW, (), None, parameters


def test_a_demanded_version_answers_or_is_refused_by_both_numbers(finished: FinishedRun) -> None:
    """Within critic_infer, it is the critic's, although all models get the parameters. Sent at once with good rows."""
    run = finished.run
    served, named = run.store.current() or 0, "weights_version"
    assert served > 0, "else the reward model, whose version is 0, would have it, too"
    good = [{}, {"min_version": served}, {"exact_version": served}, {"min_version": 0}]
    bad = {
        "503": [{"min_version": served + 1}, {"exact_version": served - 1}, {"min_version": 2**63 - 1}],
        "400": [{"min_version": -1}, {"exact_version": "text"}, {"min_version": True}, {"min_version": 1.5}],
    }
    for model in (CRITIC, CRITIC_INFER):
        asked = [demanding(model, **each) for each in (*good, *bad["503"], *bad["400"])]
        answers = ask_all(run.url, [*asked * 8])
        for each, answer in zip(asked * 8, answers, strict=True):
            if each[-1] in good:
                assert not isinstance(answer, Refused)
                assert answer[named].tolist() == [[served]]
                continue
            ((name, value),) = each[-1].items()
            assert isinstance(answer, Refused)
            told = f"{name}: {value!r}, must be an integer of at least 0"
            if value in {served + 1, served - 1, 2**63 - 1}:
                text = f"{value}" if name == "exact_version" else f"{value} or newer"
                told = f"{CRITIC} serves version {served}, but the request demands version {text}"
            assert answer.message.endswith(told)
            assert each[-1] in bad[answer.code]
    fixed = [demanding(REWARD_MODEL, min_version=0), demanding(REWARD_MODEL, exact_version=1)]
    scored, refused = ask_all(run.url, fixed)
    assert not isinstance(scored, Refused)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.message.partition(", but")[0]) == ("503", "reward_model serves version 0")


GOOD = training_inputs(seed=1)
NAN = np.float32("nan")

MANY = {"tokens": np.zeros((5000, 1000), np.int64), "sequence_lengths": np.ones((5000, 1), np.int64)}
OTHER_RUN = {"run_id": np.asarray([b"other"], dtype=np.object_)}
REFUSED = [
    # by Triton itself
    (CRITIC_INFER, {**ROW, "tokens": ROW["tokens"].astype(np.float32)}, ("tokens", "FP32", "INT64")),
    (CRITIC_INFER, {**ROW, "sequence_lengths": np.asarray([[6, 6]])}, ("sequence_lengths", "[-1,1]", "[1,2]")),
    (CRITIC_INFER, {**ROW, "sequence_lengths": np.asarray([[6], [6]])}, ("batch",)),
    (CRITIC_INFER, {**ROW, "attention_mask": ROW["tokens"]}, ("attention_mask",)),
    (CRITIC_INFER, {"tokens": np.zeros((8193, 1), np.int64)}, ("batch-size must be <= 8192",)),
    # by the models
    (
        CRITIC_INFER,
        MANY,
        ("tokens: 5000 rows of 1000 tokens, padding included, exceed 4000000 (max_request_tokens)",),
    ),
    (
        CRITIC_INFER,
        {"sentences": texts_array(["x" * 900_000] * 5)},
        ("sentences: 4500000 bytes with the metadata, more than 4000000",),
    ),
    (
        REWARD_MODEL,
        chat([{"role": "stranger", "content": "x"}]),
        ("the chat template rejects the messages: a stranger cannot speak",),
    ),
    (
        CRITIC_TRAIN,
        {**GOOD, "returns": changed(GOOD["returns"], (1, 2), NAN)},
        ("returns[1, 2]: nan, must be finite",),
    ),
    (CRITIC_TRAIN, {k: v for k, v in GOOD.items() if k != "returns"}, ("returns: missing",)),
    (
        CRITIC_TRAIN,
        {**GOOD, "sequence_lengths": np.asarray([[12], [12], [5], [12]])},
        ("mask[2, 4]: 1, must be 0: a sequence of 5 tokens has one entry fewer",),
    ),
    (CRITIC_TRAIN, {**GOOD, **identity("other", 1)}, ("run_id: 'other', but this critic belongs to run 'test'",)),
    (CRITIC_SAVE, {**SAVE, **OTHER_RUN}, ("run_id: 'other', but this critic belongs to run 'test'",)),
    (CRITIC_SAVE, {"keep_steps": np.asarray([4, -1])}, ("keep_steps[1]: -1, must be at least 0",)),
]


@pytest.mark.filterwarnings("ignore:Sending a large body")
def test_a_refusal_names_the_field(live: System) -> None:
    ask(live.run.url, CRITIC_TRAIN, GOOD, headers=KEY)
    last = live.run.journal.last_step()
    for model, arrays, words in REFUSED:
        message = refusal(live, model, arrays)
        assert [word for word in words if word not in message] == []
    other, ahead = ({**training_inputs(seed=24), **identity("test", step)} for step in (last, last + 5))
    assert refusal(live, CRITIC_TRAIN, other) == (
        f"step: {last} of run 'test' was already sent with other content; the last step is {last}: "
        f"send step {last + 1}, or rewind to step {last - 1} first"
    )
    message = refusal(live, CRITIC_TRAIN, ahead)
    assert f"step: {last + 5}, but the last step of run 'test' is {last}; send step {last + 1} first" in message
    message = refusal(live, CRITIC_SAVE, {**SAVE, "rewind_to": np.asarray([last + 3])})
    assert f"rewind_to: {last + 3}, but the last step of run 'test' is {last}" in message
    assert live.run.journal.last_step() == last


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({}, "prompt_lengths: missing; the output response_values requires it"),
        ({"prompt_lengths": [[2], [5]]}, "prompt_lengths[1]: 5, must be between 1 and 3, the number of tokens sent"),
        (
            {"prompt_lengths": [[1], [1]], "sentences": texts_array(["x", "y"])},
            "prompt_lengths: only valid with tokens, but sentences was sent",
        ),
    ],
)
def test_response_values_need_prompt_lengths_that_fit(live: System, extra: dict[str, Any], reason: str) -> None:
    inputs = {**TWO_ROWS, **{name: np.asarray(array) for name, array in extra.items()}}
    assert refusal(live, CRITIC, inputs, ["response_values"]) == reason


def test_a_request_that_a_model_refuses_is_counted(live: System) -> None:
    """Triton counts it as a success, since there was a response."""

    def refused(status: str) -> float:
        with urllib.request.urlopen(f"http://{live.run.config.server.metrics_url}/metrics", timeout=120) as answer:
            text = answer.read().decode()
        labels = f'{{model="critic",status="{status}"}}'
        found = re.search(rf"^rlhf_requests_refused_total{re.escape(labels)} (\S+)", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    before = refused("400"), refused("503")
    refusal(live, CRITIC, {"tokens": np.asarray([[10**6]])})
    (answer,) = ask_all(live.run.url, [demanding(CRITIC, exact_version=10**6)])
    assert isinstance(answer, Refused)
    assert answer.code == "503"
    assert (refused("400"), refused("503")) == (before[0] + 1, before[1] + 1)


def post_json(system: System, model: str, body: dict[str, Any], **headers: str) -> str:
    """Text of the refusal of a request in plain JSON."""
    url = f"http://{system.run.url}/v2/models/{model}/infer"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120)
    with caught.value as answer:
        text = answer.read().decode()
    print(f"\n{model} {caught.value.code}: {text}")
    assert caught.value.code == 400
    return text


def test_plain_json_without_rows_is_answered_and_nan_refused(live: System) -> None:
    """Triton lets requests of no rows pass; without an answer the caller would wait indefinitely."""
    for model in (REWARD_MODEL, CRITIC, CRITIC_INFER):
        for name, shape, kind in (("tokens", [0, 5], "INT64"), ("sentences", [0, 1], "BYTES")):
            post_json(live, model, {"inputs": [{"name": name, "shape": shape, "datatype": kind, "data": []}]})
    inputs = [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": "INT64" if name == "tokens" else "FP32",
            "data": array.ravel().tolist(),
        }
        for name, array in {**GOOD, "returns": changed(GOOD["returns"], (0, 0), NAN)}.items()
    ]
    assert "nan" in post_json(live, CRITIC_TRAIN, {"inputs": inputs}, **KEY).lower()


@pytest.mark.parametrize("model", [CRITIC_TRAIN, CRITIC_SAVE])
def test_training_needs_the_key(live: System, model: str) -> None:
    """In a header, which may be spelled as HTTP allows; scoring needs none."""
    arrays = GOOD if model == CRITIC_TRAIN else SAVE
    before = live.run.journal.last_step()
    for headers in ({}, {"x-triton-training-key": "open barley"}):
        with pytest.raises(Refused, match="HTTP 400: header x-triton-training-key: missing or wrong"):
            ask(live.run.url, model, arrays, headers=headers)
    tensor = {"name": "dummy_var" if model == CRITIC_SAVE else "step", "shape": [1], "datatype": "INT64", "data": [1]}
    body = {"parameters": {"x-triton-training-key": 5}, "inputs": [tensor]}
    assert "header x-triton-training-key: missing or wrong" in post_json(live, model, body)
    assert live.run.journal.last_step() == before
    ask(live.run.url, model, arrays, headers={"X-Triton-Training-Key": KEY["x-triton-training-key"]})
    assert ask(live.run.url, CRITIC_INFER, ROW)["rewards"].shape == (1, 1)


@pytest.mark.parametrize("hiding", [{}, {"Origin": 5}, {"origin": ""}])
@pytest.mark.parametrize("name", ["Origin", "origin"])
def test_a_web_page_can_neither_train_nor_save(finished: FinishedRun, name: str, hiding: dict[str, Any]) -> None:
    """As a browser sends it without asking the server first; parameters in the body do not hide the header."""
    before = finished.run.journal.last_step()
    inputs = {
        "critic_train": [("tokens", "INT64", [[3, 4]])]
        + [(n, "FP32", [[1]]) for n in ("returns", "prev_values", "mask")],
        "critic_save": [("dummy_var", "INT64", [0])],
    }
    for model, tensors in inputs.items():
        filled = [
            {"name": n, "datatype": kind, "shape": list(np.shape(data)), "data": data} for n, kind, data in tensors
        ]
        headers = {"Content-Type": "text/plain", name: "http://elsewhere.example"}
        connection = http.client.HTTPConnection(finished.run.config.server.http_url, timeout=TIMEOUT_S)
        with contextlib.closing(connection):  # urllib would capitalise the header's name
            body = json.dumps({"parameters": hiding, "inputs": filled})
            connection.request("POST", f"/v2/models/{model}/infer", body, headers)
            refused = connection.getresponse()
            assert (refused.status, "header origin: web pages" in refused.read().decode()) == (400, True)
    assert finished.run.journal.last_step() == before


# ---- steps ----


def test_a_step_sent_by_many_at_once_is_trained_once_and_clients_without_steps_never_share_one(live: System) -> None:
    """Half of them pad the same content otherwise; one comes again, later."""
    step = live.run.next_step()
    narrow = {**training_inputs(seed=21), "sequence_lengths": np.full((4, 1), 12), **identity("test", step)}
    padded = {name: np.pad(array, ((0, 0), (0, 5))) for name, array in training_inputs(seed=21).items()}
    requests = [(CRITIC_TRAIN, narrow), (CRITIC_TRAIN, {**narrow, **padded})] * 4
    answers = [*ask_all(live.run.url, requests, headers=KEY), ask(live.run.url, CRITIC_TRAIN, narrow, headers=KEY)]
    assert not [answer for answer in answers if isinstance(answer, Refused)]
    assert len({(float(a["loss_mean"][0]), int(a["weights_version"][0])) for a in answers}) == 1
    assert live.run.store.manifest(int(answers[0]["weights_version"][0])).step == step
    assert [line["step"] for line in live.run.critic_updates(up_to=step)].count(step) == 1
    assert live.run.journal.last_step() == step
    others = ask_all(live.run.url, [(CRITIC_TRAIN, training_inputs(seed=70 + i)) for i in range(3)], headers=KEY)
    steps = [live.run.store.manifest(int(answer["weights_version"][0])).step for answer in others]
    assert sorted(steps) == [step + 1, step + 2, step + 3]


def test_no_other_user_can_read_requests_in_shared_memory_or_what_actor_and_sidecar_write(
    finished: FinishedRun,
) -> None:
    def modes() -> list[int]:
        paths = SHARED_MEMORY.glob(f"rlhf-{finished.server.process.pid}-*")
        return [stat.S_IMODE(path.stat().st_mode) for path in paths]

    # A model that is being loaded has received no request yet.
    wait_for(lambda: {*modes()} == {0o600} and len(modes()) >= 4, finished.server)
    written = [finished.run.config.run.dir / name for name in ("metrics.jsonl", "critic_metrics.jsonl")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in written] == [0o600, 0o600]


@pytest.mark.slow
def test_the_journal_of_a_run_pretrains_the_critic_of_the_next(
    finished: FinishedRun, checkpoints: Checkpoints, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As `rlhf-triton serve` starts it; not while the earlier run's sidecar is running."""
    earlier, folder = finished.run.config.run.dir, tmp_path / "earlier"
    for name in ("journal", "weights"):
        shutil.copytree(earlier / name, folder / name)
    for source, error in ((earlier, "is in training; stop it first, or remove it"), (folder, None)):
        run = make_run(tmp_path / "next", checkpoints, critic={"pretrain": [str(source)], "pretrain_epochs": 1})
        with contextlib.nullcontext() if error is None else pytest.raises(ServerStartError, match="version 0"):
            ensure_first_version(run.config, run.path, [])
        assert (error or "") in capfd.readouterr().err
        assert run.store.current() == (None if error else 0)
    (line,) = run.critic_metrics()
    rows = 8 * finished.run.config.actor.steps
    assert line["pretrain/rows"] + line["pretrain/held_out_rows"] >= rows
    row = random_rows([9], seed=1)
    cold, warm = (direct_values(each.store.folder(0), row)[0] for each in (finished.run, run))
    assert not np.array_equal(cold, warm)


# ---- keys ----


PAGE = Path(__file__).resolve().parents[2] / "docs" / "operating.md"
BEGIN, END = "<!-- written by tests/server/test_requests.py -->\n\n", "\n<!-- end of the table of keys -->\n"
WRITE = "RLHF_WRITE_KEYS"
GATEWAY_KEY = "gateway secret"
HOLDERS = ("none", "wrong", "training", "control", "gateway")
YES, NO = "yes", "no"
SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
SHARED = "rlhf_keys_test"

Probe = Callable[[Mapping[str, str]], str]
"""Sends a request with the given headers; returns YES, or the status if a key is missing. Fails on other errors."""
Endpoints = tuple[str, dict[str, Probe], dict[str, Probe]]
"""Endpoints that every key treats alike, over HTTP and over gRPC, as one row of the table says."""


@pytest.fixture(scope="module")
def gateway(live: System) -> Iterator[str]:
    """Address of a gateway with a key."""
    command = [sys.executable, "-m", "rlhf_triton.tools", "gateway", "--config", str(live.run.path)]
    command += ["gateway.port=0", "gateway.key_env=KEYS_TEST_GATEWAY"]
    environment = {**os.environ, "KEYS_TEST_GATEWAY": GATEWAY_KEY}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().partition("gateway: ")[2].partition(",")[0]
        finally:
            process.terminate()


# ---- probes ----


def judged(status: str, text: str, bogus: bool = False) -> str:
    lacks_key = any(words in text for words in ("restricted", "key: missing or wrong", "no valid key"))
    assert lacks_key or bogus, (status, text)
    return status if lacks_key else YES


def fetch(url: str, body: Any = None, bogus: bool = False) -> Probe:
    """GET, or POST of a body as JSON; `bogus`: invalid, so that only an error about a key is a refusal."""

    def probe(headers: Mapping[str, str]) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"content-type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                return YES
        except urllib.error.HTTPError as error:
            with error:
                return judged(str(error.code), error.read().decode(), bogus)

    return probe


def call(channel: grpc.Channel, method: str, bogus: bool, fields: Mapping[str, Any]) -> Probe:
    """A method of Triton's gRPC service; `bogus`: as in `fetch`."""
    description = SERVICE.methods_by_name[method]
    request = getattr(service_pb2, description.input_type.name)(**fields)
    stub = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), method)

    def probe(headers: Mapping[str, str]) -> str:
        streams = description.client_streaming
        try:
            answer = stub(iter([request]) if streams else request, metadata=[*headers.items()], timeout=TIMEOUT_S)
            for error in [part.error_message for part in answer if part.error_message] if streams else ():
                return judged("INVALID_ARGUMENT", error, bogus)  # a message in the stream, without a code
        except grpc.RpcError as error:
            return judged(error.code().name, error.details(), bogus)
        return YES

    return probe


# ---- endpoints ----


def endpoints(system: System, channel: grpc.Channel, gateway: str) -> list[Endpoints]:
    """Return all of them; requests are valid unless `bogus`, so that nothing but a key can be missing."""
    run = system.run
    server, model = f"http://{run.url}/v2", f"http://{run.url}/v2/models/critic"

    def get(*paths: str) -> dict[str, Probe]:
        return {path: fetch(path) for path in paths}

    def rpc(*methods: str, bogus: bool = False, **fields: Any) -> dict[str, Probe]:
        return {f"{method} {fields}": call(channel, method, bogus, fields) for method in methods}

    def infer(what: str, *names: str, bogus: bool = False) -> Endpoints:
        """Integers; `critic_save` gets its own input, without which Triton refuses the request before the model."""
        over_http, over_grpc = {}, {}
        for name in names:
            shape, input_name = ([1], "dummy_var") if name == "critic_save" else ([1, 1], "tokens")
            tensor = {"name": input_name, "datatype": "INT64", "shape": shape}
            url = f"{server}/models/{name}/infer"
            over_http[url] = fetch(url, {"inputs": [{**tensor, "data": [5]}]}, bogus)
            filled = [{**tensor, "contents": {"int64_contents": [5]}}]
            over_grpc |= rpc("ModelInfer", "ModelStreamInfer", bogus=bogus, model_name=name, inputs=filled)
        return what, over_http, over_grpc

    control, memory = f"{server}/repository", f"{server}/systemsharedmemory"
    cuda_memory = f"{server}/cudasharedmemory"
    region = {"key": f"/{SHARED}", "offset": 0, "byte_size": 16}
    cuda = {"raw_handle": {"b64": ""}, "device_id": 0, "byte_size": 16}
    text, named = {"input": "Good day."}, {"model": "reward_model"}
    chat = {"messages": [{"role": "user", "content": "Good day."}]}
    return [
        (
            "health, readiness",
            get(f"{server}/health/live", f"{server}/health/ready", f"{model}/ready"),
            {**rpc("ServerLive", "ServerReady"), **rpc("ModelReady", name="critic")},
        ),
        (
            "metadata, configuration, statistics",
            get(server, model, f"{model}/config", f"{model}/stats"),
            {**rpc("ServerMetadata"), **rpc("ModelMetadata", "ModelConfig", "ModelStatistics", name="critic")},
        ),
        ("Prometheus metrics", get(f"http://{run.config.server.metrics_url}/metrics"), {}),
        infer("`reward_model`, `critic`, `critic_infer`", "reward_model", "critic", "critic_infer"),
        infer("`critic_train`, `critic_save`", "critic_train", "critic_save", bogus=True),
        (
            "model control: index, unload, load",
            {
                url: fetch(url, {})
                for url in (f"{control}/index", *(f"{control}/models/critic_save/{do}" for do in ("unload", "load")))
            },
            {
                **rpc("RepositoryIndex"),
                **rpc("RepositoryModelUnload", "RepositoryModelLoad", model_name="critic_save"),
            },
        ),
        (
            "shared memory",
            {
                **get(f"{memory}/status", f"{cuda_memory}/status"),
                "register": fetch(f"{memory}/region/http/register", region),
                "cuda": fetch(f"{cuda_memory}/region/cuda/register", cuda, bogus=True),
                **{url: fetch(url, {}) for url in (f"{memory}/unregister", f"{cuda_memory}/unregister")},
            },
            {
                **rpc("SystemSharedMemoryStatus", "CudaSharedMemoryStatus", "CudaSharedMemoryUnregister"),
                **rpc("SystemSharedMemoryRegister", name="grpc", **region),
                **rpc("SystemSharedMemoryUnregister"),
                **rpc("CudaSharedMemoryRegister", name="cuda", byte_size=16, bogus=True),
            },
        ),
        (
            "trace and log settings",
            {
                **get(f"{server}/trace/setting", f"{server}/logging", f"{model}/trace/setting"),
                **{f"POST {path}": fetch(f"{server}/{path}", {}) for path in ("trace/setting", "logging")},
            },
            rpc("TraceSetting", "LogSettings"),
        ),
        (
            "gateway: `/health`, `/healthz`, `/readyz`, `/metrics`, `/openapi.json`",
            get(*(f"{gateway}/{path}" for path in ("health", "healthz", "readyz", "metrics", "openapi.json"))),
            {},
        ),
        (
            "gateway: every other path",
            {
                **get(f"{gateway}/v1/models"),
                f"{gateway}/v1/rewards": fetch(f"{gateway}/v1/rewards", {"inputs": [{"text": "Good day."}]}),
                f"{gateway}/get_reward": fetch(f"{gateway}/get_reward", {"query": ["Good day."]}),
                f"{gateway}/remote_rm": fetch(f"{gateway}/remote_rm", {"prompt": "Good", "response": " day."}),
                f"{gateway}/classify": fetch(f"{gateway}/classify", {**named, **text}),
                f"{gateway}/pooling": fetch(f"{gateway}/pooling", {**named, **chat}),
                **{
                    f"{gateway}/{path}": fetch(f"{gateway}/{path}", {**named, "text_1": "a", "text_2": "b"}, bogus=True)
                    for path in ("score", "v1/score")
                },
                **{
                    f"{gateway}/{path}": fetch(f"{gateway}/{path}", {"query": "a", "texts": ["b"]}, bogus=True)
                    for path in ("rerank", "v1/rerank", "v2/rerank")
                },
            },
            {},
        ),
    ]


# ---- the table ----


def headers_of(key: str) -> dict[str, str]:
    """A holder tries the key wherever a key can be sent."""
    (training_header,) = KEY
    names = (training_header, HEADER, GRPC_HEADER) if key else ()
    return {**dict.fromkeys(names, key), **({"authorization": f"Bearer {key}"} if key else {})}


def row_of(what: str, *over: dict[str, Probe], keys: Mapping[str, str]) -> tuple[str, ...]:
    """Observe what each holder gets from all endpoints of a group, and the status of the refusals."""
    named = {name: probes for name, probes in zip(("HTTP", "gRPC"), over, strict=True) if probes}
    cells, refusals = set(), []
    for name, probes in named.items():
        seen = [{each: probe(headers_of(keys[holder])) for each, probe in probes.items()} for holder in HOLDERS]
        assert [set(found.values()) for found in seen if len(set(found.values())) > 1] == [], (what, name, seen)
        statuses = [next(iter(found.values())) for found in seen]
        cells.add(tuple(YES if status == YES else NO for status in statuses))
        refusals += [f"{name} {status}" for status in dict.fromkeys(statuses) if status != YES]
    (shown,) = cells
    return (what, ", ".join(named), *shown, ", ".join(refusals))


@pytest.fixture(scope="module")
def groups(live: System, gateway: str) -> Iterator[list[Endpoints]]:
    memory = Path("/dev/shm") / SHARED
    memory.write_bytes(bytes(16))
    with grpc.insecure_channel(live.run.config.server.grpc_url) as channel:
        yield endpoints(live, channel, gateway)
    memory.unlink()


@pytest.mark.slow
def test_the_documentation_has_what_each_key_opens(live: System, groups: list[Endpoints]) -> None:
    control = control_key(live.run.config.run.weights_dir)
    keys = {"none": "", "wrong": "guessed", "training": TRAINING_KEY, "control": control, "gateway": GATEWAY_KEY}
    lines = [("endpoint", "over", "no key", "wrong", *HOLDERS[2:], "a refusal")]
    lines += [row_of(*group, keys=keys) for group in groups]
    shown = [f"| {' | '.join(cells)} |" for cells in lines]
    observed = "\n".join([shown[0], f"|{'---|' * len(lines[0])}", *shown[1:]]) + "\n"
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    written, _, after = rest.partition(END)
    assert after, f"{PAGE.name} has no table between {BEGIN!r} and {END!r}"
    if os.environ.get(WRITE) == "1":
        PAGE.write_text(f"{before}{BEGIN}{observed}{END}{after}")
        written = observed
    assert written == observed, f"run it again with {WRITE}=1"


@pytest.mark.slow
def test_every_endpoint_is_asked(groups: list[Endpoints], gateway: str) -> None:
    assert {name.partition(" ")[0] for _, _, rpcs in groups for name in rpcs} == set(SERVICE.methods_by_name)
    with urllib.request.urlopen(f"{gateway}/openapi.json", timeout=TIMEOUT_S) as answer:
        routes = {f"{gateway}{path}" for path in json.load(answer)["paths"]}
    assert routes <= {url for _, urls, _ in groups for url in urls}


@pytest.mark.slow
def test_a_load_without_the_control_key_says_what_to_set_and_the_list_of_processes_does_not_show_it(
    live: System,
) -> None:
    refusal = pytest.raises(ControlPlaneError, match=r"requires a key for model control.*; set TRITON_CONTROL_KEY")
    with ControlPlane(live.run.config.server.grpc_url, "") as control, refusal:
        control.load("critic_save", parameters={"weights_version": "1"}, timeout_s=120)
    key = control_key(live.run.config.run.weights_dir)
    (server,) = [
        process
        for process in psutil.Process(live.server.process.pid).children(recursive=True)
        if process.name() == "tritonserver"
    ]
    shown = " ".join(server.cmdline())
    assert (key in shown, f"{HEADER}={'*' * len(key)}" in shown) == (False, True)
