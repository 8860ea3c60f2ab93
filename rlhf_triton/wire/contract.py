"""The wire contract: model names, tensors, dtypes and shapes, and the validation of every request.

Imports only numpy, because every process imports it. Training payloads are in `training_payload`.

Shapes: `B` rows of a request, `S` its padded length, `N` rows of a training payload, `T` tokens of a packed payload.
"""

import math
import operator
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rlhf_triton.errors import RlhfError

Arrays: TypeAlias = dict[str, np.ndarray]
"""Tensors by their names on the wire."""
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
STORE_ID = "store_id"  # parameter: `WeightsStore.identity`; numbers name the same versions only if it is equal
LABELS = "labels"  # parameter, JSON list: the A names
LOAD_LABEL = "load_label"  # parameter that a reload sets, because Triton reloads only a changed configuration
PROCESS = "process"  # parameter: granularity of a process reward, `step` or `token`
# In the error message of a reward that cannot score rows of tokens alone; health probes recognise it.
NEEDS_MORE = "needs more than a row of tokens"
TEXTS_ONLY = "texts_only"  # parameter: `true` if the reward scores only sentences
AFTER_COMPONENT = "after_component"  # FP32 [B, 1]; makes Triton run the models of a reward mixture in order
MODEL_TERM = "model"  # among the components: the model of the section `reward`
REWARD_WEIGHTS = "reward_weights"  # parameter: the components' weights
GROUPWISE = "groupwise"  # parameter: "true" if a reward function needs all responses to a prompt in one request
TEMPERATURE = "temperature"  # parameter: sampling temperature of the log-probs
BANNED_TOKEN_IDS = "banned_token_ids"  # parameter, JSON list: ids that are never sampled
CHECKPOINT_FINGERPRINT = (
    "checkpoint_fingerprint"  # parameter of a model without versions: fingerprint of its checkpoint
)
SOURCE_DIGEST = "source_digest"  # parameter of a reward function: SHA-256 of its file
RETURNS = "returns"  # FP32 [N, S-1]; packed: [1, T-N]
PREV_VALUES = "prev_values"  # same as returns
MASK = "mask"  # same as returns
RUN_ID = "run_id"  # BYTES [1], optional
STEP = "step"  # INT64 [1], optional; in critic_save: the step to checkpoint
UNTIL_LOADED = "refuses requests until it is loaded again"  # in the error of a model that lost a rank or its device
# Parameters of a scoring request: the versions of the model's weights that may answer it, see `VersionRange`.
MIN_VERSION = "min_version"
EXACT_VERSION = "exact_version"
DEMANDED = "but the request demands version"  # in the error (503) of a model that serves another version

DUMMY_VAR = "dummy_var"  # INT64 [1], in critic_save: placeholder input, any value >= 0
KEEP_STEPS = "keep_steps"  # INT64 [K], optional, in critic_save: which checkpoints up to `step` to keep
REWIND_TO = "rewind_to"  # INT64 [1], optional, in critic_save: roll the critic back to this step
TRAINING_KEY_HEADER = "x-triton-training-key"
SENDER_HEADER = "x-triton-sender"
"""Identifies the client as `<session>/<n>`; n is the number of rewinds it has requested (see store/ownership.py)."""
PROBE_HEADER = "x-triton-probe"
"""Marks a health check: an error is not counted, and reward functions, which may be slow or cost money, do not run."""
ORIGIN_HEADER = "origin"  # browsers add it to POST requests of web pages; critic_train and critic_save refuse these
TRACEPARENT_HEADER = "traceparent"  # W3C trace context; also the name in the metadata of a journal entry
RUN_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Output:
    """An output of the served models, and of the ensembles that pass it on: a row of the table of outputs."""

    models: str  # kinds of models that declare it
    name: str
    dtype: str
    dims: int | str  # after the batch dimension: 1, -1, or the name of a number from the configuration
    meaning: str
    trait: str | None = None  # declared only by reward models with this trait: STORED, PROCESS or WHOLE
    is_optional: bool = False  # sent only on request, and not passed on by ensembles
    needs_forward: bool = True
    note: str = ""  # comment in config.pbtxt


