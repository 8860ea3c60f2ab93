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
from python_backend.store.serving_records import REMOTE_SILENCE_S, STOPPED, ServingRecord, ServingRecords, _process


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


def test_a_stopped_process_holds_nobody_up_for_ever(records: ServingRecords, clock: Clock):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        mine = ServingRecord.of_this_process("critic_0", 0)
        theirs = dataclasses.replace(mine, pid=child.pid, born=_process(child.pid)[1])
        records.put(theirs)
        assert instances(records.alive()) == ["critic_0"]  # busy, perhaps with loading
        child.send_signal(signal.SIGSTOP)
        while _process(child.pid)[0] not in STOPPED:
            time.sleep(0.005)
        records.touch(theirs)
        assert instances(records.alive()) == ["critic_0"]  # stopped just now
        clock.passed += REMOTE_SILENCE_S
        assert instances(records.died()) == ["critic_0"]
    finally:
        child.kill()
        child.communicate()


def test_a_process_id_that_is_used_again_is_another_process(records: ServingRecords):
    mine = ServingRecord.of_this_process("critic_0", 0)
    records.put(dataclasses.replace(mine, born=mine.born - 1))
    assert records.alive() == []
    assert instances(records.died()) == ["critic_0"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(serving_records, "time", clock)
    return clock


class Clock:
    """Time as the records see it: seconds that pass, and a wall clock that somebody may set."""

    def __init__(self) -> None:
        self.passed, self.set_by = 0.0, 0.0

    def monotonic(self) -> float:
        return self.passed

    def time(self) -> float:
        return 1e9 + self.passed + self.set_by


def test_what_cannot_be_looked_at_lives_as_long_as_it_is_touched(records: ServingRecords, tmp_path: Path, clock: Clock):
    """Another machine, or another container of the same pod: same host name, same process ids, other processes."""
    elsewhere = dataclasses.replace(ServingRecord.of_this_process("critic_0", 3), place="cafe0123", pid=1)
    records.put(elsewhere)
    records.put(ServingRecord.of_this_process("critic_0", 4))
    assert sorted(record.version or 0 for record in records.alive()) == [3, 4], "they do not share a file"
    path = tmp_path / "serving" / elsewhere.file_name
    clock.passed += REMOTE_SILENCE_S
    assert [record.version for record in records.alive()] == [4]
    assert records.died() == [], "it may be alive, behind a network that is not"
    records.touch(elsewhere)
    assert len(records.alive()) == 2
    clock.passed += REMOTE_SILENCE_S
    records.forget_died()
    assert path.exists(), "who replaces an instance knows nothing of other machines"
    records.forget_died(elsewhere=True)
    assert not path.exists()
    records.touch(elsewhere)  # forgotten by somebody who took it for dead
    assert len(records.alive()) == 2


@pytest.mark.parametrize("seconds", [60, -60, 3600])
def test_a_clock_that_is_wrong_or_jumps_kills_nobody_and_keeps_nobody_alive(
    records: ServingRecords, clock: Clock, seconds: int
):
    elsewhere = dataclasses.replace(ServingRecord.of_this_process("critic_0", 3), place="cafe0123", pid=1)
    records.put(elsewhere)
    os.utime(records._folder / elsewhere.file_name, (clock.time() - seconds,) * 2)
    for _ in range(2):
        assert len(records.alive()) == 1
        clock.passed += 1
        clock.set_by += seconds
    records.forget_died(elsewhere=True)
    assert len(records.alive()) == 1
    clock.passed += REMOTE_SILENCE_S
    assert records.alive() == []
    os.utime(records._folder / elsewhere.file_name, (clock.time() - 2 * seconds,) * 2)
    assert len(records.alive()) == 1


def test_a_file_that_cannot_be_read_is_nobodys_record(records: ServingRecords, tmp_path: Path):
    records.put(ServingRecord.of_this_process("critic_0", 0))
    for name, text in (("a.json", ""), ("b.json", "{}"), ("c.json", '{"instance": "x", "colour": 1}')):
        (tmp_path / "serving" / name).write_text(text)
    assert instances(records.alive()) == ["critic_0"]
