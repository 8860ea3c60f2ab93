"""An append-only log of records, each a JSON object with NumPy arrays, in segment files that one writer thread syncs.

    <folder>/<number>.log    START, then frames; the first record of each segment is its opening

A frame is a PREFIX and a payload in safetensors layout, whose metadata holds the JSON object. A crash can leave
incomplete or unreadable frames at the end of the newest segment, which are cut off. Each prefix says how much of the
segment was on disk before, so that damage to earlier frames is never mistaken for the traces of a crash.
"""

import contextlib
import json
import os
import queue
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_triton.checkpoints.safetensors_header import encode_header
from rlhf_triton.digests import Hasher
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import is_number, make_folder, sync_directory, sync_file, write_all

FORMAT = 1
START = b"RLHFLOG" + bytes([FORMAT])
MARKER = b"\xf0rec"
# Marker, bytes of the payload, bytes of the segment that were on disk before, digests of payload and prefix.
PREFIX = struct.Struct("<4sQQ16s8s")
PREFIX_DIGEST = 8
SEGMENT_BYTES = 64 << 20  # a segment ends with the first record beyond
SUFFIX = ".log"
DTYPES = {"BOOL": np.bool_, "I32": np.int32, "I64": np.int64, "U64": np.uint64, "F32": np.float32, "F64": np.float64}
NAMES = {np.dtype(kind).name: name for name, kind in DTYPES.items()}
REMEDY = "restore the file, or delete {folder}, without which steps before the next start cannot be replayed"


class DamagedRecord(RlhfError):
    """A log does not have the content that was written; the message names file and position."""

    def __init__(self, path: Path, position: int, problem: str, payload: bytes = b"") -> None:
        """`payload`: the frame's bytes, if only they are damaged."""
        super().__init__(f"{path} is damaged at byte {position}: {problem}; {REMEDY.format(folder=path.parent)}")
        self.path, self.position, self.problem, self.payload = path, position, problem, payload


def _refuse(error: RlhfError) -> None:
    raise error


@dataclass(frozen=True)
class StoredRecord:
    """A record of a log. Arrays have one of the types in DTYPES."""

    header: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Frame:
    """A frame in a segment: where its payload begins and ends, and how much of the segment was on disk before."""

    begin: int
    end: int
    synced: int
    digest: bytes