OUTPUTS: list[Output] = []
# traits of a reward model: it has versions; it scores whole rows, not their steps
STORED = "stored"
WHOLE = "whole"


def _output(models: str, name: str, dtype: str, dims: int | str, meaning: str, **more: Any) -> str:
    OUTPUTS.append(Output(models, name, dtype, dims, meaning, **more))
    return name


# The table of outputs, in the order of config.pbtxt. Models are `reward` (reward_model, reward_checkpoint), `mixture`,
# `function`, and others by their name. A new output is a row here and an entry in the model's reply.
REWARDS = _output("reward mixture", "rewards", "FP32", "num_rewards", "[B, 1]; [B, A] if attributes are not merged")
# The checkpoint's labels in the order of their ids, from scores before merging and standardisation.
PROBABILITIES = _output("reward", "probabilities", "FP32", -1, "[B, A]: of the labels", trait=WHOLE, is_optional=True)
REWARD_VERSION = _output(
    "reward", "reward_version", "INT64", 1, "[B, 1]: weights that scored the row", trait=STORED, needs_forward=False
)
# Outputs of a process reward, whose `rewards` aggregate each row's steps. `step_ends` is also a key in `metadata`, with
# which a request specifies a row's steps.
TOKEN_REWARDS = _output(
    "reward", "token_rewards", "FP32", -1, "[B, S]: index t is given at token t of the row, 0 where none", trait=PROCESS
)
STEP_REWARDS = _output(
    "reward", "step_rewards", "FP32", -1, "[B, K], K: most steps of a row; 0 behind a row's last step", trait=PROCESS
)
STEP_ENDS = _output(
    "reward", "step_ends", "INT64", -1, "[B, K]: last token; of a sentence, characters to its end; or -1", trait=PROCESS
)
# `reward_components` is also the parameter with the C names.
REWARD_COMPONENTS = _output(
    "mixture", "reward_components", "FP32", "num_components", "[B, C], NaN where scoring failed"
)
REWARD_ERRORS = _output(
    "mixture", "reward_errors", "STRING", 1, "[B, 1], UTF-8, empty where all components have a score"
)
REWARD_COMPONENT = _output("function", "reward_component", "FP32", 1, "[B, 1]; NaN where scoring failed")
REWARD_ERROR = _output("function", "reward_error", "STRING", 1, "[B, 1], empty where there is a score")
VALUES = _output("critic", "values", "FP32", -1, "[B, S]: index t is the value of the state after token t")
LOSS_MEAN = _output("critic_train", "loss_mean", "FP32", 1, "[1]")
STATUS = _output("critic_save", "status", "INT64", 1, "[1]: 0, success")
WEIGHTS_VERSION = _output(
    "critic critic_train critic_save", "weights_version", "INT64", 1, "[B, 1], or [1]", needs_forward=False
)
# Makes Triton run reward_model after critic in critic_infer.
AFTER_CRITIC = _output(
    "critic",
    "after_critic",
    "INT64",
    1,
    "[B, 1]",
    needs_forward=False,
    note="makes reward_model the second step of critic_infer",
)
# Index t is the log-prob of token t+1, -inf for a banned token; 0 from each row's last token on.
LOGPROBS = _output("reference", "logprobs", "FP32", -1, "[B, S]: index t is the log-prob of token t+1")
# Declared but never sent. For a request that names no outputs, Triton requests all of them, so this output identifies
# such a request; it receives no optional outputs.
UNNAMED = _output(
    "reward",
    "no_outputs_named",
    "INT64",
    1,
    "never sent",
    is_optional=True,
    needs_forward=False,
    note="never sent; see OPTIONAL_OUTPUTS in contract.py",
)
OPTIONAL_OUTPUTS = frozenset(output.name for output in OUTPUTS if output.is_optional)
FORWARD_OUTPUTS = frozenset(output.name for output in OUTPUTS if output.needs_forward)


