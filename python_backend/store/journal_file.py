"""Writes a training entry's file while other threads validate its content and compute its digest.

Hashing takes about as long as writing, so the two overlap: the file starts with a placeholder header, and the header
with the digest replaces it at the end. The arrays are written from their own buffers, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from python_backend.checkpoints.safetensors_header import encode_header
from python_backend.store.journal_entry import DIGEST
from python_backend.wire.training_payload import TrainPayload, content_digest, field_digest

DTYPES = {"float32": "F32", "int64": "I64"}  # NumPy name -> safetensors name
UNKNOWN_DIGEST = "0" * 64  # placeholder of the same length as a hex sha256
BESIDE = ThreadPoolExecutor(3, "journal-file")  # hashing and checks; the writing thread mostly waits for the disk


class TrainingFile:
    """The safetensors file of one payload, with `digest` in its metadata."""

    def __init__(
        self, payload: TrainPayload, check: Callable[[], None] = lambda: None, more: Mapping[str, str] | None = None
    ) -> None:
        """Start hashing and `check`, which raises if the content is invalid, in background threads.

        `more`: further metadata, not part of the digest.
        """
        self._more = more or {}
        self._arrays = {name: np.ascontiguousarray(array) for name, array in payload.arrays().items()}
        # The largest array takes longest to hash, so it starts first.
        largest_first = sorted(self._arrays.items(), key=lambda item: -item[1].nbytes)
        self._digests = {name: BESIDE.submit(field_digest, array) for name, array in largest_first}
        self._checked = BESIDE.submit(check)

    def check(self) -> None:
        """Wait for the check; re-raise its exception."""
        self._checked.result()

    def close(self) -> None:
        """Wait until no thread reads the caller's arrays any more, then re-raise the check's exception, if any."""
        wait(self._digests.values())
        self.check()

    @property
    def digest(self) -> str:
        """Digest of the content; blocks until it is computed."""
        return content_digest({name: digest.result() for name, digest in self._digests.items()})

    def parts(self) -> list[bytes | memoryview]:
        """Return the header with a placeholder digest, followed by the arrays' buffers."""
        return [
            header(self._arrays, {DIGEST: UNKNOWN_DIGEST, **self._more}),
            *(array.data for array in self._arrays.values()),
        ]

    def header(self) -> bytes:
        """Return the final header, which is as long as the placeholder in `parts`. Re-raises the check's exception."""
        self.check()
        return header(self._arrays, {DIGEST: self.digest, **self._more})


def header(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a safetensors file that stores `arrays` in order."""
    return encode_header({name: (DTYPES[array.dtype.name], array.shape) for name, array in arrays.items()}, metadata)
