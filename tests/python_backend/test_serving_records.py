"""`python_backend.store.serving_records`: what instances say of themselves, and who of them is still there."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from python_backend.store import serving_records
from python_backend.store.serving_records import STOPPED, ServingRecord, ServingRecords, _process


@pytest.fixture
def records(tmp_path: Path) -> ServingRecords:
    return ServingRecords(tmp_path / "serving")


def instances(found: list[ServingRecord]) -> list[str]:
    return [record.instance for record in found]


def test_a_record_lives_as_long_as_its_process(records: ServingRecords):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine = ServingRecord.of_this_process("critic_0", 0)
    records.put(mine)
    records.put(dataclasses.replace(mine, instance="critic_1", pid=child.pid, born=_process(child.pid)[1]))
    assert instances(records.alive()) == ["critic_0", "critic_1"]
    child.kill()
    while "critic_1" in instances(records.alive()):  # until the kernel has ended it; it is not reaped yet
        time.sleep(0.01)
    assert instances(records.died()) == ["critic_1"]
    child.communicate()
    assert instances(records.died()) == ["critic_1"]
    records.forget_died()
    assert records.died() == []
    assert instances(records.alive()) == ["critic_0"]
    records.withdraw(mine)
    records.withdraw(mine)  # twice is once
    assert records.alive() == []


def test_a_stopped_process_holds_nobody_up_for_ever(records: ServingRecords):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        mine = ServingRecord.of_this_process("critic_0", 0)
        theirs = dataclasses.replace(mine, pid=child.pid, born=_process(child.pid)[1])
        records.put(theirs)
        os.utime(records._folder / theirs.file_name, (time.time() - 60,) * 2)
        assert instances(records.alive()) == ["critic_0"]  # busy, perhaps with loading
        child.send_signal(signal.SIGSTOP)
        while _process(child.pid)[0] not in STOPPED:
            time.sleep(0.005)
        assert instances(records.died()) == ["critic_0"]
        records.touch(theirs)
        assert instances(records.alive()) == ["critic_0"]  # stopped just now
    finally:
        child.kill()
        child.communicate()


def test_a_process_id_that_is_used_again_is_another_process(records: ServingRecords):
    mine = ServingRecord.of_this_process("critic_0", 0)
    records.put(dataclasses.replace(mine, born=mine.born - 1))
    assert records.alive() == []
    assert instances(records.died()) == ["critic_0"]


def test_what_cannot_be_looked_at_lives_as_long_as_it_is_touched(records: ServingRecords, tmp_path: Path):
    """Another machine, or another container of the same pod: same host name, same process ids, other processes."""
    elsewhere = dataclasses.replace(ServingRecord.of_this_process("critic_0", 3), place="cafe0123", pid=1)
    records.put(elsewhere)
    records.put(ServingRecord.of_this_process("critic_0", 4))
    assert sorted(record.version or 0 for record in records.alive()) == [3, 4], "they do not share a file"
    path = tmp_path / "serving" / elsewhere.file_name
    os.utime(path, (time.time() - 60,) * 2)
    assert [record.version for record in records.alive()] == [4]
    assert records.died() == [], "it may be alive, behind a network that is not"
    records.touch(elsewhere)
    assert len(records.alive()) == 2
    path.unlink()
    records.touch(elsewhere)  # forgotten by somebody who took it for dead
    assert len(records.alive()) == 2


def test_a_clock_that_is_ahead_keeps_nobody_alive(records: ServingRecords, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving_records, "REMOTE_SILENCE_S", 0.5)
    elsewhere = dataclasses.replace(ServingRecord.of_this_process("critic_0", 3), place="cafe0123", pid=1)
    records.put(elsewhere)
    path = records._folder / elsewhere.file_name
    os.utime(path, (time.time() + 3600,) * 2)
    assert len(records.alive()) == 1  # seen for the first time
    deadline = time.monotonic() + 120
    while records.alive():
        assert time.monotonic() < deadline, "it lives for an hour"
        time.sleep(0.02)
    os.utime(path, (time.time() + 3601,) * 2)
    assert len(records.alive()) == 1


def test_a_file_that_cannot_be_read_is_nobodys_record(records: ServingRecords, tmp_path: Path):
    records.put(ServingRecord.of_this_process("critic_0", 0))
    for name, text in (("a.json", ""), ("b.json", "{}"), ("c.json", '{"instance": "x", "colour": 1}')):
        (tmp_path / "serving" / name).write_text(text)
    assert instances(records.alive()) == ["critic_0"]
