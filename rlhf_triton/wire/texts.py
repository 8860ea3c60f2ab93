"""Validates a request's texts (sentences, second texts, metadata), and escapes the texts that a model sends.

Imports only numpy, like `contract`.
"""

import json
from typing import Any

import numpy as np

from rlhf_triton.wire.contract import METADATA, SENTENCES, TEXT_PAIRS, ContractError, Limits, decode, sentence_texts

MAX_TEXT_CHARACTERS = 2000  # gRPC sends an error in a header, and its clients accept 8 kB of headers


def printable(text: str, limit: int = MAX_TEXT_CHARACTERS) -> str:
    """Return `text` with all characters except printable ones, newlines and tabs escaped as in a Python literal.

    Truncates texts longer than `limit` characters. The result can always be encoded as UTF-8: Triton cannot encode lone
    surrogates, and control sequences in logs and errors would reach a terminal.
    """
    if len(text) > limit:
        text = text[:limit] + " …"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


MAX_NESTING = 100  # depth of metadata; Python's JSON writer and templates recurse, and fail at about 1000 levels


def text_bytes(
    sentences: np.ndarray, metadata: np.ndarray | None, limits: Limits, pairs: np.ndarray | None = None
) -> int:
    """Return the number of bytes of a request's texts and metadata. Raises ContractError if they exceed the limit."""
    total = sum(len(item) for array in (sentences, pairs, metadata) if array is not None for item in array.flat)
    if total > limits.max_request_tokens:
        raise ContractError(
            f"{SENTENCES}: {total} bytes including the metadata exceed {limits.max_request_tokens} "
            "(max_request_tokens); send fewer or shorter rows per request"
        )
    return total


def pair_texts(pairs: np.ndarray | None, rows: int) -> list[str]:
    """Return the second text of each of `rows` sentences, "" if there is none. Raises ContractError."""
    if pairs is None:
        return [""] * rows
    if pairs.shape != (rows, 1):
        raise ContractError(f"{TEXT_PAIRS}: shape {list(pairs.shape)}, must be [{rows}, 1]")
    return sentence_texts(pairs, TEXT_PAIRS)


def metadata_rows(metadata: np.ndarray | None, rows: int) -> list[dict[str, Any]]:
    """Return each row's JSON object, `{}` if no metadata was sent. Raises ContractError if the metadata is invalid."""
    if metadata is None:
        return [{} for _ in range(rows)]
    if metadata.shape != (rows, 1):
        raise ContractError(f"{METADATA}: shape {list(metadata.shape)}, must be [{rows}, 1]")
    return [_metadata_object(i, item) for i, item in enumerate(metadata[:, 0])]


def _metadata_object(index: int, item: Any) -> dict[str, Any]:
    text = decode(f"{METADATA}[{index}]", item)
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
            for container in containers
            for inner in (container.values() if isinstance(container, dict) else container)
            if isinstance(inner, (dict, list))
        ]
    if containers:
        raise ContractError(f"{METADATA}[{index}]: {text[:80]!r}, must be nested at most {MAX_NESTING} deep")
    return value
