"""`python_backend.wire.contract`: good requests are cut to their rows, each bad one is refused by field and value."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backend.wire import contract
from python_backend.wire.contract import ContractError, Limits, scoring_rows
from python_backend.wire.texts import metadata_rows, text_bytes
from python_backend.wire.training_payload import train_payload

LIMITS = Limits(vocab_size=10, max_length=6)
TOKENS = np.array([[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 9, 0]])
LENGTHS = np.array([[4], [2], [3]])


def padded(**changes: np.ndarray | None) -> dict[str, np.ndarray | None]:
    """A training payload of the rows above; `[N, S-1]` targets are 10 * row + position."""
    targets = np.add.outer(10 * np.arange(3), np.arange(3)).astype(np.float32)
    mask = np.array([[0, 1, 1], [1, 0, 0], [0, 1, 0]], np.float32)
    arrays = {
        "tokens": TOKENS,
        "sequence_lengths": LENGTHS,
        "returns": targets,
        "prev_values": -targets,
        "mask": mask,
    }
    return {**arrays, **changes}


def packed(**changes: np.ndarray | None) -> dict[str, np.ndarray | None]:
    """The same payload without padding."""
    arrays = {
        "tokens": np.array([[1, 2, 3, 4, 5, 6, 7, 8, 9]]),
        "sequence_lengths": LENGTHS,
        "returns": np.array([[0, 1, 2, 10, 20, 21]], np.float32),
        "prev_values": -np.array([[0, 1, 2, 10, 20, 21]], np.float32),
        "mask": np.array([[0, 1, 1, 1, 0, 1]], np.float32),
    }
    return {**arrays, **changes}


def at(array: np.ndarray, index: tuple[int, int], value: float) -> np.ndarray:
    changed = array.copy()
    changed[index] = value
    return changed


def refused(text: str):
    return pytest.raises(ContractError, match=re.escape(text))


# ---- scoring ----


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:, 0], LENGTHS.astype(np.int32)])
def test_rows_are_cut_to_their_lengths(dtype: type, lengths: np.ndarray):
    rows = scoring_rows(TOKENS.astype(dtype), lengths, limits=LIMITS)
    assert rows.width == 4
    assert [row.tokens.tolist() for row in rows.rows] == [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    assert {row.tokens.dtype for row in rows.rows} == {np.dtype(np.int64)}


def test_padding_may_hold_anything_and_be_any_length():
    tokens = np.pad(TOKENS, ((0, 0), (0, 50)), constant_values=-100)
    cut = scoring_rows(tokens, LENGTHS, limits=LIMITS)
    whole = scoring_rows(np.ones((1, 5000), np.int64), None, limits=Limits(10))
    sizes = [(rows.width, [row.tokens.size for row in rows.rows]) for rows in (cut, whole)]
    assert sizes == [(54, [4, 2, 3]), (5000, [5000])]


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        (None, None, "tokens: missing"),
        (TOKENS.astype(np.float32), LENGTHS, "tokens: dtype float32, must be int64 or int32"),
        (TOKENS.astype(np.uint8), LENGTHS, "tokens: dtype uint8"),
        (TOKENS[0], LENGTHS, "tokens: shape [4], must be [B, S]"),
        (TOKENS[None], LENGTHS, "tokens: shape [1, 3, 4]"),
        (TOKENS[:0], LENGTHS[:0], "tokens: shape [0, 4], must have at least one row"),
        (TOKENS[:0], None, "tokens: shape [0, 4], must have at least one row"),
        (TOKENS[:, :0], None, "sequence_lengths[0]: 0, an empty sequence"),
        (at(TOKENS, (2, 1), 10), LENGTHS, "tokens[2, 1]: 10 is outside the vocabulary [0, 10)"),
        (at(TOKENS, (0, 3), -1), LENGTHS, "tokens[0, 3]: -1 is outside the vocabulary [0, 10)"),
        (at(TOKENS, (1, 0), 2**40), LENGTHS, "tokens[1, 0]: 1099511627776 is outside"),
        (np.ones((1, 7), np.int64), None, "tokens[0]: 7 tokens, the model has 6 positions"),
        (TOKENS, at(LENGTHS, (1, 0), 0), "sequence_lengths[1]: 0, must be between 1 and 4, the number of tokens sent"),
        (TOKENS, at(LENGTHS, (2, 0), -3), "sequence_lengths[2]: -3"),
        (TOKENS, at(LENGTHS, (2, 0), 5), "sequence_lengths[2]: 5, must be between 1 and 4, the number of tokens sent"),
        (TOKENS, LENGTHS.T, "sequence_lengths: shape [1, 3], must be [3, 1]"),
        (TOKENS, LENGTHS[:2], "sequence_lengths: shape [2, 1], must be [3, 1]"),
        (TOKENS, LENGTHS.astype(np.float32), "sequence_lengths: dtype float32"),
    ],
)
def test_scoring_requests_are_refused_by_field_and_value(tokens, lengths, message: str):
    with refused(message):
        scoring_rows(tokens, lengths, limits=LIMITS)


# ---- training ----


def test_padded_and_packed_are_the_same_payload():
    one, other = train_payload(padded(), LIMITS), train_payload(packed(), LIMITS)
    for name, array in one.arrays().items():
        np.testing.assert_array_equal(array, other.arrays()[name])
        assert array.dtype == other.arrays()[name].dtype
    assert one.digest() == other.digest()
    assert one.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert one.returns.tolist() == [0, 1, 2, 10, 20, 21]
    assert one.mask.tolist() == [0, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("name", ["tokens", "returns", "prev_values", "mask"])
def test_the_digest_knows_every_field(name: str):
    changed = padded(**{name: at(padded()[name], (0, 1), 7)})
    assert train_payload(changed, LIMITS).digest() != train_payload(padded(), LIMITS).digest()


def test_the_digest_knows_where_a_row_ends():
    two = packed(tokens=np.array([[1, 2, 3, 4, 5]]), sequence_lengths=np.array([2, 3]))
    other = packed(tokens=np.array([[1, 2, 3, 4, 5]]), sequence_lengths=np.array([3, 2]))
    for arrays in (two, other):
        arrays.update({name: np.ones((1, 3), np.float32) for name in ("returns", "prev_values", "mask")})
    assert train_payload(two, LIMITS).digest() != train_payload(other, LIMITS).digest()


def test_without_lengths_rows_end_behind_the_last_masked_position():
    payload = train_payload(padded(sequence_lengths=None), LIMITS)
    assert payload.lengths.tolist() == [4, 2, 3]
    nothing = padded(sequence_lengths=None, mask=at(at(padded()["mask"], (1, 0), 0), (2, 1), 0))
    assert train_payload(nothing, LIMITS).lengths.tolist() == [4, 2, 2]  # a row without a mask keeps one position


def test_one_row_is_packed_and_padded_at_once():
    arrays = {name: array[:1] for name, array in padded().items()}
    assert train_payload(arrays, LIMITS).lengths.tolist() == [4]


NAN = np.full((3, 3), np.nan, np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "tokens: missing"),
        ({"returns": None}, "returns: missing"),
        ({"prev_values": None}, "prev_values: missing"),
        ({"mask": None}, "mask: missing"),
        ({"tokens": TOKENS.astype(np.float64)}, "tokens: dtype float64"),
        ({"tokens": TOKENS[0]}, "tokens: shape [4], must be [N, S]"),
        ({"tokens": TOKENS[:0]}, "tokens: shape [0, 4]"),
        ({"tokens": TOKENS[:, :1]}, "tokens: shape [3, 1], a row needs at least 2 tokens"),
        ({"tokens": at(TOKENS, (0, 3), 10)}, "tokens[0, 3]: 10 is outside the vocabulary [0, 10)"),
        ({"returns": padded()["returns"].astype(np.float64)}, "returns: dtype float64, must be float32"),
        ({"returns": at(padded()["returns"], (2, 0), np.nan)}, "returns[2, 0]: nan, must be finite"),
        ({"prev_values": at(padded()["returns"], (1, 2), -np.inf)}, "prev_values[1, 2]: -inf, must be finite"),
        ({"mask": NAN}, "mask[0, 0]: nan"),
        ({"mask": np.ones((3, 4), np.float32)}, "mask: shape [3, 4], must be [3, 3]"),
        ({"mask": np.ones((2, 3), np.float32)}, "mask: shape [2, 3], must be [3, 3]"),
        ({"mask": np.ones(9, np.float32)}, "mask: shape [9], must be [3, 3]"),
        ({"mask": np.ones((3, 3), bool)}, "mask: dtype bool, must be float32"),
        ({"mask": at(padded()["mask"], (0, 2), -1)}, "mask[0, 2]: -1, must not be negative"),
        (
            {"mask": at(padded()["mask"], (1, 1), 1)},
            "mask[1, 1]: 1, must be 0: a sequence of 2 tokens has one entry fewer",
        ),
        ({"mask": np.zeros((3, 3), np.float32)}, "mask: all 0"),
        ({"sequence_lengths": at(LENGTHS, (0, 0), 5)}, "sequence_lengths[0]: 5, must be between 1 and 4, the"),
        ({"sequence_lengths": at(LENGTHS, (0, 0), 0)}, "sequence_lengths[0]: 0"),
        ({"sequence_lengths": LENGTHS[:2]}, "sequence_lengths: shape [2, 1], must be [3, 1]"),
    ],
)
def test_padded_payloads_are_refused_by_field_and_value(changes: dict, message: str):
    with refused(message):
        train_payload(padded(**changes), LIMITS)


HUGE = 2**63 - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_lengths": np.array([4, 2])}, "sequence_lengths: sum 6, but tokens has 9 tokens"),
        ({"sequence_lengths": np.array([4, 0, 5])}, "sequence_lengths[1]: 0"),
        ({"sequence_lengths": np.array([HUGE, HUGE, 11])}, f"sequence_lengths[0]: {HUGE}"),  # sums to 9 in 64 bits
        ({"sequence_lengths": LENGTHS.T}, "sequence_lengths: shape [1, 3], must be [3, 1]"),
        ({"sequence_lengths": LENGTHS.astype(np.float32)}, "sequence_lengths: dtype float32"),
        ({"mask": np.ones((1, 8), np.float32)}, "mask: shape [1, 8], must be [1, 6]"),
        ({"tokens": at(packed()["tokens"], (0, 8), 10)}, "tokens[0, 8]: 10 is outside"),
        ({"returns": at(packed()["returns"], (0, 5), np.nan)}, "returns[0, 5]: nan"),
    ],
)
def test_packed_payloads_are_refused_by_field_and_value(changes: dict, message: str):
    with refused(message):
        train_payload(packed(**changes), LIMITS)


def test_a_training_row_longer_than_the_positions_is_refused():
    with refused("tokens[0]: 4 tokens, the model has 3 positions"):
        train_payload(padded(), Limits(10, 3))


@given(st.data())
def test_padding_never_changes_a_payload(data: st.DataObject):
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=5).filter(lambda s: max(s) > 1))
    extra = data.draw(st.integers(0, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    rows, width = len(sizes), max(sizes) + extra
    lengths = np.array(sizes)[:, None]
    inside = np.arange(width)[None] < lengths
    tokens = np.where(inside, rng.integers(0, 10, (rows, width)), -1).astype(np.int32)
    targets = [rng.normal(size=(rows, width - 1)).astype(np.float32) for _ in range(2)]
    mask = (np.arange(width - 1)[None] < lengths - 1).astype(np.float32)
    wide = {"tokens": tokens, "sequence_lengths": lengths, "mask": mask}
    wide |= {"returns": targets[0], "prev_values": targets[1]}
    tight = {"tokens": tokens[inside][None].astype(np.int64), "sequence_lengths": lengths}
    tight |= {name: wide[name][mask > 0][None] for name in ("returns", "prev_values", "mask")}
    one, other = train_payload(wide, LIMITS), train_payload(tight, LIMITS)
    assert one.digest() == other.digest()


# ---- identity, sentences, metadata ----


def text(value: bytes) -> np.ndarray:
    return np.array([value], dtype=np.object_)


def test_identity_is_optional():
    assert contract.step_identity(None, None) == (None, None)
    assert contract.step_identity(text(b"run-1"), np.array([3])) == ("run-1", 3)
    assert contract.step_identity(np.empty(0, np.object_), np.array([3], np.int32)) == (None, 3)


@pytest.mark.parametrize(
    ("run_id", "step", "message"),
    [
        (text(b"../../etc"), None, "run_id: '../../etc'"),
        (text(b""), None, "run_id: ''"),
        (text(b"a" * 65), None, "run_id: 'aaa"),
        (text(b"a\n"), None, "run_id: 'a\\n'"),
        (text(b"\xff"), None, "run_id: not UTF-8"),
        (np.array([b"a", b"b"], dtype=np.object_), None, "run_id: shape [2], must be [1]"),
        (None, np.array([0]), "step: 0, must be at least 1"),
        (None, np.array([-7]), "step: -7"),
        (None, np.array([1.0]), "step: dtype float64"),
        (None, np.array([1, 2]), "step: shape [2], must be [1]"),
    ],
)
def test_identities_are_refused_by_field_and_value(run_id, step, message: str):
    with refused(message):
        contract.step_identity(run_id, step)


def test_sentences():
    assert contract.sentence_texts(np.array([["é".encode()], [b""]], dtype=np.object_)) == ["é", ""]
    for bad, message in (
        (np.array([b"a"], dtype=np.object_), "sentences: shape [1], must be [B, 1]"),
        (np.empty((0, 1), np.object_), "sentences: shape [0, 1]"),
        (np.array([[b"a", b"b"]], dtype=np.object_), "sentences: shape [1, 2]"),
        (np.array([[b"ok"], [b"\xff"]], dtype=np.object_), "sentences[1]: not UTF-8"),
    ):
        with refused(message):
            contract.sentence_texts(bad)


def test_one_request_is_bounded():
    limits = Limits(vocab_size=9, max_sentence_bytes=4, max_request_bytes=6, max_request_tokens=8)
    texts = np.array([[b"abc"], ["é".encode()]], dtype=np.object_)
    assert text_bytes(texts, None, limits) == 5
    with refused("sentences: 7 bytes with the metadata, more than 6 (max_request_bytes): send fewer rows"):
        text_bytes(texts, np.array([[b"{}"], [b""]], dtype=np.object_), limits)
    with refused("metadata[1]: 5 bytes, must be at most 4 (max_sentence_bytes)"):
        text_bytes(texts, np.array([[b"{}"], [b"{   }"]], dtype=np.object_), limits)
    assert contract.scoring_rows(np.zeros((2, 4), np.int64), None, limits=limits).width == 4
    with refused("tokens: 3 rows of 3 tokens, padding included, exceed 8 (max_request_tokens)"):
        contract.scoring_rows(np.zeros((3, 3), np.int64), None, limits=limits)


def test_metadata_that_is_nested_too_deeply_is_refused():
    with refused('metadata[0]: \'{"a": [[['):
        metadata_rows(np.array([[b'{"a": ' + b"[" * 100_000]], dtype=np.object_), 1)
    for opening, closing in ((b"[", b"]"), (b'{"b": ', b"}")):
        rows = [[b'{"a": ' + opening * n + b"1" + closing * n + b"}"] for n in (99, 100)]
        assert metadata_rows(np.array(rows[:1], dtype=np.object_), 1)
        with pytest.raises(ContractError, match=r"metadata\[1\]: .*, must be nested at most 100 deep"):
            metadata_rows(np.array(rows, dtype=np.object_), 2)


def test_a_batch_of_no_rows_is_one_empty_row():
    """As the reshape in config.pbtxt delivers it; and ordinary rows come with a dimension more."""
    with refused("sequence_lengths[0]: 0, an empty sequence cannot be scored"):
        contract.scoring_rows(np.zeros((1, 0), np.int64), None, limits=Limits(9))
    rows = contract.scoring_rows(np.arange(6).reshape(2, 1, 3), None, limits=Limits(9)).rows
    assert [row.tokens.tolist() for row in rows] == [[0, 1, 2], [3, 4, 5]]


def test_metadata():
    rows = np.array([[b'{"a": 1}'], [b"{}"]], dtype=np.object_)
    assert metadata_rows(rows, 2) == [{"a": 1}, {}]
    assert metadata_rows(None, 2) == [{}, {}]
    for bad, message in (
        (rows, "metadata: shape [2, 1], must be [3, 1]"),
        (np.array([[b"{}"], [b"{"], [b"{}"]], dtype=np.object_), "metadata[1]: '{' is not JSON"),
        (np.array([[b"{}"], [b"{}"], [b"[1]"]], dtype=np.object_), "metadata[2]: '[1]', must be a JSON object"),
        (np.array([[b"1" * 5000], [b"{}"], [b"{}"]], dtype=np.object_), "metadata[0]: '111"),
    ):
        with refused(message):
            metadata_rows(bad, 3)


def test_counts_are_sorted_and_each_is_there_once():
    assert contract.optional_counts("keep_steps", None) is None
    assert contract.optional_counts("keep_steps", np.array([4, 2, 4])) == [2, 4]
    assert contract.optional_counts("keep_steps", np.array([], np.int64)) == []


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([3, -2]), "keep_steps[1]: -2, must be at least 0"),
        (np.array([[3]]), "keep_steps: shape [1, 1], must be [K]"),
        (np.array([3.0]), "keep_steps: dtype float64, must be int64 or int32"),
    ],
)
def test_counts_that_are_none_are_refused(array: np.ndarray, message: str):
    with pytest.raises(ContractError, match=re.escape(message)):
        contract.optional_counts("keep_steps", array)
