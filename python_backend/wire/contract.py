"""The wire contract: model names, tensors, dtypes and shapes, and the validation of every request.

Imports only numpy, because every process imports it. Training payloads are in `training_payload`.

Shapes: `B` rows of a request, `S` its padded length, `N` rows of a training payload, `T` tokens of a packed payload.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from python_backend.errors import RlhfError

MAX_NESTING = 100  # of metadata; Python's JSON writer and templates recurse, and fail at about 1000 levels

REWARD_MODEL = "reward_model"
CRITIC = "critic"
CRITIC_INFER = "critic_infer"
CRITIC_TRAIN = "critic_train"
CRITIC_SAVE = "critic_save"
REFERENCE = "reference"  # served only if `actor.kl.reference` is `triton`
# Served only if the YAML has `rewards`: reward_model is then an ensemble of these models.
REWARD_CHECKPOINT = "reward_checkpoint"
REWARD_MIXTURE = "reward_mixture"
REWARD_FUNCTION_PREFIX = "reward_function_"

TOKENS = "tokens"  # INT64 or INT32 [B, S]; packed training: [1, T]
SEQUENCE_LENGTHS = "sequence_lengths"  # INT64 [B, 1]
# BYTES [B, 1], UTF-8; takes precedence over tokens. The reward model's tokenizer adds its special tokens unless
# `reward.add_special_tokens` is false. The critic's adds none: its values must belong to the policy's tokens.
SENTENCES = "sentences"
# BYTES [B, 1], optional, with `sentences`: the second text of each row, empty for none. Needs `reward.text: pair`.
TEXT_PAIRS = "text_pairs"
METADATA = "metadata"  # BYTES [B, 1], a JSON object per row
MESSAGES = "messages"  # key in `metadata`: the chat that the sentence replies to
PROMPT_LENGTHS = "prompt_lengths"  # INT64 [B, 1], optional: number of leading prompt tokens in each row
STORE = "store"  # parameter: weights store that the versions come from; a reward model may have none
REWARDS = "rewards"  # FP32 [B, 1]; [B, A] if the attributes are not merged
# FP32 [B, A]: the checkpoint's labels in the order of their ids, from scores before merging and standardisation.
PROBABILITIES = "probabilities"
LABELS = "labels"  # parameter, JSON list: the A names
# INT64 [B, 1], microseconds: from the arrival of the request in the model's process to the start of the row's forward
# pass, tokenisation included, and duration of that forward pass. Triton's own queue is not included.
QUEUE_US = "queue_us"
COMPUTE_US = "compute_us"
# Declared and never sent. A request that names no outputs gets all of them from Triton, so it is known by this one; it
# receives none of the optional ones.
UNNAMED = "no_outputs_named"
OPTIONAL_OUTPUTS = frozenset({PROBABILITIES, QUEUE_US, COMPUTE_US, UNNAMED})
# Only of a process reward (`reward.process`), whose `rewards` aggregate each row's steps:
TOKEN_REWARDS = "token_rewards"  # FP32 [B, S]: index t is the reward given at token t of the scored row, 0 where none
STEP_REWARDS = "step_rewards"  # FP32 [B, K], K: most steps of a row; 0 behind a row's last step
STEP_ENDS = "step_ends"  # INT64 [B, K]: token that ends step k; of a sentence, characters up to its end; -1 behind
# `step_ends` is also the key in `metadata` of a row whose steps the request gives.
PROCESS = "process"  # parameter: granularity of a process reward, `step` or `token`
# In the error message of a reward that a row of tokens alone cannot be sent to; health probes recognise it.
NEEDS_MORE = "needs more than a row of tokens"
TEXTS_ONLY = "texts_only"  # parameter: `true` if the reward scores only sentences
AFTER_CRITIC = "after_critic"  # INT64 [B, 1]; makes Triton run reward_model after critic in critic_infer
AFTER_COMPONENT = "after_component"  # FP32 [B, 1]; makes Triton run the models of a reward mixture in order
REWARD_COMPONENTS = "reward_components"  # FP32 [B, C], NaN where scoring failed; also the parameter with the C names
REWARD_ERRORS = "reward_errors"  # BYTES [B, 1], UTF-8, empty where every component has a score
REWARD_WEIGHTS = "reward_weights"  # parameter: the components' weights
GROUPWISE = "groupwise"  # parameter: "true" if a reward function needs all responses to a prompt in one request
VALUES = "values"  # FP32 [B, S]
RESPONSE_VALUES = "response_values"  # FP32 [B, R], R: longest response; index t is the value before response token t
# FP32 [B, S]: index t is the log-prob of token t+1, -inf for a banned token; 0 from each row's last token on.
LOGPROBS = "logprobs"
TEMPERATURE = "temperature"  # parameter: sampling temperature of the log-probs
BANNED_TOKEN_IDS = "banned_token_ids"  # parameter, JSON list: ids that are never sampled
CHECKPOINT_FINGERPRINT = "checkpoint_fingerprint"  # parameter: fingerprint of the reference weights
REWARD_VERSION = "reward_version"  # INT64 [B, 1]: weights version that scored the row; only with `reward.store`
WEIGHTS_VERSION = "weights_version"  # INT64 [B, 1]; [1] for critic_train and critic_save

RETURNS = "returns"  # FP32 [N, S-1]; packed: [1, T-N]
PREV_VALUES = "prev_values"  # same as returns
MASK = "mask"  # same as returns
RUN_ID = "run_id"  # BYTES [1], optional
STEP = "step"  # INT64 [1], optional; in critic_save: the step to checkpoint
LOSS_MEAN = "loss_mean"  # FP32 [1]

UNTIL_LOADED = "refuses requests until it is loaded again"  # in the error of a model that lost a rank or its device

DUMMY_VAR = "dummy_var"  # INT64 [1], in critic_save: placeholder input, any value >= 0
KEEP_STEPS = "keep_steps"  # INT64 [K], optional, in critic_save: which checkpoints up to `step` to keep
REWIND_TO = "rewind_to"  # INT64 [1], optional, in critic_save: roll the critic back to this step
STATUS = "status"  # INT64 [1], 0: success

# Tensors between the models of a reward mixture.
REWARD_COMPONENT = "reward_component"  # FP32 [B, 1], of one function; NaN where scoring failed
REWARD_ERROR = "reward_error"  # BYTES [B, 1], of one function

TRAINING_KEY_HEADER = "x-triton-training-key"
SENDER_HEADER = "x-triton-sender"
"""Identifies the client as `<session>/<n>`; n is the number of rewinds it has requested (see store/ownership.py)."""
PROBE_HEADER = "x-triton-probe"
"""Marks a health check: reward functions answer that they do not apply, because one may be slow or cost money."""
ORIGIN_HEADER = "origin"  # browsers add it to each POST of a web page; critic_train and critic_save refuse it
TRACEPARENT_HEADER = "traceparent"  # W3C trace context; also the name in the metadata of a journal entry
RUN_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ContractError(RlhfError, ValueError):
    """A request violates the contract; the message names the field and the value."""


STEP_AHEAD = "but the last step of run"  # the actor recognises the error of a step that the journal does not know yet


class StepConflict(ContractError):
    """A training step or rewind that conflicts with the journal; the message names the last step and what to do."""


@dataclass(frozen=True)
class RowSteps:
    """The K steps of one row that a process reward scores; each array is int64 `[K]`, ascending."""

    read_at: np.ndarray  # index in the row as it is scored, which may have marks that the request has not
    token_places: np.ndarray  # index of the step's reward in `token_rewards`
    ends: np.ndarray  # the step's end as `step_ends` returns it


@dataclass(frozen=True)
class ScoringRows:
    """Rows to score.

    `tokens[i]` is int64 `[length_i]`, unpadded. `width` is S, the padded length of the rows in the reply.
    `prompt_lengths` is int64 `[B]` with values in [1, length_i], or None. `steps[i]` are the steps of row i for a
    process reward, otherwise empty.
    """

    tokens: list[np.ndarray]
    width: int
    prompt_lengths: np.ndarray | None = None
    steps: tuple[RowSteps, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Request limits of a model: token ids in `[0, vocab_size)`, rows of 1 to `max_length` tokens, bounded sizes.

    `max_sentence_bytes` bounds each sentence and each metadata object, `max_request_bytes` all of them in one request,
    `max_request_tokens` the B * S tokens of a request and of its reply. These bounds keep one request from occupying
    the server or exhausting its memory.
    """

    vocab_size: int
    max_length: int | None = None
    max_sentence_bytes: int = 1_000_000
    max_request_tokens: int = 4_000_000
    max_request_bytes: int = 4_000_000


