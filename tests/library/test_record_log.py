"""The log of records: durability, torn ends, damage, and files that are not its own."""

import re
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlhf_triton.errors import RlhfError
from rlhf_triton.store import record_log
from rlhf_triton.store.record_log import (
    DamagedRecord,
    RecordLog,
    StoredRecord,
    openings_of,
    path_of,
    read_records,
    segments,
)

KINDS = sorted(record_log.NAMES)


def a_record(number):
    return StoredRecord({"number": number}, {"tokens": np.arange(number), "empty": np.zeros((0, 3), np.float32)})


def write(folder, *numbers, apart=True):
    """Append records; `apart`: each is on disk before the next is appended."""
    log = RecordLog(folder, {"opening": numbers[0]})
    futures = []
    for number in numbers:
        futures.append(log.append(lambda number=number: a_record(number)))
        if apart:
            futures[-1].result()
    log.close()
    assert all(future.done() and not future.exception() for future in futures)


def numbers_in(folder):
    found = [record for number in segments(folder) for _, record in read_records(folder, number)]
    return [record.header["number"] for record in found if "number" in record.header]


@given(
    st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.floats() | st.text(max_size=9), max_size=4),
    st.lists(st.sampled_from(KINDS).flatmap(lambda kind: hnp.arrays(kind, hnp.array_shapes(min_side=0))), max_size=3),
)
def test_records_are_restored_bit_for_bit(header, arrays):
    record = StoredRecord(header, {f"a {i}": array for i, array in enumerate(arrays)})
    found = record_log.decode(b"".join(map(bytes, record_log._payload(record))))
    assert repr(found.header) == repr(header)
    for name, array in record.arrays.items():
        assert (found.arrays[name].dtype, found.arrays[name].shape) == (array.dtype, array.shape)
        assert found.arrays[name].tobytes() == array.tobytes()


def test_appended_records_are_read_in_order_from_segments_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(record_log, "SEGMENT_BYTES", 1000)
    write(tmp_path, *range(20), apart=False)
    assert len(segments(tmp_path)) > 3
    write(tmp_path, 20, 21)
    assert numbers_in(tmp_path) == [*range(22)]
    assert [*openings_of(tmp_path).values()][-2:] == [{"opening": 0}, {"opening": 20}]
    log = RecordLog(tmp_path, {})
    log.remove_before(segments(tmp_path)[-1])
    log.close()
    assert numbers_in(tmp_path) == [20, 21]


def test_crash_at_any_byte_of_an_append_loses_only_records_that_were_not_on_disk(tmp_path):
    """The file ends within the last record, or, after the machine has crashed, in other bytes."""
    write(tmp_path / "log", 1, 2)
    path = path_of(tmp_path / "log", 1)
    data = path.read_bytes()
    (*_, begin, _) = [match.start() for match in re.finditer(re.escape(record_log.MARKER), data)]
    for size in range(begin, len(data)):
        is_complete = size >= len(data) - record_log.PREFIX.size
        for end in [b""] if is_complete else [b"", b"\xff" * (len(data) - size)]:
            path.write_bytes(data[:size] + end)
            kept = [1, 2] if is_complete else [1]
            assert numbers_in(tmp_path / "log") == kept
            RecordLog(tmp_path / "log", {}).close()
            assert numbers_in(tmp_path / "log") == kept
    write(tmp_path / "log", 3)
    assert numbers_in(tmp_path / "log") == [1, 2, 3]


@pytest.mark.parametrize("size", [0, 3, 8, 20, 8 + record_log.PREFIX.size, 8 + record_log.PREFIX.size + 5])
def test_segment_whose_opening_a_crash_has_cut_is_removed(size, tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2)
    path_of(tmp_path, 2).write_bytes(path_of(tmp_path, 2).read_bytes()[:size])
    assert [*openings_of(tmp_path)] == [1]
    write(tmp_path, 3)
    assert numbers_in(tmp_path) == [1, 3]


def test_every_flipped_bit_of_a_record_on_disk_is_an_error_that_names_file_and_position(tmp_path):
    write(tmp_path, 1, 2)
    path = path_of(tmp_path, 1)
    data = path.read_bytes()
    for position in range(8, len(data) - record_log.PREFIX.size):
        path.write_bytes(data[:position] + bytes([data[position] ^ 16]) + data[position + 1 :])
        with pytest.raises(
            DamagedRecord, match=f"^{path} is damaged at byte [0-9]+: a record .*; restore the file, or"
        ):
            numbers_in(tmp_path)
    with pytest.raises(DamagedRecord):
        RecordLog(tmp_path, {})


@pytest.mark.parametrize("at", [9, record_log.PREFIX.size + 9], ids=["prefix", "payload"])
def test_records_after_a_damaged_one_are_read(at, tmp_path):
    write(tmp_path, 1, 2, 3)
    (_, _, position, _) = [position for position, _ in read_records(tmp_path, 1)]
    data = bytearray(path_of(tmp_path, 1).read_bytes())
    data[position + at] ^= 1
    path_of(tmp_path, 1).write_bytes(bytes(data))
    damage = []
    found = [record.header.get("number") for _, record in read_records(tmp_path, 1, damage.append)]
    assert (found, [error.position for error in damage]) == ([None, 1, 3], [position])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"something else", "is not a log of records; move it to another folder"),
        (lambda data: data[:7] + b"\x02" + data[8:], "has format 2, but this version reads format 1; use the version"),
        (lambda data: data[:-70], "is damaged at byte .*: a record is incomplete; restore the file"),
    ],
)
def test_foreign_future_and_truncated_segments_are_refused(change, message, tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2)
    path_of(tmp_path, 1).write_bytes(change(path_of(tmp_path, 1).read_bytes()))
    with pytest.raises(RlhfError, match=f"^{path_of(tmp_path, 1)} {message}"):
        numbers_in(tmp_path)


def test_record_whose_caller_no_longer_waits_is_written_like_any_other(tmp_path):
    log, go_on = RecordLog(tmp_path, {}), threading.Event()
    log.append(lambda: (go_on.wait(60), a_record(1))[1])
    assert log.append(lambda: a_record(2)).cancel()
    go_on.set()
    log.append(lambda: StoredRecord({"number": np.int64(3)})).result(60)
    log.close()
    assert numbers_in(tmp_path) == [1, 2, 3]


def test_full_disk_fails_the_record_and_all_later_ones(tmp_path, monkeypatch):
    log = RecordLog(tmp_path, {})
    log.append(lambda: a_record(1)).result()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record_log, "write_all", full)
    with pytest.raises(OSError, match="No space"):
        log.append(lambda: a_record(2)).result()
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space"):
        log.append(lambda: a_record(3)).result()
    log.close()
    assert numbers_in(tmp_path) == [1]
