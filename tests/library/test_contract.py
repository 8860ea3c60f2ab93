"""`rlhf_triton.wire.contract`: requests are cut to their rows, and invalid ones are refused by field and value."""

import functools
import re

import numpy as np
import pytest

from rlhf_triton.wire import contract
from rlhf_triton.wire.contract import ContractError, Limits, scoring_rows
from rlhf_triton.wire.texts import metadata_rows, text_bytes
from rlhf_triton.wire.training_payload import sent_payload, train_payload

LIMITS = Limits(vocab_size=10, max_length=6)
TOKENS = np.array([[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 9, 0]])
LENGTHS = np.array([[4], [2], [3]])


def padded(**changes):
    """Return a training payload of the rows above; `[N, S-1]` targets are 10 * row + position."""
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


def packed(**changes):
    """Return the same payload without padding."""
    arrays = {
        "tokens": np.array([[1, 2, 3, 4, 5, 6, 7, 8, 9]]),
        "sequence_lengths": LENGTHS,
        "returns": np.array([[0, 1, 2, 10, 20, 21]], np.float32),
        "prev_values": -np.array([[0, 1, 2, 10, 20, 21]], np.float32),
        "mask": np.array([[0, 1, 1, 1, 0, 1]], np.float32),
    }
    return {**arrays, **changes}


def at(array, index, value):
    changed = array.copy()
    changed[index] = value
    return changed


def refused(text):
    return pytest.raises(ContractError, match=re.escape(text))


# ---- scoring ----


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:, 0], LENGTHS.astype(np.int32)])
def test_scoring_rows_are_cut_to_their_lengths(dtype, lengths):
    padding = np.pad(TOKENS, ((0, 0), (0, 50)), constant_values=-100)  # may hold anything and be any length
    rows = scoring_rows(padding.astype(dtype), lengths, limits=LIMITS)
    assert rows.width == 54
    assert [row.tokens.tolist() for row in rows.rows] == [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    assert {row.tokens.dtype for row in rows.rows} == {np.dtype(np.int64)}


@pytest.mark.parametrize("shape", [(2, 2500), (2, 1, 2500)])  # as the reshape in config.pbtxt delivers ordinary rows
def test_scoring_rows_without_lengths_keep_all_tokens(shape):
    rows = scoring_rows(np.ones(shape, np.int64), None, limits=Limits(10))
    assert (rows.width, [row.tokens.size for row in rows.rows]) == (2500, [2500, 2500])


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        (None, None, "tokens: missing"),
        (TOKENS.astype(np.float32), LENGTHS, "tokens: dtype float32, must be int64 or int32"),
        (TOKENS[0], LENGTHS, "tokens: shape [4], must be [B, S]"),
        (TOKENS[:0], LENGTHS[:0], "tokens: shape [0, 4], must have at least one row"),
        (TOKENS[:, :0], None, "sequence_lengths[0]: 0, must be at least 1"),
        (at(TOKENS, (2, 1), 10), LENGTHS, "tokens[2, 1]: 10 is outside the vocabulary [0, 10)"),
        (np.ones((1, 7), np.int64), None, "tokens[0]: 7 tokens, but the model has 6 positions"),
        (TOKENS, at(LENGTHS, (1, 0), 0), "sequence_lengths[1]: 0, must be between 1 and 4, the number of tokens sent"),
        (TOKENS, LENGTHS.T, "sequence_lengths: shape [1, 3], must be [3, 1]"),
    ],
)
def test_scoring_requests_are_refused_by_field_and_value(tokens, lengths, message):
    with refused(message):
        scoring_rows(tokens, lengths, limits=LIMITS)


# ---- training ----


def test_padded_and_packed_arrays_give_the_same_payload():
    one = train_payload(padded(), LIMITS)
    other = train_payload(packed(), LIMITS)
    assert one.digest() == other.digest()
    assert {name: array.dtype for name, array in one.arrays().items()} == {
        name: array.dtype for name, array in other.arrays().items()
    }
    assert [array.tolist() for array in (one.tokens, one.returns, one.mask)] == [
        [1, 2, 3, 4, 5, 6, 7, 8, 9],
        [0, 1, 2, 10, 20, 21],
        [0, 1, 1, 1, 0, 1],
    ]