def scoring_rows(
    tokens: np.ndarray | None,
    lengths: np.ndarray | None,
    prompt_lengths: np.ndarray | None = None,
    *,
    limits: Limits,
) -> ScoringRows:
    """Validate one scoring request and return its rows without padding.

    Args:
        tokens: INT64 or INT32 `[B, S]`.
        lengths: INT64 `[B, 1]` (or `[B]`); None: every row has S tokens.
        prompt_lengths: INT64 `[B, 1]` (or `[B]`), or None.
        limits: limits of the served model.

    Raises:
        ContractError: wrong dtype or shape, an empty or too long row, a token outside the vocabulary.
    """
    if tokens is None:
        raise ContractError(f"{TOKENS}: missing; send {TOKENS} or {SENTENCES}")
    expect_integers(TOKENS, tokens)
    if tokens.ndim == 3 and tokens.shape[1] == 1:  # [B, 1, S]: Triton reshaped it, see scoring.pbtxt.j2
        tokens = tokens[:, 0]
    if tokens.ndim != 2:
        raise ContractError(f"{TOKENS}: shape {list(tokens.shape)}, must be [B, S]")
    rows, width = tokens.shape
    if rows == 0:  # without a row to complete, the reply would never be sent
        raise ContractError(f"{TOKENS}: shape {list(tokens.shape)}, must have at least one row")
    check_size(TOKENS, rows, width, limits)
    sizes = np.full(rows, width, np.int64) if lengths is None else row_lengths(SEQUENCE_LENGTHS, lengths, rows, width)
    prompts = None if prompt_lengths is None else row_lengths(PROMPT_LENGTHS, prompt_lengths, rows, sizes)
    cut = [np.ascontiguousarray(tokens[i, : sizes[i]], dtype=np.int64) for i in range(rows)]
    for i, row in enumerate(cut):
        check_row(row, i, limits)
    return ScoringRows(cut, width, prompts)


