"""A training entry's file while it is written: its digest is computed meanwhile.
Given: a payload. Returns: the parts of a safetensors file, and the header that goes over the first one at the end.
A digest takes about as long as writing does; the arrays are never copied into one piece.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from python_backend.contract import TrainPayload
from python_backend.journal_entry import DIGEST

DTYPES = {"float32": "F32", "int64": "I64"}
UNKNOWN_DIGEST = "0" * 64


class TrainingFile:
    """The safetensors file of one payload, with `digest` in its metadata."""

    def __init__(self, payload: TrainPayload) -> None:
        self._arrays = {name: np.ascontiguousarray(array) for name, array in payload.arrays().items()}
        beside = ThreadPoolExecutor(1, "digest")
        self._digest = beside.submit(payload.digest)
        beside.shutdown(wait=False)

    @property
    def digest(self) -> str:
        """The payload's digest; waits for it."""
        return self._digest.result()

    def parts(self) -> list[bytes | memoryview]:
        """Header and arrays, in order; the header has no digest yet."""
        return [header(self._arrays, {DIGEST: UNKNOWN_DIGEST}), *(array.data for array in self._arrays.values())]

    def header(self) -> bytes:
        """The header with the digest, as long as the first of `parts`."""
        return header(self._arrays, {DIGEST: self.digest})


def header(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """What stands before the tensors in a safetensors file that holds `arrays` one after the other."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        entries[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8, as the format wants it
    return struct.pack("<Q", len(text)) + text
