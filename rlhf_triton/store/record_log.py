"""An append-only log of records, each a JSON object with NumPy arrays, in files that are whole or absent.

    <folder>/<step>/<number>    START, then the records of one `append`

Before a record's payload, which is a safetensors file whose metadata holds the JSON object, stand the payload's size
and digest.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from rlhf_triton.digests import Hasher
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import create_file, make_folder, numbers_in, remove_folder, sweep

FORMAT = 1
START = b"RLHFLOG" + bytes([FORMAT])
PREFIX = struct.Struct("<Q16s")  # size and digest of the payload
REMEDY = "restore the file, or delete {folder}, without which steps before the next start cannot be replayed"


class DamagedRecord(RlhfError):
    """A log does not have the content that was written; the message names file and position."""

    def __init__(self, path: Path, position: int, problem: str, payload: bytes = b"") -> None:
        """`payload`: the record's bytes, if only they are damaged."""
        log = path.parent.parent
        super().__init__(f"{path} is damaged at byte {position}: {problem}; {REMEDY.format(folder=log)}")
        self.path = path
        self.position = position
        self.problem = problem
        self.payload = payload


def _refuse(error: RlhfError) -> None:
    raise error


@dataclass(frozen=True)
class StoredRecord:
    """A record of a log."""

    header: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordPlace:
    """Where a record is."""

    path: Path
    position: int  # in bytes


class RecordLog:
    """Appends to the log in a folder, which must have only one writer."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        sweep(folder)
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "record-log")

    def append(self, step: int, encode: Callable[[], Sequence[StoredRecord]]) -> Future[None]:
        """Append the records that `encode` returns in the writer thread; the future completes once they are on disk.

        It raises OSError if the disk refuses them.
        """
        return self._thread.submit(lambda: self._write(self._folder / str(step), encode()))

    def remove(self, is_removed: Callable[[int], bool]) -> None:
        """Delete the records of the steps for which this is true."""
        for step in numbers_in(self._folder):
            if is_removed(step):
                remove_folder(self._folder / str(step))

    def close(self) -> None:
        """Wait until all records are on disk, or have failed; idempotent."""
        self._thread.shutdown()

    def _write(self, folder: Path, records: Sequence[StoredRecord]) -> None:
        make_folder(folder)
        parts = [START]
        for payload in map(encoded, records):
            parts += [PREFIX.pack(len(payload), Hasher(payload).bytes()), payload]
        create_file(folder / str(1 + max(numbers_in(folder), default=0)), *parts)


def read_records(
    folder: Path, step: int, damaged: Callable[[RlhfError], None] = _refuse
) -> Iterator[tuple[RecordPlace, StoredRecord]]:
    """Yield the records of a step, in order.

    Args:
        damaged: receives the error of each record that is corrupt and of each file in another format, which are then
            skipped; by default the error is raised.

    Raises:
        DamagedRecord, RlhfError: from `damaged`.
    """
    for number in numbers_in(folder / str(step)):
        path = folder / str(step) / str(number)
        for position, payload in _payloads(path, damaged):
            yield RecordPlace(path, position), decoded(payload)


def record_at(place: RecordPlace) -> StoredRecord:
    """Return the record at a place from `read_records`."""
    with place.path.open("rb") as file:
        file.seek(place.position)
        size, _ = PREFIX.unpack(file.read(PREFIX.size))
        return decoded(file.read(size))


def encoded(record: StoredRecord) -> bytes:
    """Return the payload of a record."""
    arrays = {name: np.ascontiguousarray(array) for name, array in record.arrays.items()}  # as `save` needs them
    return save(arrays, {"record": json.dumps(record.header, default=np.generic.item)})


def decoded(payload: bytes) -> StoredRecord:
    """Return the record in a payload. Raises ValueError, LookupError, TypeError or SafetensorError if it is damaged."""
    begin = 8 + int.from_bytes(payload[:8], "little")
    header = json.loads(json.loads(payload[8:begin])["__metadata__"]["record"])
    return StoredRecord(header, {name: array.copy() for name, array in load(payload).items()})


def first_difference(was: np.ndarray, now: np.ndarray) -> int | None:
    """Return the index of the first element of two arrays `[N]` that differs in a bit; None if none does."""
    bits = f"u{was.itemsize}"
    differing = np.flatnonzero(was.view(bits) != now.view(bits))
    return int(differing[0]) if len(differing) else None


def _payloads(path: Path, damaged: Callable[[RlhfError], None]) -> Iterator[tuple[int, bytes]]:
    """Yield the position and the payload of each intact record in a file; `damaged`: as in `read_records`."""
    data = path.read_bytes()
    position = len(START)
    if not data.startswith(START):
        problem = "is not a log of records; move it to another folder"
        if data.startswith(START[:-1]):
            problem = f"has format {data[position - 1]}, but this version reads format {FORMAT}; use the version that "
            problem += "wrote it"
        damaged(RlhfError(f"{path} {problem}"))
        return
    while position < len(data):
        begin = position + PREFIX.size
        size, digest = PREFIX.unpack(data[position:begin].ljust(PREFIX.size))
        payload = data[begin : begin + size]
        if len(payload) < size:
            damaged(DamagedRecord(path, position, "a record is incomplete"))
            return
        if Hasher(payload).bytes() == digest:
            yield position, payload
        else:
            damaged(DamagedRecord(path, position, "a record does not match its digest", payload))
        position = begin + size
