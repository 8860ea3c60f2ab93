"""The log of records: order, damage, a full disk, and files that are not its own."""

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
    read_records,
)

KINDS = ("bool", "int32", "int64", "uint64", "float32", "float64")


def a_record(number):
    return StoredRecord({"number": number}, {"tokens": np.arange(number), "empty": np.zeros((0, 3), np.float32)})


def write(folder, step, *numbers, together=False):
    """Append records; `together`: in one file."""
    log = RecordLog(folder)
    parts = [numbers] if together else [(number,) for number in numbers]
    futures = [log.append(step, lambda part=part: [*map(a_record, part)]) for part in parts]
    log.close()
    assert all(future.done() and not future.exception() for future in futures)


def read_numbers(folder, *steps):
    return [record.header["number"] for step in steps for _, record in read_records(folder, step)]


@given(
    st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.floats() | st.text(max_size=9), max_size=4),
    st.lists(st.sampled_from(KINDS).flatmap(lambda kind: hnp.arrays(kind, hnp.array_shapes(min_side=0))), max_size=3),
)
def test_records_are_restored_bit_for_bit(header, arrays):
    record = StoredRecord(header, {f"a {i}": array for i, array in enumerate(arrays)})
    found = record_log.decoded(record_log.encoded(record))
    assert repr(found.header) == repr(header)
    for name, array in record.arrays.items():
        assert (found.arrays[name].dtype, found.arrays[name].shape) == (array.dtype, array.shape)
        assert found.arrays[name].tobytes() == array.tobytes()
        assert found.arrays[name].flags.writeable


def test_appended_records_are_read_in_order_until_their_step_is_removed(tmp_path):
    write(tmp_path, 1, *range(12))
    write(tmp_path, 2, 12, 13, together=True)
    write(tmp_path, 1, 14)
    assert read_numbers(tmp_path, 1, 2) == [*range(12), 14, 12, 13]
    log = RecordLog(tmp_path)
    log.remove(lambda step: step < 2)
    log.append(3, lambda: [StoredRecord({"number": np.int64(15)})])
    log.close()
    assert read_numbers(tmp_path, 1, 2, 3) == [12, 13, 15]


def test_files_left_unfinished_by_a_crash_are_ignored(tmp_path):
    write(tmp_path, 1, 1)
    (tmp_path / "1" / ".unfinished.tmp").write_bytes(b"RLHF")
    (tmp_path / "2").mkdir()
    assert read_numbers(tmp_path, 1, 2) == [1]
    write(tmp_path, 2, 2)
    assert read_numbers(tmp_path, 1, 2) == [1, 2]


def test_every_flipped_bit_of_a_record_is_an_error_that_names_file_and_position(tmp_path):
    write(tmp_path, 1, 1)
    path = tmp_path / "1" / "1"
    data = path.read_bytes()
    for position in range(8, len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 16]) + data[position + 1 :])
        with pytest.raises(
            DamagedRecord,
            match=f"^{path} is damaged at byte [0-9]+: a record .*; restore the file, or delete {tmp_path},",
        ):
            read_numbers(tmp_path, 1)


@pytest.mark.parametrize("at", [9, record_log.PREFIX.size + 9], ids=["digest", "payload"])
def test_records_after_a_damaged_one_are_read(at, tmp_path):
    write(tmp_path, 1, 1, 2, 3, together=True)
    place = next(place for place, record in read_records(tmp_path, 1) if record.header.get("number") == 2)
    data = bytearray(place.path.read_bytes())
    data[place.position + at] ^= 1
    place.path.write_bytes(bytes(data))
    damage = []
    found = [record.header.get("number") for _, record in read_records(tmp_path, 1, damage.append)]
    assert (found, [error.position for error in damage]) == ([1, 3], [place.position])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"something else", "is not a log of records; move it to another folder"),
        (lambda data: data[:7] + b"\x02" + data[8:], "has format 2, but this version reads format 1; use the version"),
        (lambda data: data[:-9], "is damaged at byte 8: a record is incomplete; restore the file"),
        (lambda data: data[:12], "is damaged at byte 8: a record is incomplete; restore the file"),
    ],
)
def test_foreign_future_and_truncated_files_are_refused(change, message, tmp_path):
    write(tmp_path, 1, 1)
    path = tmp_path / "1" / "1"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(RlhfError, match=f"^{path} {message}"):
        read_numbers(tmp_path, 1)


def test_full_disk_fails_the_record(tmp_path, monkeypatch):
    log = RecordLog(tmp_path)
    log.append(1, lambda: [a_record(1)]).result()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record_log, "create_file", full)
    with pytest.raises(OSError, match="No space"):
        log.append(1, lambda: [a_record(2)]).result()
    log.close()
    assert read_numbers(tmp_path, 1) == [1]