def outputs_of(*models: str, traits: Collection[str] = ()) -> list[Output]:
    """Return the outputs that `models` declare; outputs that need a trait only if it is in `traits`."""
    ours = [output for output in OUTPUTS if not set(models).isdisjoint(output.models.split())]
    return [output for output in ours if output.trait is None or output.trait in traits]


class ContractError(RlhfError, ValueError):
    """A request violates the contract; the message names the field and the value."""

    @property
    def message_without_row(self) -> str:
        """The message without the row's index, for a caller with a single row."""
        return str(self).removeprefix(f"{METADATA}[0]").removeprefix(f"{SENTENCES}[0]").lstrip(".: ")


def whole_number(name: str, value: Any) -> int:
    """Return an integer, also one of NumPy or torch. Raises ContractError unless it is one of at least 0."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 2**63:
        raise ContractError(f"{name}: {value!r:.80}, must be an integer of at least 0")
    return number


class VersionRange(NamedTuple):
    """The versions of a model that may answer a request, both ends included."""

    least: int
    most: float = math.inf

    @classmethod
    def of(cls, least: Any, exact: Any) -> "VersionRange | None":
        """Parse `min_version` and `exact_version`; return None if neither is sent. Raises ContractError."""
        if least is not None and exact is not None:
            raise ContractError(f"{MIN_VERSION}: {least!r:.80}, {EXACT_VERSION}: {exact!r:.80}; send one of them")
        name, version = (MIN_VERSION, least) if exact is None else (EXACT_VERSION, exact)
        if version is None:
            return None
        number = whole_number(name, version)
        return cls(number, number if name == EXACT_VERSION else math.inf)

    @property
    def parameters(self) -> dict[str, int]:
        """Request parameters that demand these versions."""
        return {EXACT_VERSION if self.most == self.least else MIN_VERSION: self.least}

    def includes(self, version: int) -> bool:
        """Return whether this version may answer."""
        return self.least <= version <= self.most

    def __str__(self) -> str:
        return f"{self.least}" if self.most == self.least else f"{self.least} or newer"


IN_JOURNAL = "is in the journal and will be processed"  # so the request is not refused, but has no result yet
STEP_AHEAD = "but the last step of run"  # clients recognise by it that an earlier step is missing


@dataclass(frozen=True)
class RowSteps:
    """The K steps of one row that a process reward scores; each array is int64 `[K]`, ascending."""

    read_at: np.ndarray  # index of the score in the scored row, which may have additional marks
    token_places: np.ndarray  # index of the step's reward in `token_rewards`
    ends: np.ndarray  # the step's end in `step_ends`


class TokenRow(NamedTuple):
    """A row to score, without padding: rows are padded only in the forward pass and in the reply."""

    tokens: np.ndarray  # int64 [length]
    prompt_length: int | None = None  # number of leading prompt tokens, in [1, length]
    types: np.ndarray | None = None  # int64 [length]: the type of each token in a text pair; None: all 0
    steps: RowSteps | None = None  # for a process reward


@dataclass(frozen=True)
class ScoringRows:
    """Rows to score; iterate them once.

    `width` is S, the padded length of the rows in the reply; None: the length of the longest row. `unread_bytes` is the
    size of the texts that are tokenised while the rows are iterated; if it is not 0, iterating is slow and may raise
    ContractError.
    """

    rows: Iterable[TokenRow]
    width: int | None = None
    unread_bytes: int = 0


@dataclass(frozen=True)
class Limits:
    """Request limits of a model: token ids in `[0, vocab_size)`, rows of 1 to `max_length` tokens, bounded sizes.

    `max_request_tokens` bounds the B * S tokens of a request and of its reply, and the bytes of its sentences and
    metadata, so that no request occupies the server or exhausts its memory.
    """

    vocab_size: int
    max_length: int | None = None
    max_request_tokens: int = 4_000_000


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
    prompts: Sequence[int | None] = [None] * rows
    if prompt_lengths is not None:
        prompts = row_lengths(PROMPT_LENGTHS, prompt_lengths, rows, sizes).tolist()
    cut = [TokenRow(np.ascontiguousarray(tokens[i, : sizes[i]], dtype=np.int64), prompts[i]) for i in range(rows)]
    for i, row in enumerate(cut):
        check_row(row.tokens, i, limits)
    return ScoringRows(cut, width)


def check_size(name: str, rows: int, width: int, limits: Limits) -> None:
    """Raise ContractError if `rows` * `width` tokens exceed the limit of one request."""
    if rows * width > limits.max_request_tokens:
        raise ContractError(
            f"{name}: {rows} rows of {width} tokens, including padding, exceed {limits.max_request_tokens} tokens "
            "(max_request_tokens); send fewer rows per request"
        )


def check_row(row: np.ndarray, index: int, limits: Limits) -> None:
    """Raise ContractError if token row `row` `[length]` is empty, too long or holds ids outside the vocabulary."""
    if row.size == 0:
        raise ContractError(f"{SEQUENCE_LENGTHS}[{index}]: 0, must be at least 1")
    if limits.max_length is not None and row.size > limits.max_length:
        raise ContractError(
            f"{TOKENS}[{index}]: {row.size} tokens, but the model has {limits.max_length} positions; shorten the row"
        )
    check_vocabulary(row, index, limits)


def check_vocabulary(row: np.ndarray, index: int, limits: Limits) -> None:
    """Raise ContractError if token row `row` `[length]` has an id outside the vocabulary."""
    if int(row.view(f"u{row.itemsize}").max()) >= limits.vocab_size:  # viewed as unsigned, a negative id is large
        position = int(np.flatnonzero((row < 0) | (row >= limits.vocab_size))[0])
        raise ContractError(
            f"{TOKENS}[{index}, {position}]: {int(row[position])} is outside the vocabulary [0, {limits.vocab_size})"
        )


def optional_run_id(name: str, array: np.ndarray | None) -> str | None:
    """Return the run id in a BYTES `[1]` tensor, or None if it is absent. Raises ContractError if it is invalid."""
    if array is None or array.size == 0:
        return None
    _expect_one(name, array)
    text = decode(name, array.reshape(-1)[0])
    if not RUN_ID_PATTERN.fullmatch(text):
        raise ContractError(
            f"{name}: {text[:80]!r}, use 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit"
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


def sentence_texts(sentences: np.ndarray, name: str = SENTENCES) -> list[str]:
    """Decode a BYTES `[B, 1]` tensor. Raises ContractError for another shape or text that is not UTF-8."""
    if sentences.ndim != 2 or sentences.shape[1] != 1 or sentences.shape[0] == 0:
        raise ContractError(f"{name}: shape {list(sentences.shape)}, must be [B, 1]")
    return [decode(f"{name}[{i}]", item) for i, item in enumerate(sentences[:, 0])]


def texts_array(texts: list[str]) -> np.ndarray:
    """Encode B texts as BYTES `[B, 1]`; lone surrogates, which UTF-8 cannot encode, become '?'."""
    return np.asarray([[text.encode("utf-8", "replace")] for text in texts], dtype=np.object_)


def decode(name: str, item: Any) -> str:
    """Decode an item of a BYTES tensor. Raises ContractError if it is not UTF-8."""
    try:
        return item.decode("utf-8") if isinstance(item, bytes) else str(item)
    except UnicodeDecodeError as error:
        raise ContractError(f"{name}: not UTF-8 ({error}); encode the text as UTF-8") from error


def expect_integers(name: str, array: np.ndarray) -> None:
    """Raise ContractError unless `array` is int64 or int32."""
    if array.dtype not in (np.int64, np.int32):
        raise ContractError(f"{name}: dtype {array.dtype}, must be int64 or int32")


def _expect_one(name: str, array: np.ndarray) -> None:
    if array.size != 1:
        raise ContractError(f"{name}: shape {list(array.shape)}, must be [1]")


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