def check_size(name: str, rows: int, width: int, limits: Limits) -> None:
    """Raise ContractError if `rows` * `width` tokens exceed the limit of one request."""
    if rows * width > limits.max_request_tokens:
        raise ContractError(
            f"{name}: {rows} rows of {width} tokens, padding included, exceed {limits.max_request_tokens} "
            "(max_request_tokens): send fewer rows per request"
        )


def check_row(row: np.ndarray, index: int, limits: Limits) -> None:
    """Raise ContractError if token row `row` `[length]` is empty, too long or holds ids outside the vocabulary."""
    if row.size == 0:
        raise ContractError(f"{SEQUENCE_LENGTHS}[{index}]: 0, an empty sequence cannot be scored")
    if limits.max_length is not None and row.size > limits.max_length:
        raise ContractError(f"{TOKENS}[{index}]: {row.size} tokens, the model has {limits.max_length} positions")
    bad = np.flatnonzero((row < 0) | (row >= limits.vocab_size))
    if bad.size:
        position = int(bad[0])
        raise ContractError(
            f"{TOKENS}[{index}, {position}]: {int(row[position])} is outside the vocabulary [0, {limits.vocab_size})"
        )


def step_identity(run_id: np.ndarray | None, step: np.ndarray | None) -> tuple[str | None, int | None]:
    """Return `(run_id, step)` of a training request, None where absent. Raises ContractError if invalid."""
    return optional_text(RUN_ID, run_id), optional_count(STEP, step, minimum=1)


