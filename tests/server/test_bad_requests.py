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

NAN, INF = np.float32("nan"), np.float32("inf")


def refusal(system: System, model: str, arrays: dict[str, np.ndarray], **headers: str) -> Refused:
    """What the server says to a request that it must refuse; printed, to be read with `pytest -s`."""
    with pytest.raises(Refused) as caught:
        ask(system.run.url, model, arrays, headers={**KEY, **headers})
    print(f"\n{model} {caught.value.code}: {caught.value.message}")
    return caught.value


def post_json(system: System, model: str, inputs: list[dict[str, Any]]) -> tuple[int, str]:
    """Code and text of the refusal of a request in plain JSON."""
    url = f"http://{system.run.url}/v2/models/{model}/infer"
    request = urllib.request.Request(url, json.dumps({"inputs": inputs}).encode(), headers=KEY)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as answer:
        text = answer.read().decode()
    print(f"\n{model} {caught.value.code}: {text}")
    return caught.value.code, text


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
}

REFUSED_BY_TRITON = {
    "wrong dtype": ({**ROW, "tokens": ROW["tokens"].astype(np.float32)}, ("tokens", "FP32", "INT64")),
    "tokens of one dimension": ({"tokens": ROW["tokens"][0]}, ("tokens", "shape", "[-1,-1]", "[6]")),
    "tokens of three dimensions": ({"tokens": ROW["tokens"][None]}, ("tokens", "shape", "[-1,-1]", "[1,1,6]")),
    "lengths of the wrong shape": (
        {**ROW, "sequence_lengths": np.asarray([[6, 6]])},
        ("sequence_lengths", "shape", "[-1,1]", "[1,2]"),
    ),
    "lengths for other rows": ({**ROW, "sequence_lengths": np.asarray([[6], [6]])}, ("batch",)),
    "unknown input": ({**ROW, "attention_mask": ROW["tokens"]}, ("attention_mask",)),
}


@pytest.mark.parametrize("model", [REWARD_MODEL, CRITIC, CRITIC_INFER])
@pytest.mark.parametrize("case", BAD_SCORING)
def test_bad_scoring_request(live: System, model: str, case: str) -> None:
    arrays, sentence = BAD_SCORING[case]
    error = refusal(live, model, arrays)
    assert error.code == "400"
    assert sentence in error.message


@pytest.mark.parametrize("case", REFUSED_BY_TRITON)
def test_triton_itself_names_the_field(live: System, case: str) -> None:
    arrays, words = REFUSED_BY_TRITON[case]
    error = refusal(live, CRITIC_INFER, arrays)
    assert error.code == "400"
    for word in words:
        assert word in error.message


@pytest.mark.parametrize("model", [REWARD_MODEL, CRITIC, CRITIC_INFER])
@pytest.mark.parametrize(
    "tensor",
    [
        {"name": "tokens", "shape": [0, 0], "datatype": "INT64", "data": []},
        {"name": "tokens", "shape": [0, 5], "datatype": "INT64", "data": []},
        {"name": "sentences", "shape": [0, 1], "datatype": "BYTES", "data": []},
    ],
)
def test_a_request_of_no_rows_is_answered(live: System, model: str, tensor: dict[str, Any]) -> None:
    """In plain JSON Triton lets it pass; without an answer the caller would wait for ever."""
    assert post_json(live, model, [tensor])[0] == 400


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
@pytest.mark.parametrize("model", [REWARD_MODEL, CRITIC_INFER])
@pytest.mark.parametrize("case", TOO_MUCH)
def test_one_request_is_bounded(live: System, model: str, case: str) -> None:
    arrays, sentence = TOO_MUCH[case]
    error = refusal(live, model, arrays)
    assert (error.code, sentence in error.message) == ("400", True)


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
    error = refusal(live, CRITIC_TRAIN, arrays)
    assert error.code == "400"
    assert sentence in error.message
    assert live.run.journal.last_step() == before


def test_triton_refuses_training_dtypes_by_name(live: System) -> None:
    error = refusal(live, CRITIC_TRAIN, {**GOOD, "returns": GOOD["returns"].astype(np.float64)})
    assert error.code == "400"
    for word in ("returns", "FP64", "FP32"):
        assert word in error.message


def test_nan_in_plain_json_is_refused(live: System) -> None:
    """A client without the binary extension: the payload as JSON text."""
    types = {"tokens": "INT64"}
    inputs = [
        {"name": name, "shape": list(array.shape), "datatype": types.get(name, "FP32"), "data": array.ravel().tolist()}
        for name, array in {**GOOD, "returns": changed(GOOD["returns"], (0, 0), NAN)}.items()
    ]
    code, text = post_json(live, CRITIC_TRAIN, inputs)
    assert code == 400
    assert "nan" in text.lower()


# ---- steps ----