class RecordLog:
    """Appends to the log in a folder, of which there must be only one writer."""

    def __init__(self, folder: Path, opening: Mapping[str, Any]) -> None:
        """Cut off what a crash has left of records that were not on disk.

        Args:
            opening: the first record of each new segment, such as the settings that its other records depend on.

        Raises:
            RlhfError: the newest segment is damaged, or not a log of this format.
        """
        make_folder(folder)
        _cut_torn_end(folder)
        self._folder, self._opening = folder, opening
        self._number = max(segments(folder), default=0)
        self._file: int | None = None  # None: the next record begins a segment
        self._size = self._synced = 0
        self._failure: BaseException | None = None
        self._queue: queue.SimpleQueue[tuple[Callable[[], StoredRecord | None], Future[None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="record-log", daemon=True)
        self._thread.start()

    def append(self, encode: Callable[[], StoredRecord]) -> Future[None]:
        """Append the record that `encode` returns in the writer thread; the future completes once it is on disk.

        It raises OSError if the disk refuses the record; all later records are then refused as well.
        """
        return self._put(encode)

    def rotate(self, opening: Mapping[str, Any]) -> None:
        """Begin a new segment with the next record; `opening`: of this segment and of later ones."""

        def end() -> None:
            self._end_segment()
            self._opening = opening

        self._put(end)

    def remove_before(self, number: int) -> None:
        """Delete the segments before `number`."""
        for old in segments(self._folder):
            if old < number:
                path_of(self._folder, old).unlink()

    def close(self) -> None:
        """Wait until all records are on disk, and mark the end of the log; idempotent."""
        self._queue.put(None)
        self._thread.join()

    def _put(self, encode: Callable[[], StoredRecord | None]) -> Future[None]:
        future = Future[None]()
        self._queue.put((encode, future))
        return future

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            items = [item]
            while not self._queue.empty() and (item := self._queue.get()) is not None:
                items.append(item)
            self._commit(items)
            if item is None:
                break
        if self._failure is None:
            with contextlib.suppress(OSError):  # the records are on disk; the mark of the end helps, but is not needed
                self._end_segment()

    def _commit(self, items: Sequence[tuple[Callable[[], StoredRecord | None], Future[None]]]) -> None:
        """Write the items' records, sync once, and complete their futures."""
        try:
            if self._failure is not None:
                raise self._failure
            for encode, _ in items:
                if (record := encode()) is not None:
                    if self._file is None or self._size >= SEGMENT_BYTES:
                        self._begin_segment()
                    self._write(record)
            self._sync()
        except BaseException as error:  # thread edge: whoever waits for a record gets the error
            self._failure = error
        for _, future in items:
            if not future.set_running_or_notify_cancel():
                continue
            if self._failure is None:
                future.set_result(None)
            else:
                future.set_exception(self._failure)

    def _begin_segment(self) -> None:
        self._end_segment()
        self._number += 1
        path = path_of(self._folder, self._number)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        write_all(self._file, [START])
        self._size, self._synced = len(START), 0
        self._write(StoredRecord(self._opening))
        self._sync()
        sync_directory(self._folder)

    def _end_segment(self) -> None:
        """Sync the segment in progress, if any, and mark its end with an empty frame."""
        if self._file is not None:
            self._sync()
            write_all(self._file, _framed([], self._synced))
            os.fsync(self._file)
            os.close(self._file)
            self._file = None

    def _write(self, record: StoredRecord) -> None:
        assert self._file is not None
        parts = _framed(_payload(record), self._synced)
        write_all(self._file, parts)
        self._size += sum(map(_num_bytes, parts))

    def _sync(self) -> None:
        if self._file is not None and self._synced < self._size:
            os.fsync(self._file)
            self._synced = self._size


def segments(folder: Path) -> list[int]:
    """Return the numbers of the log's segments, ascending."""
    return sorted(int(path.stem) for path in folder.glob(f"*{SUFFIX}") if is_number(path.stem))


def path_of(folder: Path, number: int) -> Path:
    """Return the file of a segment."""
    return folder / f"{number}{SUFFIX}"


def read_records(
    folder: Path, number: int, damaged: Callable[[DamagedRecord], None] = _refuse
) -> Iterator[tuple[int, StoredRecord]]:
    """Yield (position, record) of a segment; the first record is its opening.

    Ends before what a crash has left at the end of the newest segment.

    Args:
        damaged: receives each record without the content that was written, which is skipped; default: raise it.

    Raises:
        DamagedRecord: from `damaged`.
        RlhfError: the file is not a log of this format.
    """
    path = path_of(folder, number)
    is_newest = number == segments(folder)[-1]  # first: the writer may begin another one meanwhile
    for position, payload in _payloads(path, path.read_bytes(), damaged, is_newest=is_newest):
        if payload:
            yield position, decode(payload)


def openings_of(folder: Path, damaged: Callable[[RlhfError], None] = _refuse) -> dict[int, Mapping[str, Any]]:
    """Return the header of the first record of each segment that has one.

    Args:
        damaged: receives the error of each segment whose opening is damaged or not of this format; default: raise it.
    """
    numbers = segments(folder)
    found = dict[int, Mapping[str, Any]]()
    for number in numbers:
        try:
            record = record_at(folder, number, is_newest=number == numbers[-1])
            if record is None:  # raises if later records say that it was on disk
                next(read_records(folder, number), None)
        except RlhfError as error:  # its kind is for the caller to judge
            damaged(error)
            continue
        if record is not None:
            found[number] = record.header
    return found


def record_at(folder: Path, number: int, position: int = len(START), *, is_newest: bool = False) -> StoredRecord | None:
    """Return the record at a position of a segment, by default its opening; None if a crash has left none.

    Raises as `read_records`.
    """
    path = path_of(folder, number)
    with path.open("rb") as file:
        data = file.read(len(START))
        file.seek(position)
        data += file.read(PREFIX.size)
        frame = _frame_at(data, len(START))
        data += file.read(0 if frame is None else frame.end - len(data))
    for _, payload in _payloads(path, data, _refuse, is_newest=is_newest):
        return decode(payload)
    return None


def decode(payload: bytes) -> StoredRecord:
    """Return the record in a frame's payload. Raises ValueError, LookupError or TypeError if it is damaged."""
    begin = 8 + int.from_bytes(payload[:8], "little")
    items = json.loads(payload[8:begin])
    header = json.loads(items.pop("__metadata__")["record"])
    arrays = {}
    for name, item in items.items():
        first, last = item["data_offsets"]
        array = np.frombuffer(payload[begin + first : begin + last], DTYPES[item["dtype"]])
        arrays[name] = array.reshape(item["shape"]).copy()
    return StoredRecord(header, arrays)


def first_difference(was: np.ndarray, now: np.ndarray) -> int | None:
    """Return the index of the first element of two arrays `[N]` that differs in a bit; None if none does."""
    bits = f"u{was.itemsize}"
    differing = np.flatnonzero(was.view(bits) != now.view(bits))
    return int(differing[0]) if len(differing) else None


def _payload(record: StoredRecord) -> list[bytes | memoryview]:
    arrays = {name: np.ascontiguousarray(array) for name, array in record.arrays.items()}
    described = {name: (NAMES[array.dtype.name], array.shape) for name, array in arrays.items()}
    head = encode_header(described, {"record": json.dumps(record.header, default=np.generic.item)})
    return [head, *(array.data for array in arrays.values() if array.size)]


def _framed(payload: Sequence[bytes | memoryview], synced: int) -> list[bytes | memoryview]:
    hasher = Hasher()
    for part in payload:
        hasher.update(part)
    head = PREFIX.pack(MARKER, sum(map(_num_bytes, payload)), synced, hasher.bytes(), b"")
    checked = head[:-PREFIX_DIGEST]
    return [checked + _prefix_digest(checked), *payload]


def _num_bytes(part: bytes | memoryview) -> int:
    return memoryview(part).nbytes


def _prefix_digest(data: bytes) -> bytes:
    return Hasher(data).bytes()[:PREFIX_DIGEST]


def _frame_at(data: bytes, position: int) -> Frame | None:
    """Return the frame that begins at a position; None if its prefix is incomplete or damaged."""
    prefix = data[position : position + PREFIX.size]
    if len(prefix) < PREFIX.size or _prefix_digest(prefix[:-PREFIX_DIGEST]) != prefix[-PREFIX_DIGEST:]:
        return None
    marker, size, synced, digest, _ = PREFIX.unpack(prefix)
    begin = position + PREFIX.size
    return Frame(begin, begin + size, synced, digest) if marker == MARKER else None


def _payloads(
    path: Path, data: bytes, damaged: Callable[[DamagedRecord], None], *, is_newest: bool
) -> Iterator[tuple[int, bytes]]:
    """Yield (position, payload) of each intact frame in the content of a segment; the mark of its end is empty.

    In the newest segment, a crash may have left unreadable frames that were not on disk: it ends before them.
    `damaged`: as in `read_records`.
    """
    if data[: len(START)] != START and not (is_newest and START.startswith(data)):
        if data.startswith(START[:-1]):
            raise RlhfError(
                f"{path} has format {data[len(START) - 1]}, but this version reads format {FORMAT}; use the version "
                "that wrote it"
            )
        raise RlhfError(f"{path} is not a log of records; move it to another folder")
    position = len(START)
    while position < len(data):
        frame = _frame_at(data, position)
        is_whole = frame is not None and frame.end <= len(data)
        payload = b"" if frame is None else data[frame.begin : frame.end]
        if frame is not None and Hasher(payload).bytes() == frame.digest:
            yield position, payload
            position = frame.end
        elif is_newest and not any(later.synced > position for _, later in _frames_after(data, position)):
            return
        elif frame is not None and is_whole:
            damaged(DamagedRecord(path, position, "a record does not match its digest", payload))
            position = frame.end
        else:
            damaged(DamagedRecord(path, position, "a record is incomplete"))
            position = next((found for found, _ in _frames_after(data, position)), len(data))


def _frames_after(data: bytes, position: int) -> Iterator[tuple[int, Frame]]:
    """Yield (position, frame) of each frame with an intact prefix that begins after a position."""
    while (position := data.find(MARKER, position + 1)) >= 0:
        frame = _frame_at(data, position)
        if frame is not None:
            yield position, frame


def _cut_torn_end(folder: Path) -> None:
    """Remove from the newest segment what a crash has left after its last intact record."""
    for number in segments(folder)[-1:]:
        path = path_of(folder, number)
        data = path.read_bytes()
        end = 0
        for position, payload in _payloads(path, data, _refuse, is_newest=True):
            end = position + PREFIX.size + len(payload)
        if not end:
            path.unlink()
            sync_directory(folder)
        elif end < len(data):
            os.truncate(path, end)
            sync_file(path)