def optional_text(name: str, array: np.ndarray | None) -> str | None:
    """Return the run id in a BYTES `[1]` tensor, or None if it is absent. Raises ContractError if it is invalid."""
    if array is None or array.size == 0:
        return None
    _expect_one(name, array)
    text = _decode(name, array.reshape(-1)[0])
    if not RUN_ID_PATTERN.fullmatch(text):
        raise ContractError(
            f"{name}: {text[:80]!r}, use 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit"
        )
    return text


def optional_count(name: str, array: np.ndarray | None, *, minimum: int) -> int | None:
    """Return the number in an integer `[1]` tensor; None if absent. Raises ContractError if it is below `minimum`."""
    if array is None or array.size == 0:
        return None
    expect_integers(name, array)
    _expect_one(name, array)
    value = int(array.reshape(-1)[0])
    if value < minimum:
        raise ContractError(f"{name}: {value}, must be at least {minimum}")
    return value


def optional_counts(name: str, array: np.ndarray | None) -> list[int] | None:
    """Return the sorted distinct numbers of an integer `[K]` tensor; None if absent. Raises ContractError below 0."""
    if array is None:
        return None
    expect_integers(name, array)
    if array.ndim != 1:
        raise ContractError(f"{name}: shape {list(array.shape)}, must be [K]")
    bad = np.flatnonzero(array < 0)
    if bad.size:
        raise ContractError(f"{name}[{int(bad[0])}]: {int(array[bad[0]])}, must be at least 0")
    return sorted({int(value) for value in array})


def text_bytes(
    sentences: np.ndarray, metadata: np.ndarray | None, limits: Limits, pairs: np.ndarray | None = None
) -> int:
    """Return the number of bytes of a request's texts and metadata. Raises ContractError if they exceed a limit."""
    total = 0
    for name, array in ((SENTENCES, sentences), (TEXT_PAIRS, pairs), (METADATA, metadata)):
        for i, item in enumerate(() if array is None else array.flat):
            total += len(item)
            if len(item) > limits.max_sentence_bytes:
                raise ContractError(
                    f"{name}[{i}]: {len(item)} bytes, must be at most {limits.max_sentence_bytes} (max_sentence_bytes)"
                )
    if total > limits.max_request_bytes:
        raise ContractError(
            f"{SENTENCES}: {total} bytes with the metadata, more than {limits.max_request_bytes} "
            "(max_request_bytes): send fewer rows per request"
        )
    return total


def sentence_texts(sentences: np.ndarray, name: str = SENTENCES) -> list[str]:
    """Decode a BYTES `[B, 1]` tensor. Raises ContractError for another shape or text that is not UTF-8."""
    if sentences.ndim != 2 or sentences.shape[1] != 1 or sentences.shape[0] == 0:
        raise ContractError(f"{name}: shape {list(sentences.shape)}, must be [B, 1]")
    return [_decode(f"{name}[{i}]", item) for i, item in enumerate(sentences[:, 0])]


def pair_texts(pairs: np.ndarray | None, rows: int) -> list[str]:
    """Return the second text of each of `rows` sentences, empty for none. Raises ContractError if invalid."""
    if pairs is None:
        return [""] * rows
    if pairs.shape != (rows, 1):
        raise ContractError(f"{TEXT_PAIRS}: shape {list(pairs.shape)}, must be [{rows}, 1]")
    return sentence_texts(pairs, TEXT_PAIRS)