@pytest.mark.parametrize("name", ["tokens", "returns", "prev_values", "mask"])
def test_payload_digest_changes_with_every_field(name):
    changed = padded(**{name: at(padded()[name], (0, 1), 7)})
    assert train_payload(changed, LIMITS).digest() != train_payload(padded(), LIMITS).digest()


def test_payload_digest_changes_with_row_boundaries():
    ones = np.ones((1, 3), np.float32)
    arrays = packed(tokens=np.array([[1, 2, 3, 4, 5]]), returns=ones, prev_values=ones, mask=ones)
    digests = [
        train_payload({**arrays, "sequence_lengths": np.array(lengths)}, LIMITS).digest()
        for lengths in ([2, 3], [3, 2])
    ]
    assert digests[0] != digests[1]


def test_training_rows_without_lengths_end_after_the_last_masked_position():
    payload = train_payload(padded(sequence_lengths=None), LIMITS)
    assert payload.lengths.tolist() == [4, 2, 3]
    nothing = padded(sequence_lengths=None, mask=at(at(padded()["mask"], (1, 0), 0), (2, 1), 0))
    assert train_payload(nothing, LIMITS).lengths.tolist() == [4, 2, 2]  # a row without a mask keeps one position


def test_payload_without_padding_is_not_copied():
    arrays = {name: array[:1] for name, array in padded().items()}  # packed and padded at once
    payload = sent_payload(arrays, LIMITS).packed()
    assert payload.lengths.tolist() == [4]
    assert np.shares_memory(payload.tokens, TOKENS)


HUGE = 2**63 - 1
PADDED = [
    ({"tokens": None}, "tokens: missing"),
    ({"returns": None}, "returns: missing"),
    ({"tokens": TOKENS.astype(np.float64)}, "tokens: dtype float64"),
    ({"tokens": TOKENS[:, :1]}, "tokens: shape [3, 1], rows to train on must have at least 2 tokens"),
    ({"tokens": at(TOKENS, (0, 3), 10)}, "tokens[0, 3]: 10 is outside the vocabulary [0, 10)"),
    ({"returns": padded()["returns"].astype(np.float64)}, "returns: dtype float64, must be float32"),
    ({"returns": at(padded()["returns"], (2, 0), np.nan)}, "returns[2, 0]: nan, must be finite"),
    ({"prev_values": at(padded()["returns"], (1, 2), -np.inf)}, "prev_values[1, 2]: -inf, must be finite"),
    ({"mask": np.ones((3, 4), np.float32)}, "mask: shape [3, 4], must be [3, 3]"),
    ({"mask": at(padded()["mask"], (0, 2), -1)}, "mask[0, 2]: -1, must not be negative"),
    (
        {"mask": at(padded()["mask"], (1, 1), 1)},
        "mask[1, 1]: 1, must be 0, because a sequence of 2 tokens has one entry fewer",
    ),
    ({"sequence_lengths": at(LENGTHS, (0, 0), 5)}, "sequence_lengths[0]: 5, must be between 1 and 4, the"),
]
PACKED = [
    ({"sequence_lengths": np.array([4, 2])}, "sequence_lengths: sum 6, must be 9"),
    ({"sequence_lengths": np.array([4, 0, 5])}, "sequence_lengths[1]: 0"),
    ({"sequence_lengths": np.array([HUGE, HUGE, 11])}, f"sequence_lengths[0]: {HUGE}"),  # sums to 9 in 64 bits
    ({"mask": np.ones((1, 8), np.float32)}, "mask: shape [1, 8], must be [1, 6]"),
]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        *((padded(**changes), message) for changes, message in PADDED),
        *((packed(**changes), message) for changes, message in PACKED),
    ],
)
def test_training_requests_are_refused_by_field_and_value(arrays, message):
    with refused(message):
        train_payload(arrays, LIMITS)


# ---- identity, sentences, metadata ----


def texts(*rows):
    """Return a column of rows, as sentences and metadata are sent."""
    return np.array([[row] for row in rows], dtype=np.object_)


def step_identity(run_id, step):
    """Read the step's identity as critic_train does."""
    return contract.optional_run_id("run_id", run_id), contract.optional_count("step", step, minimum=1)


