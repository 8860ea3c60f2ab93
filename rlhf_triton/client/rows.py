"""Converts the caller's ragged rows to arrays for the wire; errors name the caller's row and position."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_triton.wire.contract import MASK, PREV_VALUES, RETURNS, SEQUENCE_LENGTHS, TOKENS, ContractError

Rows = Sequence[Any]
"""One entry per row: a list of numbers, a NumPy array or a CPU tensor `[length_i]`."""


def token_rows(rows: Rows) -> list[np.ndarray]:
    """Return rows of token ids as int64 `[length_i]`. Raises ContractError."""
    arrays = _arrays(TOKENS, rows)
    for i, array in enumerate(arrays):
        if array.size == 0:
            raise ContractError(f"{TOKENS}[{i}]: empty, must have at least one token")
        if array.dtype.kind not in "iu":
            raise ContractError(f"{TOKENS}[{i}]: {array.dtype} numbers, must be integers")
    return [array.astype(np.int64, copy=False) for array in arrays]


def training_arrays(tokens: Rows, returns: Rows, prev_values: Rows, mask: Rows) -> dict[str, np.ndarray]:
    """Return the packed payload of critic_train; see `training_payload.TrainPayload`. Raises ContractError."""
    rows = token_rows(tokens)
    targets = {
        name: _targets(name, given, rows)
        for name, given in ((RETURNS, returns), (PREV_VALUES, prev_values), (MASK, mask))
    }
    for i, row in enumerate(targets[MASK]):
        if (row < 0).any():
            at = int(np.argmax(row < 0))
            raise ContractError(f"{MASK}[{i}][{at}]: {row[at]:g}, must not be negative")
    if not any(row.any() for row in targets[MASK]):
        raise ContractError(f"{MASK}: all 0, must be above 0 for at least one token to train on")
    return {
        TOKENS: np.concatenate(rows)[None],
        SEQUENCE_LENGTHS: np.asarray([[row.size] for row in rows], np.int64),
        **{name: np.concatenate(target)[None] for name, target in targets.items()},
    }


def _targets(name: str, given: Rows, tokens: list[np.ndarray]) -> list[np.ndarray]:
    """Return rows float32 `[length_i - 1]`: one finite number for each token except the last."""
    arrays = _arrays(name, given)
    if len(arrays) != len(tokens):
        raise ContractError(f"{name}: {len(arrays)} rows, must be {len(tokens)} as in {TOKENS}")
    found = []
    for i, (array, row) in enumerate(zip(arrays, tokens, strict=True)):
        if array.size != row.size - 1:
            raise ContractError(
                f"{name}[{i}]: {array.size} entries, must be {row.size - 1}, one fewer than {TOKENS}[{i}]: entry t "
                "belongs to the value at token t, and the last token has none"
            )
        with np.errstate(over="ignore"):
            numbers = array.astype(np.float32)
        if not np.isfinite(numbers).all():
            at = int(np.argmin(np.isfinite(numbers)))
            raise ContractError(f"{name}[{i}][{at}]: {array[at]}, must be a finite float32")
        found.append(numbers)
    return found


def _arrays(name: str, rows: Rows) -> list[np.ndarray]:
    """Return the rows as one-dimensional arrays."""
    if len(rows) == 0:
        raise ContractError(f"{name}: no rows, must have at least one")
    arrays = []
    for i, row in enumerate(rows):
        try:
            array = np.asarray(row)
        except (TypeError, ValueError, RuntimeError) as error:  # nested lists; a tensor on a GPU, or with a gradient
            raise ContractError(f"{name}[{i}]: {error}") from error
        if array.ndim != 1 or array.dtype.kind not in "biuf":
            raise ContractError(
                f"{name}[{i}]: shape {list(array.shape)} of {array.dtype}, must be the numbers of one row, [length]"
            )
        arrays.append(array)
    return arrays
