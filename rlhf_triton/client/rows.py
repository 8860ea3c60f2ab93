"""Converts the caller's rows and their data to the tensors of a request; errors name the row and the position."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from rlhf_triton.wire.contract import MASK, PREV_VALUES, RETURNS, SEQUENCE_LENGTHS, TOKENS, Arrays, ContractError

T = TypeVar("T")
Rows = Sequence[Any]
"""One entry per row: a list of numbers, a NumPy array or a CPU tensor `[length_i]`."""


def listed(name: str, entries: Any) -> list[Any]:
    """Return the entries of a list, an iterator, an array or a column. Raises ContractError for anything else."""
    is_one = isinstance(entries, str | bytes | Mapping) or getattr(entries, "ndim", 1) == 0
    if is_one or hasattr(entries, "columns") or not isinstance(entries, Iterable):  # a data frame iterates over columns
        raise not_rows(name, entries)
    return [*entries]


def not_rows(name: str, value: Any) -> ContractError:
    """Return the error of an argument that is not a list of rows."""
    shown = " ".join(repr(value).split())  # tables have several lines
    return ContractError(
        f"{name}: {shown:.80}, must be a list of rows; put brackets around one row, and turn a table into rows"
    )


def per_row(name: str, entries: Any, num_rows: int, read: Callable[[str, Any], T]) -> list[T] | None:
    """Return what `read` makes of each row's entry and its name; None if there are no entries.

    Raises ContractError unless there is an entry for each row.
    """
    if entries is None:
        return None
    values = listed(name, entries)
    if len(values) != num_rows:
        raise ContractError(f"{name}: {len(values)} entries for {num_rows} rows")
    return [read(f"{name}[{i}]", value) for i, value in enumerate(values)]


def plain_object(name: str, value: Any) -> dict[str, Any]:
    """Return the metadata of a row as JSON has it. Raises ContractError."""
    if not isinstance(value, Mapping):
        raise ContractError(f"{name}: {value!r:.80}, must be a dictionary")
    return dict(plain(name, {**value}))


def text_or_messages(name: str, value: Any) -> str | list[dict[str, Any]]:
    """Return a text, or messages, as JSON has them. Raises ContractError for anything else."""
    found = plain(name, value)
    if isinstance(found, str) or (isinstance(found, list) and all(isinstance(each, dict) for each in found)):
        return found
    raise ContractError(f"{name}: {value!r:.80}, must be a text or messages")


def plain(name: str, value: Any) -> Any:
    """Return a value as JSON has it: arrays and numbers of NumPy and torch become Python's.

    Raises ContractError if JSON or UTF-8 cannot express it.
    """
    try:
        return json.loads(json.dumps(value, default=_json_value, ensure_ascii=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise ContractError(f"{name}: {error}") from error


def _json_value(value: Any) -> Any:
    """Return what JSON's encoder writes for an object that it does not know. Raises TypeError."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")


def token_rows(rows: Rows) -> list[np.ndarray]:
    """Return rows of token ids as int64 `[length_i]`. Raises ContractError."""
    arrays = _arrays(TOKENS, rows)
    for i, array in enumerate(arrays):
        if array.size == 0:
            raise ContractError(f"{TOKENS}[{i}]: empty, must have at least one token")
        if array.dtype.kind not in "iu":
            raise ContractError(f"{TOKENS}[{i}]: {array.dtype} numbers, must be integers")
        if (most := array.max()) > np.iinfo(np.int64).max:  # int64 would wrap to a negative number
            raise ContractError(f"{TOKENS}[{i}]: {most} at {array.argmax()}, must be less than 2**63")
    return [array.astype(np.int64, copy=False) for array in arrays]


def training_arrays(tokens: Rows, returns: Rows, prev_values: Rows, mask: Rows) -> Arrays:
    """Return the packed payload of critic_train; see `training_payload.TrainPayload`. Raises ContractError."""
    rows = token_rows(tokens)
    targets = {
        name: _targets(name, values, rows)
        for name, values in ((RETURNS, returns), (PREV_VALUES, prev_values), (MASK, mask))
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


def _targets(name: str, rows: Rows, tokens: list[np.ndarray]) -> list[np.ndarray]:
    """Return rows float32 `[length_i - 1]`: one finite number for each token except the last."""
    arrays = _arrays(name, rows)
    if len(arrays) != len(tokens):
        raise ContractError(f"{name}: {len(arrays)} rows, must be {len(tokens)} as in {TOKENS}")
    targets = []
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
        targets.append(numbers)
    return targets


def _arrays(name: str, rows: Rows) -> list[np.ndarray]:
    """Return the rows as one-dimensional arrays."""
    entries = listed(name, rows)
    if not entries:
        raise ContractError(f"{name}: no rows, must have at least one")
    arrays = []
    for i, row in enumerate(entries):
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