def metadata_rows(metadata: np.ndarray | None, rows: int) -> list[dict[str, Any]]:
    """Return the JSON object of each row, `{}` if no metadata was sent. Raises ContractError for anything else."""
    if metadata is None:
        return [{} for _ in range(rows)]
    if metadata.shape != (rows, 1):
        raise ContractError(f"{METADATA}: shape {list(metadata.shape)}, must be [{rows}, 1]")
    return [_metadata_object(i, item) for i, item in enumerate(metadata[:, 0])]


def _metadata_object(index: int, item: Any) -> dict[str, Any]:
    text = _decode(f"{METADATA}[{index}]", item)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise ContractError(f"{METADATA}[{index}]: {text[:80]!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ContractError(f"{METADATA}[{index}]: {text[:80]!r}, must be a JSON object")
    containers: list[Any] = [value]
    for _ in range(MAX_NESTING):
        containers = [
            inner
            for each in containers
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, (dict, list))
        ]
    if containers:
        raise ContractError(f"{METADATA}[{index}]: {text[:80]!r}, must be nested at most {MAX_NESTING} deep")
    return value


def texts_array(texts: list[str]) -> np.ndarray:
    """Encode B texts as BYTES `[B, 1]`; lone surrogates, which UTF-8 cannot encode, become '?'."""
    return np.asarray([[text.encode("utf-8", "replace")] for text in texts], dtype=np.object_)


def _decode(name: str, item: Any) -> str:
    try:
        return item.decode("utf-8") if isinstance(item, bytes) else str(item)
    except UnicodeDecodeError as error:
        raise ContractError(f"{name}: not UTF-8: {error}") from error


def expect_integers(name: str, array: np.ndarray) -> None:
    """Raise ContractError unless `array` is int64 or int32."""
    if array.dtype not in (np.int64, np.int32):
        raise ContractError(f"{name}: dtype {array.dtype}, must be int64 or int32")


def _expect_one(name: str, array: np.ndarray) -> None:
    if array.size != 1:
        raise ContractError(f"{name}: shape {list(array.shape)}, must be [1]")


def expect_vocabulary(tokens: np.ndarray, sizes: np.ndarray, limits: Limits) -> None:
    """Raise ContractError if one of the first `sizes[i]` tokens of row i is outside the vocabulary.

    Later tokens are padding and may have any value.
    """
    # Fast path, usually taken. Viewed as unsigned, a negative id is a large number and exceeds the limit too.
    if int(tokens.view(f"u{tokens.itemsize}").max()) < limits.vocab_size:
        return
    inside = np.arange(tokens.shape[1])[None] < sizes[:, None]
    bad = np.flatnonzero(((tokens < 0) | (tokens >= limits.vocab_size)) & inside)
    if bad.size:
        row, column = (int(i) for i in np.unravel_index(int(bad[0]), tokens.shape))
        raise ContractError(
            f"{TOKENS}[{row}, {column}]: {int(tokens[row, column])} is outside the vocabulary [0, {limits.vocab_size})"
        )


def row_lengths(name: str, lengths: np.ndarray, rows: int, most: int | np.ndarray) -> np.ndarray:
    """Return lengths as int64 `[rows]`. Raises ContractError unless each is in [1, `most`] (scalar or per row)."""
    expect_integers(name, lengths)
    if lengths.shape not in ((rows, 1), (rows,)):
        raise ContractError(f"{name}: shape {list(lengths.shape)}, must be [{rows}, 1]")
    sizes = lengths.reshape(-1).astype(np.int64)
    bad = np.flatnonzero((sizes < 1) | (sizes > most))
    if bad.size:
        row = int(bad[0])
        limit = int(np.broadcast_to(most, rows)[row])
        raise ContractError(
            f"{name}[{row}]: {int(sizes[row])}, must be between 1 and {limit}, the number of tokens sent"
        )
    return sizes
