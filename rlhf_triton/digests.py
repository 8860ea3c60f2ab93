"""Digests of files and arrays, by which damage is detected: `xxh3:`, then hex.

xxh3-128 hashes about as fast as memory is read, ten times as fast as SHA-256. It detects damage, not forgery.
"""

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

HASHED_AT_ONCE = 1 << 24  # bytes; large blocks, because the hashing thread takes the GIL between two of them
MAPPED_AT_ONCE = 1 << 26  # bytes; mapped pages count as memory of the process


class Hasher:
    """The state of a digest. `update` releases the GIL while it hashes a large buffer."""

    def __init__(self, data: bytes = b"") -> None:
        self._state = xxhash.xxh3_128(data)
        self.update, self.bytes = self._state.update, self._state.digest

    def digest(self) -> str:
        """Return the digest of the bytes hashed so far."""
        return f"xxh3:{self._state.hexdigest()}"


def json_digest(content: Mapping[str, Any]) -> str:
    """Return the digest of a JSON object, whatever the order of its keys."""
    return Hasher(json.dumps(content, sort_keys=True).encode()).digest()


def digest_of(path: Path) -> str:
    """Return the digest of a file. Raises OSError."""
    hasher = Hasher()
    with path.open("rb", buffering=0) as file:
        block = memoryview(bytearray(max(1, min(os.fstat(file.fileno()).st_size, HASHED_AT_ONCE))))
        while size := file.readinto(block):
            hasher.update(block[:size])
    return hasher.digest()


def digest_of_mapped(path: Path) -> str:
    """Return the digest of a file as `digest_of` does, but from the pages of the file, without a copy.

    It takes half the time and no turns with the GIL. A disk error kills the process, as it does while a model
    computes with mapped weights: only for files that the process maps anyway.
    """
    hasher = Hasher()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for start in range(0, size, MAPPED_AT_ONCE):
            length = min(MAPPED_AT_ONCE, size - start)
            with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start) as pages:
                hasher.update(pages)
    return hasher.digest()


def brief(digest: str) -> str:
    """Return a digest's name and first twelve digits, for messages."""
    return f"{digest[: digest.rfind(':') + 13]}…"
