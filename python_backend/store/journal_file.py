"""Writes a training entry's file while its content is checked and its digest computed.

The header with the digest replaces the first part at the end. A digest takes about as long as writing does; the arrays
are never copied into one piece.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from python_backend.store.journal_entry import DIGEST
from python_backend.wire.training_payload import TrainPayload, content_digest, field_digest

DTYPES = {"float32": "F32", "int64": "I64"}
UNKNOWN_DIGEST = "0" * 64
BESIDE = ThreadPoolExecutor(3, "journal-file")  # the thread that writes mostly waits for the disk


class TrainingFile:
    """The safetensors file of one payload, with `digest` in its metadata."""

    def __init__(self, payload: TrainPayload, check: Callable[[], None] = lambda: None) -> None:
        """`check`: raises if the content is not to be accepted; runs while the file is written."""
        self._arrays = {name: np.ascontiguousarray(array) for name, array in payload.arrays().items()}
        largest_first = sorted(self._arrays.items(), key=lambda item: -item[1].nbytes)
        self._digests = {name: BESIDE.submit(field_digest, array) for name, array in largest_first}
        self._checked = BESIDE.submit(check)

    def check(self) -> None:
        """Wait for the check; raises what it raised."""
        self._checked.result()

    def close(self) -> None:
        """As `check`, and no thread reads the caller's arrays from now on."""
        wait(self._digests.values())
        self.check()

    @property
    def digest(self) -> str:
        """The content's digest; waits for it."""
        return content_digest({name: digest.result() for name, digest in self._digests.items()})

    def parts(self) -> list[bytes | memoryview]:
        """Header and arrays, in order; the header has no digest yet."""
        return [header(self._arrays, {DIGEST: UNKNOWN_DIGEST}), *(array.data for array in self._arrays.values())]

    def header(self) -> bytes:
        """The header with the digest, as long as the first of `parts`. Raises what `check` raises."""
        self.check()
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
