"""Digests of files and arrays, by which damage is detected. They name their algorithm: `xxh3:` or `sha256:`, then hex.

xxh3-128 hashes about as fast as memory is read, ten times as fast as SHA-256. It detects damage; only SHA-256 also
withstands someone who makes a second content of the same digest.
"""

import hashlib
import mmap
import os
from pathlib import Path
from typing import Any, Literal

import xxhash

Algorithm = Literal["xxh3", "sha256"]
DEFAULT: Algorithm = "xxh3"
HASHED_AT_ONCE = 1 << 24  # bytes; large blocks, because the hashing thread takes the GIL between two of them
MAPPED_AT_ONCE = 1 << 26  # bytes; mapped pages count as memory of the process
_STATES: dict[str, Any] = {"xxh3": xxhash.xxh3_128, "sha256": hashlib.sha256}


class Hasher:
    """The state of a digest. `update` releases the GIL while it hashes a large buffer."""

    def __init__(self, algorithm: str, data: bytes = b"") -> None:
        """`algorithm`: an `Algorithm`, or what `algorithm_of` returned. Raises ValueError if it is unknown."""
        if algorithm not in _STATES:
            raise ValueError(f"a digest by {algorithm} is unknown here: use xxh3 or sha256")
        self._algorithm, self._state = algorithm, _STATES[algorithm](data)
        self.update, self.bytes = self._state.update, self._state.digest

    def digest(self) -> str:
        """Return the digest of the bytes hashed so far."""
        return f"{self._algorithm}:{self._state.hexdigest()}"


def algorithm_of(digest: str) -> str:
    """Return the name in a digest."""
    return digest.rpartition(":")[0]


def digest_of(path: Path, algorithm: str = DEFAULT) -> str:
    """Return the digest of a file. Raises OSError; ValueError if the algorithm is unknown."""
    hasher = Hasher(algorithm)
    with path.open("rb", buffering=0) as file:
        block = memoryview(bytearray(max(1, min(os.fstat(file.fileno()).st_size, HASHED_AT_ONCE))))
        while size := file.readinto(block):
            hasher.update(block[:size])
    return hasher.digest()


def digest_of_mapped(path: Path, algorithm: str = DEFAULT) -> str:
    """Return the digest of a file as `digest_of` does, but from the pages of the file, without a copy.

    It takes half the time of xxh3 and no turns with the GIL. A disk error kills the process, as it does while a model
    computes with mapped weights: only for files that the process maps anyway.
    """
    hasher = Hasher(algorithm)
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
