"""Validates and packs the payload of critic_train, and computes the digest that identifies its content.

Imports only numpy and xxhash.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlhf_triton.digests import Hasher
from rlhf_triton.wire.contract import (
    MASK,
    PREV_VALUES,
    RETURNS,
    SEQUENCE_LENGTHS,
    TOKENS,
    Arrays,
    ContractError,
    Limits,
    check_vocabulary,
    expect_integers,
    row_lengths,
)


@dataclass(frozen=True)
class TrainPayload:
    """One training payload, packed: the rows are concatenated without padding.

    `tokens` is int64 `[T]`; `lengths` is int64 `[N]` and sums to T; `returns`, `prev_values` and `mask` are float32
    `[T-N]`. Entry t of a row belongs to the value at its token t; the last token of a row has no entry.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    returns: np.ndarray
    prev_values: np.ndarray
    mask: np.ndarray

    def arrays(self) -> Arrays:
        """Return the fields by wire name (`lengths` is `sequence_lengths`)."""
        return {
            TOKENS: self.tokens,
            SEQUENCE_LENGTHS: self.lengths,
            RETURNS: self.returns,
            PREV_VALUES: self.prev_values,
            MASK: self.mask,
        }

    def digest(self) -> str:
        """Return the `content_digest` of the fields."""
        digests = {name: field_digest(array) for name, array in self.arrays().items()}
        return content_digest(digests)


@dataclass(frozen=True)
class SentPayload:
    """A training payload as received, padded `[N, S]` or packed `[1, T]`, without copying the arrays.

    Shapes, dtypes and lengths are validated; `check` validates the values.
    """

    tokens: np.ndarray
    lengths: np.ndarray  # int64 [N]
    targets: Arrays  # float32 [N, S-1], or [1, T-N]
    limits: Limits

    @property
    def _ends(self) -> np.ndarray:
        """Number of valid tokens in each row of `tokens`: int64 `[N]`, or `[1]` if packed."""
        return self.lengths if len(self.lengths) == len(self.tokens) else self.lengths.sum(keepdims=True)

    def check(self) -> None:
        """Validate the values. A mask may be all 0; the step then has no effect.

        Raises:
            ContractError: NaN or infinity, a negative mask, a nonzero mask beyond the end of a row, or a token outside
                the vocabulary.
        """
        for name, array in self.targets.items():
            _expect_targets(name, array)
        mask = self.targets[MASK]
        if len(mask) == len(self.lengths) and (self.lengths < self.tokens.shape[1]).any():
            outside = np.flatnonzero((mask != 0) & (np.arange(mask.shape[1])[None] >= self.lengths[:, None] - 1))
            if outside.size:
                row, column = (int(i) for i in np.unravel_index(int(outside[0]), mask.shape))
                raise ContractError(
                    f"{MASK}[{row}, {column}]: {mask[row, column]:g}, must be 0, because a sequence of "
                    f"{self.lengths[row]} tokens has one entry fewer"
                )
        for i, end in enumerate(self._ends.tolist()):  # later tokens are padding and may have any value
            check_vocabulary(self.tokens[i, :end], i, self.limits)

    def packed(self) -> TrainPayload:
        """Return the rows without padding, as views of the received arrays if they have none. Does not validate."""
        # Each sequence has one target fewer than tokens: N fewer in the single packed row, 1 fewer in each padded row.
        dropped = len(self.lengths) // len(self.tokens)
        targets = [_without_padding(self.targets[name], self._ends - dropped) for name in (RETURNS, PREV_VALUES, MASK)]
        tokens = _without_padding(self.tokens, self._ends).astype(np.int64, copy=False)
        return TrainPayload(tokens, self.lengths, *targets)


def train_payload(arrays: Mapping[str, np.ndarray | None], limits: Limits) -> TrainPayload:
    """Validate a training payload with `sent_payload` and `SentPayload.check`, and return it packed."""
    sent = sent_payload(arrays, limits)
    sent.check()
    return sent.packed()


