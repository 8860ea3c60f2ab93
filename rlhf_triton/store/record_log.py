"""An append-only log of records, each a JSON object with NumPy arrays, in files that are whole or absent.

    <folder>/<segment>/<number>    START, then the records of one `append`; the first one of a segment is its opening

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
        self.path, self.position, self.problem, self.payload = path, position, problem, payload


def _refuse(error: RlhfError) -> None:
    raise error


@dataclass(frozen=True)
class StoredRecord:
    """A record of a log."""

    header: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where a record is."""

    path: Path
    position: int  # in bytes


class RecordLog:
    """Appends to the log in a folder, of which there must be only one writer."""

    def __init__(self, folder: Path, opening: Mapping[str, Any]) -> None:
        """Begin a new segment; `opening`: its first record, such as the settings that its other records depend on.

        Raises OSError if the disk refuses it.
        """
        make_folder(folder)
        sweep(folder)
        self._folder = folder
        self._segment = max(segments(folder), default=0)
        self._num_files = 0  # of the segment
        self._thread = ThreadPoolExecutor(1, "record-log")
        self.rotate(opening)

    def append(self, encode: Callable[[], Sequence[StoredRecord]]) -> Future[None]:
        """Append the records that `encode` returns in the writer thread; the future completes once they are on disk.

        It raises OSError if the disk refuses them.
        """
        return self._thread.submit(lambda: self._write(encode()))

    def rotate(self, opening: Mapping[str, Any]) -> None:
        """Begin a new segment, of which this is the first record. Raises OSError if the disk refuses it."""

        def begin() -> None:
            self._segment += 1
            self._num_files = 0
            make_folder(self._folder / str(self._segment))
            self._write([StoredRecord(opening)])

        self._thread.submit(begin).result()

    def remove_before(self, segment: int) -> None:
        """Delete the segments before this one."""
        for old in segments(self._folder):
            if old < segment:
                remove_folder(self._folder / str(old))

    def close(self) -> None:
        """Wait until all records are on disk, or have failed; idempotent."""
        self._thread.shutdown()

    def _write(self, records: Sequence[StoredRecord]) -> None:
        parts = [START]
        for payload in map(encoded, records):
            parts += [PREFIX.pack(len(payload), Hasher(payload).bytes()), payload]
        self._num_files += 1
        create_file(self._folder / str(self._segment) / str(self._num_files), *parts)


def segments(folder: Path) -> list[int]:
    """Return the numbers of the log's segments, ascending."""
    return numbers_in(folder)


def read_records(
    folder: Path, segment: int, damaged: Callable[[DamagedRecord], None] = _refuse
) -> Iterator[tuple[Place, StoredRecord]]:
    """Yield the records of a segment; the first one is its opening.

    Args:
        damaged: receives each record without the content that was written, which is skipped; default: raise it.

    Raises:
        DamagedRecord: from `damaged`.
        RlhfError: a file is not of this format.
    """
    for number in numbers_in(folder / str(segment)):
        path = folder / str(segment) / str(number)
        for position, payload in _payloads(path, damaged):
            yield Place(path, position), decoded(payload)


def openings_of(folder: Path, damaged: Callable[[RlhfError], None] = _refuse) -> dict[int, Mapping[str, Any]]:
    """Return the header of the first record of each segment that has one.

    Args:
        damaged: receives the error of each segment whose opening is damaged or not of this format; default: raise it.
    """
    openings = dict[int, Mapping[str, Any]]()
    for segment in segments(folder):
        try:
            for _, record in read_records(folder, segment):
                openings[segment] = record.header
                break
        except RlhfError as error:  # its kind is for the caller to judge
            damaged(error)
    return openings


def record_at(place: Place) -> StoredRecord:
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


def _payloads(path: Path, damaged: Callable[[DamagedRecord], None]) -> Iterator[tuple[int, bytes]]:
    """Yield the position and the payload of each intact record in a file; `damaged`: as in `read_records`."""
    data = path.read_bytes()
    if not data.startswith(START):
        if data.startswith(START[:-1]):
            raise RlhfError(
                f"{path} has format {data[len(START) - 1]}, but this version reads format {FORMAT}; use the version "
                "that wrote it"
            )
        raise RlhfError(f"{path} is not a log of records; move it to another folder")
    position = len(START)
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