def train(system: System, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return ask(system.run.url, CRITIC_TRAIN, arrays, headers=KEY)


def test_a_step_sent_twice_is_trained_once(live: System) -> None:
    step = live.run.next_step()
    arrays = {**training_inputs(seed=20), **identity("test", step)}
    first, again = train(live, arrays), train(live, arrays)
    assert first == again
    assert live.run.store.manifest(int(first["weights_version"][0])).step == step
    assert [line["step"] for line in live.run.critic_updates(up_to=step)].count(step) == 1


def test_a_step_sent_by_many_at_once_is_trained_once(live: System) -> None:
    step = live.run.next_step()
    arrays = {**training_inputs(seed=21), **identity("test", step)}
    answers = ask_all(live.run.url, [(CRITIC_TRAIN, arrays)] * 8, headers=KEY)
    assert not [answer for answer in answers if isinstance(answer, Refused)]
    assert len({(float(a["loss_mean"][0]), int(a["weights_version"][0])) for a in answers}) == 1
    assert [line["step"] for line in live.run.critic_updates(up_to=step)].count(step) == 1
    assert live.run.journal.last_step() == step


def test_the_same_content_padded_otherwise_is_the_same_step(live: System) -> None:
    step = live.run.next_step()
    padded = {**training_inputs(seed=22), "sequence_lengths": np.full((4, 1), 12)}
    wider = {
        name: array if name == "sequence_lengths" else np.pad(array, ((0, 0), (0, 5))) for name, array in padded.items()
    }
    assert train(live, {**padded, **identity("test", step)}) == train(live, {**wider, **identity("test", step)})


def test_a_known_step_with_other_content_is_refused(live: System) -> None:
    step = live.run.next_step()
    train(live, {**training_inputs(seed=23), **identity("test", step)})
    error = refusal(live, CRITIC_TRAIN, {**training_inputs(seed=24), **identity("test", step)})
    assert error.code == "400"
    assert error.message.startswith(
        f"step: {step} of run 'test' was already sent with other content; the last step is {step}: "
        f"send step {step + 1}, or send critic_save once with rewind_to {step - 1}"
    )


def test_a_gap_is_refused(live: System) -> None:
    last = live.run.journal.last_step()
    error = refusal(live, CRITIC_TRAIN, {**GOOD, **identity("test", last + 5)})
    assert error.code == "400"
    assert f"step: {last + 5}, but the last step of run 'test' is {last}; send step {last + 1} first" in error.message


@pytest.mark.parametrize("model", [CRITIC_TRAIN, CRITIC_SAVE])
def test_another_run_is_refused(live: System, model: str) -> None:
    arrays = (
        {**GOOD, **identity("other", 1)}
        if model == CRITIC_TRAIN
        else {
            "dummy_var": np.zeros(1, np.int64),
            "run_id": np.asarray([b"other"], dtype=np.object_),
        }
    )
    error = refusal(live, model, arrays)
    assert error.code == "400"
    assert "run_id: 'other', but this critic belongs to run 'test'" in error.message


def test_no_step_takes_the_next_number(live: System) -> None:
    last = live.run.journal.last_step()
    answer = train(live, training_inputs(seed=25))
    assert live.run.journal.last_step() == last + 1
    assert live.run.store.manifest(int(answer["weights_version"][0])).step == last + 1


def test_a_rewind_ahead_of_the_critic_is_refused(live: System) -> None:
    last = live.run.journal.last_step()
    error = refusal(live, CRITIC_SAVE, {"dummy_var": np.zeros(1, np.int64), "rewind_to": np.asarray([last + 3])})
    assert error.code == "400"
    assert f"rewind_to: {last + 3}, but the last step of run 'test' is {last}" in error.message


# ---- the training key ----


@pytest.mark.parametrize("model", [CRITIC_TRAIN, CRITIC_SAVE])
@pytest.mark.parametrize("headers", [{}, {"x-triton-training-key": "open barley"}])
def test_training_needs_the_key(live: System, model: str, headers: dict[str, str]) -> None:
    arrays = training_inputs(seed=26) if model == CRITIC_TRAIN else {"dummy_var": np.zeros(1, np.int64)}
    before = live.run.journal.last_step()
    with pytest.raises(Refused) as caught:
        ask(live.run.url, model, arrays, headers=headers)
    print(f"\n{model} {caught.value.code}: {caught.value.message}")
    assert caught.value.code == "400"
    assert "header x-triton-training-key: missing or wrong" in caught.value.message
    assert live.run.journal.last_step() == before


@pytest.mark.parametrize("model", [CRITIC_TRAIN, CRITIC_SAVE])
def test_a_key_in_the_body_that_is_no_text_is_no_key(live: System, model: str) -> None:
    url = f"http://{live.run.url}/v2/models/{model}/infer"
    tensor = {"name": "dummy_var" if model == CRITIC_SAVE else "step", "shape": [1], "datatype": "INT64", "data": [1]}
    body = {"parameters": {"x-triton-training-key": 5}, "inputs": [tensor]}
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=60)
    with caught.value as answer:
        assert answer.code == 400
        assert "header x-triton-training-key: missing or wrong" in answer.read().decode()


def test_the_header_may_be_spelled_as_http_allows(live: System) -> None:
    headers = {"X-Triton-Training-Key": KEY["x-triton-training-key"]}
    answer = ask(live.run.url, CRITIC_TRAIN, training_inputs(seed=27), headers=headers)
    assert int(answer["weights_version"][0]) > 0


def test_scoring_needs_no_key(live: System) -> None:
    assert ask(live.run.url, CRITIC_INFER, ROW)["rewards"].shape == (1, 1)