def sent_payload(arrays: Mapping[str, np.ndarray | None], limits: Limits) -> SentPayload:
    """Validate shapes, dtypes and lengths of a payload, padded `[N, S]` or packed `[1, T]`, and return it.

    `SentPayload.check` validates the values. Padded rows without `sequence_lengths` end at the token after the last
    position with a nonzero mask, because later tokens cannot affect the loss of a causal critic. A row whose mask is
    all 0 keeps its first 2 tokens and does not contribute to the loss.

    Raises:
        ContractError: a field is missing, has the wrong dtype or shape, or a row is too long.
    """
    tokens = arrays.get(TOKENS)
    lengths = arrays.get(SEQUENCE_LENGTHS)
    if tokens is None:
        raise ContractError(f"{TOKENS}: missing")
    expect_integers(TOKENS, tokens)
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ContractError(f"{TOKENS}: shape {list(tokens.shape)}, must be [N, S], or [1, T] with {SEQUENCE_LENGTHS}")
    rows, width = tokens.shape
    if rows == 1 and lengths is not None and lengths.size > 1:  # packed; one row alone is the same in both forms
        sizes = row_lengths(SEQUENCE_LENGTHS, lengths, lengths.size, width)
        if sizes.sum() != width:
            raise ContractError(
                f"{SEQUENCE_LENGTHS}: sum {int(sizes.sum())}, must be {width}, the number of packed {TOKENS}"
            )
        targets = _targets(arrays, (1, width - len(sizes)))
    else:
        if width < 2:
            raise ContractError(f"{TOKENS}: shape [{rows}, {width}], rows to train on must have at least 2 tokens")
        targets = _targets(arrays, (rows, width - 1))
        if lengths is None:
            mask = targets[MASK] != 0
            # The last nonzero position t has its value at token t, so the row ends at token t+1: length t+2.
            sizes = np.where(mask.any(axis=1), width - np.argmax(mask[:, ::-1], axis=1), 2).astype(np.int64)
        else:
            sizes = row_lengths(SEQUENCE_LENGTHS, lengths, rows, width)
    if limits.max_length is not None and sizes.max() > limits.max_length:
        row = int(sizes.argmax())
        raise ContractError(
            f"{TOKENS}[{row}]: {int(sizes[row])} tokens, but the model has {limits.max_length} positions; shorten "
            "the row"
        )
    return SentPayload(tokens, sizes, targets, limits)


def field_digest(array: np.ndarray) -> bytes:
    """Return the digest of one field's dtype, shape and bytes, without a name."""
    hasher = Hasher(f"{array.dtype.str}:{array.shape};".encode())
    hasher.update(np.ascontiguousarray(array).data)  # the buffer itself: no copy
    return hasher.bytes()


def content_digest(digests: Mapping[str, bytes]) -> str:
    """Return the digest of the fields' names and digests. It does not depend on the padding on the wire."""
    return Hasher(b"".join(name.encode() + digest for name, digest in sorted(digests.items()))).digest()


def _without_padding(rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
    if (ends == rows.shape[1]).all():
        return rows.reshape(-1)
    return np.concatenate([row[:end] for row, end in zip(rows, ends.tolist(), strict=True)])


def _targets(arrays: Mapping[str, np.ndarray | None], shape: tuple[int, int]) -> Arrays:
    rows = {}
    for name in (RETURNS, PREV_VALUES, MASK):
        array = arrays.get(name)
        if array is None:
            raise ContractError(f"{name}: missing")
        if array.dtype != np.float32:
            raise ContractError(f"{name}: dtype {array.dtype}, must be float32")
        if array.shape != shape:
            raise ContractError(
                f"{name}: shape {list(array.shape)}, must be {list(shape)} (one entry fewer than {TOKENS} in each row)"
            )
        rows[name] = array
    return rows


def _expect_targets(name: str, array: np.ndarray) -> None:
    # A cheap check first: if the sum is finite, all elements are. Otherwise an element is not finite, or the sum has
    # overflowed, which the search below decides.
    with np.errstate(all="ignore"):
        if np.isfinite(array.sum()) and (name != MASK or array.min() >= 0):
            return
    for wrong, rule in (
        (~np.isfinite(array), "must be finite"),
        ((array < 0) & (name == MASK), "must not be negative"),
    ):
        if wrong.any():
            row, column = (int(i) for i in np.unravel_index(int(np.argmax(wrong)), array.shape))
            raise ContractError(f"{name}[{row}, {column}]: {array[row, column]:g}, {rule}")