def test_optional_inputs_are_parsed_and_have_defaults():
    assert step_identity(None, None) == (None, None)
    assert step_identity(texts(b"run-1")[0], np.array([3])) == ("run-1", 3)
    assert step_identity(np.empty(0, np.object_), np.array([3], np.int32)) == (None, 3)
    assert contract.optional_counts("keep_steps", None) is None
    assert contract.optional_counts("keep_steps", np.array([4, 2, 4])) == [2, 4]
    assert contract.optional_counts("keep_steps", np.array([], np.int64)) == []
    assert contract.sentence_texts(texts("é".encode(), b"")) == ["é", ""]
    assert metadata_rows(texts(b'{"a": 1}', b"{}"), 2) == [{"a": 1}, {}]
    assert metadata_rows(None, 2) == [{}, {}]


@pytest.mark.parametrize(
    ("parameters", "included", "text"),
    [({"min_version": 4}, {4, 5, 6}, "4 or newer"), ({"exact_version": 4}, {4}, "4"), ({"exact_version": 0}, {0}, "0")],
)
def test_version_range_round_trips_through_request_parameters(parameters, included, text):
    demanded = contract.VersionRange.of(parameters.get("min_version"), parameters.get("exact_version"))
    assert {version for version in range(7) if demanded.includes(version)} == included
    assert (demanded.parameters, str(demanded)) == (parameters, text)
    assert contract.VersionRange.of(None, None) is None


def nested(opening, closing, depth):
    return b'{"a": ' + opening * depth + b"1" + closing * depth + b"}"


DEEP = [(b"[", b"]"), (b'{"b": ', b"}")]
SMALL = Limits(vocab_size=9, max_request_tokens=8)


def test_request_limits_are_inclusive():
    assert all(metadata_rows(texts(nested(*brackets, 99)), 1) for brackets in DEEP)
    assert text_bytes(texts(b"abc", "é".encode()), None, SMALL) == 5
    assert scoring_rows(np.zeros((2, 4), np.int64), None, limits=SMALL).width == 4


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        *(
            (step_identity, arguments, message)
            for arguments, message in (
                ((texts(b"../../etc")[0], None), "run_id: '../../etc'"),
                ((texts(b"a\n")[0], None), "run_id: 'a\\n'"),
                ((texts(b"\xff")[0], None), "run_id: not UTF-8"),
                ((None, np.array([0])), "step: 0, must be at least 1"),
                ((None, np.array([1, 2])), "step: shape [2], must be [1]"),
            )
        ),
        *(
            (contract.optional_counts, ("keep_steps", array), message)
            for array, message in (
                (np.array([3, -2]), "keep_steps[1]: -2, must be at least 0"),
                (np.array([[3]]), "keep_steps: shape [1, 1], must be [K]"),
            )
        ),
        *(
            (contract.sentence_texts, (array,), message)
            for array, message in (
                (texts(b"a")[0], "sentences: shape [1], must be [B, 1]"),
                (texts(b"ok", b"\xff"), "sentences[1]: not UTF-8"),
            )
        ),
        *(
            (metadata_rows, (array, 3), message)
            for array, message in (
                (texts(b"{}", b"{}"), "metadata: shape [2, 1], must be [3, 1]"),
                (texts(b"{}", b"{", b"{}"), "metadata[1]: '{' is not JSON"),
                (texts(b"{}", b"{}", b"[1]"), "metadata[2]: '[1]', must be a JSON object"),
                *((texts(b"{}", nested(*each, 100), b"{}"), "must be nested at most 100 deep") for each in DEEP),
            )
        ),
        *(
            (contract.VersionRange.of, versions, message)
            for versions, message in (
                ((-1, None), "min_version: -1, must be an integer of at least 0"),
                ((None, "7"), "exact_version: '7', must be an integer of at least 0"),
                ((True, None), "min_version: True, must be"),
                ((1, 2), "min_version: 1, exact_version: 2; send one of them"),
            )
        ),
        (
            text_bytes,
            (texts(b"abcde", "é".encode()), texts(b"{}", b""), SMALL),
            "sentences: 9 bytes including the metadata exceed 8 (max_request_tokens); send fewer or shorter rows",
        ),
        (
            text_bytes,
            (texts(b"abc", b""), texts(b"{}", b"{   }"), SMALL),
            "sentences: 10 bytes including the metadata exceed 8 (max_request_tokens)",
        ),
        (
            functools.partial(scoring_rows, limits=SMALL),
            (np.zeros((3, 3), np.int64), None),
            "tokens: 3 rows of 3 tokens, including padding, exceed 8 tokens (max_request_tokens)",
        ),
    ],
)
def test_invalid_inputs_are_refused_by_field_and_value(call, arguments, message):
    with refused(message):
        call(*arguments)
