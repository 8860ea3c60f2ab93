"""Every bad input over real HTTP: one clear sentence that names field and value, for that request alone."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest
from bare_client import Refused, ask, ask_all
from live_system import (
    KEY,
    POSITIONS,
    Checkpoints,
    System,
    direct_rewards,
    identity,
    random_rows,
    scoring_inputs,
    training_inputs,
)

from python_backend.wire.contract import CRITIC, CRITIC_INFER, CRITIC_SAVE, CRITIC_TRAIN, REWARD_MODEL, texts_array

SAVE = {"dummy_var": np.zeros(1, np.int64)}
NAN, INF = np.float32("nan"), np.float32("inf")


def refusal(system: System, model: str, arrays: dict[str, np.ndarray]) -> str:
    """What the server says to a request that it must refuse; printed, to be read with `pytest -s`."""
    with pytest.raises(Refused) as caught:
        ask(system.run.url, model, arrays, headers=KEY)
    print(f"\n{model} {caught.value.code}: {caught.value.message}")
    assert caught.value.code == "400"
    return caught.value.message


def post_json(system: System, model: str, body: dict[str, Any], **headers: str) -> str:
    """Text of the refusal of a request in plain JSON."""
    url = f"http://{system.run.url}/v2/models/{model}/infer"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60)
    with caught.value as answer:
        text = answer.read().decode()
    print(f"\n{model} {caught.value.code}: {text}")
    assert caught.value.code == 400
    return text


def changed(array: np.ndarray, index: tuple[int, ...], value: Any) -> np.ndarray:
    """A copy with one other entry."""
    copy = array.copy()
    copy[index] = value
    return copy


ROW = scoring_inputs(random_rows([6], seed=0))
TWO_ROWS = scoring_inputs(random_rows([6, 3], seed=0))

BAD_SCORING = {
    "outside the vocabulary": (
        {**ROW, "tokens": changed(ROW["tokens"], (0, 4), 200)},
        "tokens[0, 4]: 200 is outside the vocabulary [0, 200)",
    ),
    "negative token": (
        {**TWO_ROWS, "tokens": changed(TWO_ROWS["tokens"], (1, 2), -5)},
        "tokens[1, 2]: -5 is outside the vocabulary [0, 200)",
    ),
    "too long": (
        scoring_inputs(random_rows([POSITIONS + 1], seed=0)),
        f"tokens[0]: {POSITIONS + 1} tokens, the model has {POSITIONS} positions",
    ),
    "empty sequence": (
        {**TWO_ROWS, "sequence_lengths": np.asarray([[6], [0]])},
        "sequence_lengths[1]: 0, must be between 1 and 6, the number of tokens sent",
    ),
    "negative length": (
        {**ROW, "sequence_lengths": np.asarray([[-2]])},
        "sequence_lengths[0]: -2, must be between 1 and 6, the number of tokens sent",
    ),
    "length beyond the tokens": (
        {**ROW, "sequence_lengths": np.asarray([[7]])},
        "sequence_lengths[0]: 7, must be between 1 and 6, the number of tokens sent",
    ),
    "no tokens at all": (
        {"tokens": np.zeros((1, 0), np.int64)},
        "sequence_lengths[0]: 0, an empty sequence cannot be scored",
    ),
    "neither tokens nor sentences": (
        {"sequence_lengths": np.asarray([[6]])},
        "tokens: missing; send tokens or sentences",
    ),
    "empty sentence": (
        {"sentences": np.asarray([[b"A list"], [b""]], dtype=np.object_)},
        "sentences[1]: '' has no tokens, an empty sequence cannot be scored",
    ),
    "sentence that is no UTF-8": (
        {"sentences": np.asarray([[b"A \xff list"]], dtype=np.object_)},
        "sentences[0]: not UTF-8",
    ),
    "metadata that is no JSON": (
        {"sentences": texts_array(["x"]), "metadata": texts_array(["{"])},
        "metadata[0]: '{' is not JSON",
    ),
    "metadata that is no object": (
        {"sentences": texts_array(["x"]), "metadata": texts_array(["[]"])},
        "metadata[0]: '[]', must be a JSON object",
    ),
}

REFUSED_BY_TRITON = {
    "wrong dtype": (CRITIC_INFER, {**ROW, "tokens": ROW["tokens"].astype(np.float32)}, ("tokens", "FP32", "INT64")),
    "tokens of one dimension": (CRITIC_INFER, {"tokens": ROW["tokens"][0]}, ("tokens", "shape", "[-1,-1]", "[6]")),
    "lengths of the wrong shape": (
        CRITIC_INFER,
        {**ROW, "sequence_lengths": np.asarray([[6, 6]])},
        ("sequence_lengths", "shape", "[-1,1]", "[1,2]"),
    ),
    "lengths for other rows": (CRITIC_INFER, {**ROW, "sequence_lengths": np.asarray([[6], [6]])}, ("batch",)),
    "unknown input": (CRITIC_INFER, {**ROW, "attention_mask": ROW["tokens"]}, ("attention_mask",)),
    "returns of the wrong dtype": (CRITIC_TRAIN, {"returns": np.zeros((4, 11))}, ("returns", "FP64", "FP32")),
}


@pytest.mark.parametrize("model", [REWARD_MODEL, CRITIC, CRITIC_INFER])
def test_a_bad_scoring_request_fails_alone(live: System, checkpoints: Checkpoints, model: str) -> None:
    """Sent at once with good rows, so that they share batches."""
    rows = random_rows(range(3, 35), seed=6)
    bad = [(model, arrays) for arrays, _ in BAD_SCORING.values()]
    answers = ask_all(live.run.url, [*bad, *((model, scoring_inputs([row])) for row in rows), *bad])
    for answer, (_, sentence) in zip(
        answers[: len(bad)] + answers[-len(bad) :], [*BAD_SCORING.values()] * 2, strict=True
    ):
        assert isinstance(answer, Refused)
        assert (answer.code, sentence in answer.message) == ("400", True), (sentence, answer.message)
    good = answers[len(bad) : -len(bad)]
    assert not [answer for answer in good if isinstance(answer, Refused)]
    if model != CRITIC:
        found = [answer["rewards"][0, 0] for answer in good]
        np.testing.assert_allclose(found, direct_rewards(checkpoints.reward, rows), atol=1e-5)


@pytest.mark.parametrize("case", REFUSED_BY_TRITON)
def test_triton_itself_names_the_field(live: System, case: str) -> None:
    model, arrays, words = REFUSED_BY_TRITON[case]
    message = refusal(live, model, arrays)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("model", [REWARD_MODEL, CRITIC, CRITIC_INFER])
def test_a_request_of_no_rows_is_answered(live: System, model: str) -> None:
    """In plain JSON Triton lets it pass; without an answer the caller would wait for ever."""
    for name, shape, kind in (("tokens", [0, 0], "INT64"), ("tokens", [0, 5], "INT64"), ("sentences", [0, 1], "BYTES")):
        post_json(live, model, {"inputs": [{"name": name, "shape": shape, "datatype": kind, "data": []}]})


def test_text_that_is_no_unicode_is_refused_and_nothing_else(live: System, checkpoints: Checkpoints) -> None:
    """An exception that leaves `execute` answers the other requests of the batch twice: heap corruption."""
    metadata = np.asarray([[json.dumps({"messages": "\ud800 \x1b[2J"}).encode()]], dtype=np.object_)
    bad = {"sentences": np.asarray([[b"A list"]], dtype=np.object_), "metadata": metadata}
    for _ in range(20):
        answers = ask_all(live.run.url, [(REWARD_MODEL, bad)] * 4 + [(REWARD_MODEL, ROW)] * 4, headers=KEY)
        for answer in answers[:4]:
            assert isinstance(answer, Refused)
            assert (answer.code, "\\ud800 \\x1b[2J" in answer.message) == ("400", True)
        rewards = [answer["rewards"][0, 0] for answer in answers[4:] if not isinstance(answer, Refused)]
        np.testing.assert_allclose(rewards, direct_rewards(checkpoints.reward, [ROW["tokens"][0]] * 4), atol=1e-5)


def sentences(*texts: str) -> dict[str, np.ndarray]:
    return {"sentences": texts_array(list(texts))}


TOO_MUCH = {
    "rows": ({"tokens": np.zeros((8193, 1), np.int64)}, "batch-size must be <= 8192"),
    "tokens": (
        {"tokens": np.zeros((5000, 1000), np.int64), "sequence_lengths": np.ones((5000, 1), np.int64)},
        "tokens: 5000 rows of 1000 tokens, padding included, exceed 4000000 (max_request_tokens)",
    ),
    "a sentence": (sentences("x" * 1_000_001), "sentences[0]: 1000001 bytes, must be at most 1000000"),
    "sentences": (sentences(*["x" * 900_000] * 5), "sentences: 4500000 bytes with the metadata, more than 4000000"),
    "metadata": (
        {**sentences("A list"), "metadata": texts_array(["{}" + " " * 1_000_000])},
        "metadata[0]: 1000002 bytes, must be at most 1000000",
    ),
}


@pytest.mark.filterwarnings("ignore:Sending a large body")
@pytest.mark.parametrize("case", TOO_MUCH)
def test_one_request_is_bounded(live: System, case: str) -> None:
    arrays, sentence = TOO_MUCH[case]
    assert sentence in refusal(live, CRITIC_INFER, arrays)


GOOD = training_inputs(seed=1)
PACKED = {
    "tokens": GOOD["tokens"].reshape(1, -1),
    "sequence_lengths": np.full((4, 1), 12),
    **{name: GOOD[name].reshape(1, -1) for name in ("returns", "prev_values", "mask")},
}
BAD_TRAINING = {
    "outside the vocabulary": (
        {**GOOD, "tokens": changed(GOOD["tokens"], (2, 5), 200)},
        "tokens[2, 5]: 200 is outside the vocabulary [0, 200)",
    ),
    "too long": (
        training_inputs(seed=1, width=POSITIONS + 2),
        f"tokens[0]: {POSITIONS + 2} tokens, the model has {POSITIONS} positions",
    ),
    "NaN returns": ({**GOOD, "returns": changed(GOOD["returns"], (1, 2), NAN)}, "returns[1, 2]: nan, must be finite"),
    "infinite values": (
        {**GOOD, "prev_values": changed(GOOD["prev_values"], (3, 0), -INF)},
        "prev_values[3, 0]: -inf, must be finite",
    ),
    "NaN mask": ({**GOOD, "mask": changed(GOOD["mask"], (0, 0), NAN)}, "mask[0, 0]: nan, must be finite"),
    "negative mask": ({**GOOD, "mask": changed(GOOD["mask"], (0, 1), -1)}, "mask[0, 1]: -1, must not be negative"),
    "mask of the wrong shape": (
        {**GOOD, "mask": np.ones((4, 12), np.float32)},
        "mask: shape [4, 12], must be [4, 11] (one entry fewer than tokens in each row)",
    ),
    "returns of other rows": ({**GOOD, "returns": GOOD["returns"][:3]}, "returns: shape [3, 11], must be [4, 11]"),
    "empty mask": ({**GOOD, "mask": GOOD["mask"] * 0}, "mask: all 0, there is nothing to train"),
    "mask beyond the sequence": (
        {**GOOD, "sequence_lengths": np.asarray([[12], [12], [5], [12]])},
        "mask[2, 4]: 1, must be 0: a sequence of 5 tokens has one entry fewer",
    ),
    "no returns": ({k: v for k, v in GOOD.items() if k != "returns"}, "returns: missing"),
    "no tokens": ({k: v for k, v in GOOD.items() if k != "tokens"}, "tokens: missing"),
    "empty payload": ({**GOOD, "tokens": np.zeros((0, 12), np.int64)}, "tokens: shape [0, 12], must be [N, S]"),
    "one token": ({**GOOD, "tokens": GOOD["tokens"][:, :1]}, "a row needs at least 2 tokens"),
    "packed lengths that do not sum up": (
        {**PACKED, "sequence_lengths": np.asarray([[12], [12], [12], [11]])},
        "sequence_lengths: sum 47, but tokens has 48 tokens",
    ),
    "packed targets of the wrong shape": (
        {**PACKED, "mask": PACKED["mask"][:, :-1]},
        "mask: shape [1, 43], must be [1, 44]",
    ),
    "run id with a slash": (
        {**GOOD, "run_id": np.asarray([b"../other"], dtype=np.object_)},
        "run_id: '../other', use 1 to 64 letters",
    ),
    "step 0": ({**GOOD, "step": np.asarray([0])}, "step: 0, must be at least 1"),
}


@pytest.mark.parametrize("case", BAD_TRAINING)
def test_bad_training_request(live: System, case: str) -> None:
    arrays, sentence = BAD_TRAINING[case]
    before = live.run.journal.last_step()
    assert sentence in refusal(live, CRITIC_TRAIN, arrays)
    assert live.run.journal.last_step() == before


def test_nan_in_plain_json_is_refused(live: System) -> None:
    """A client without the binary extension: the payload as JSON text."""
    types = {"tokens": "INT64"}
    inputs = [
        {"name": name, "shape": list(array.shape), "datatype": types.get(name, "FP32"), "data": array.ravel().tolist()}
        for name, array in {**GOOD, "returns": changed(GOOD["returns"], (0, 0), NAN)}.items()
    ]
    assert "nan" in post_json(live, CRITIC_TRAIN, {"inputs": inputs}, **KEY).lower()


# ---- steps ----


def test_a_step_sent_by_many_at_once_is_trained_once(live: System) -> None:
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


def test_clients_without_steps_never_share_one(live: System) -> None:
    first = live.run.next_step()
    requests = [(CRITIC_TRAIN, training_inputs(seed=70 + i)) for i in range(3)]
    answers = ask_all(live.run.url, requests, headers=KEY)
    steps = [live.run.store.manifest(int(answer["weights_version"][0])).step for answer in answers]
    assert sorted(steps) == [first, first + 1, first + 2]


def test_steps_that_do_not_fit_are_refused_by_name(live: System) -> None:
    last = live.run.next_step()
    ask(live.run.url, CRITIC_TRAIN, {**GOOD, **identity("test", last)}, headers=KEY)
    other_run = {"run_id": np.asarray([b"other"], dtype=np.object_)}
    for model, arrays, sentence in (
        (
            CRITIC_TRAIN,
            {**training_inputs(seed=24), **identity("test", last)},
            f"step: {last} of run 'test' was already sent with other content; the last step is {last}: "
            f"send step {last + 1}, or send critic_save once with rewind_to {last - 1}",
        ),
        (
            CRITIC_TRAIN,
            {**GOOD, **identity("test", last + 5)},
            f"step: {last + 5}, but the last step of run 'test' is {last}; send step {last + 1} first",
        ),
        (
            CRITIC_TRAIN,
            {**GOOD, **identity("other", 1)},
            "run_id: 'other', but this critic belongs to run 'test'",
        ),
        (CRITIC_SAVE, {**SAVE, **other_run}, "run_id: 'other', but this critic belongs to run 'test'"),
        (
            CRITIC_SAVE,
            {**SAVE, "rewind_to": np.asarray([last + 3])},
            f"rewind_to: {last + 3}, but the last step of run 'test' is {last}",
        ),
        (CRITIC_SAVE, {"keep_steps": np.asarray([4, -1])}, "keep_steps[1]: -1, must be at least 0"),
    ):
        assert sentence in refusal(live, model, arrays)
    assert live.run.journal.last_step() == last


# ---- the training key ----


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
