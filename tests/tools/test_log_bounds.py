"""Logs of processes that run for a month: cut while they are written, the newest part kept, readers undisturbed."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_disk import small_disk

from tools.server.child import Child
from tools.server.log import follow, set_aside_if_large

PATIENCE_S = 120.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def chatter(tmp_path: Path) -> Iterator[Child]:
    """A process that writes lines of a thousand bytes, numbered, until it is stopped."""
    script = tmp_path / "chatter.py"
    script.write_text(
        "import itertools, time\n"
        "for number in itertools.count():\n"
        "    print(f'{number:07d}' + 'x' * 992, flush=True)\n"
        "    time.sleep(0.0005)\n"
    )
    child = Child("chatter", ["chatter"], tmp_path / "logs" / "chatter.log", {"PYTHONPATH": str(tmp_path)})
    yield child
    child.stop(signal.SIGTERM, PATIENCE_S)


def test_a_small_log_stays_as_it_is(tmp_path: Path):
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 100)
    set_aside_if_large(log, 100)
    assert log.stat().st_size == 100
    assert list(tmp_path.iterdir()) == [log]


def test_a_large_log_is_cut_and_its_newest_part_kept(tmp_path: Path):
    log = tmp_path / "a.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"old" * 50 + b"new" * 50)
        set_aside_if_large(log, 150)
        writer.write(b"after")
    assert log.read_bytes() == b"after"  # no hole of zeros before it
    assert (tmp_path / "a.previous.log").read_bytes() == b"new" * 50
    assert len(list(tmp_path.iterdir())) == 2


def test_what_a_child_warns_of_is_read_once(tmp_path: Path):
    (tmp_path / "quiet.py").touch()
    child = Child("quiet", ["quiet"], tmp_path / "quiet.log", {"PYTHONPATH": str(tmp_path)})
    child.process.wait(PATIENCE_S)
    with child.log_path.open("a") as log:
        log.write("10:00:00 INFO step 1\n10:00:01 WARNING 5 of 8 teach nothing\nTraceback\n10:00:02 ERROR no di")
    assert child.new_messages() == ["5 of 8 teach nothing"]
    with child.log_path.open("a") as log:
        log.write("sk\n10:00:03 INFO resuming from the checkpoint of step 3\n")
    assert child.new_messages() == ["no disk", "resuming from the checkpoint of step 3"]
    assert child.new_messages() == []
    child.log_path.write_text("10:00:04 WARNING cut\n")
    assert child.new_messages() == ["cut"]


def test_what_a_child_warns_of_in_json_is_read_too(tmp_path: Path):
    (tmp_path / "quiet.py").touch()
    child = Child("quiet", ["quiet"], tmp_path / "quiet.log", {"PYTHONPATH": str(tmp_path)})
    child.process.wait(PATIENCE_S)
    line = '{"level": "%s", "message": "%s"}\n'
    texts = [("INFO", "step 1"), ("WARNING", "5 teach nothing"), ("INFO", "resuming from 3"), ("ERROR", "no disk")]
    child.log_path.write_text("".join(line % text for text in texts) + '{"no": "line"}\n[1]\n')
    assert child.new_messages() == ["5 teach nothing", "resuming from 3", "no disk"]


def test_a_childs_log_stays_within_its_bound(chatter: Child):
    previous = chatter.log_path.with_suffix(".previous.log")
    for _ in range(2):
        previous.unlink(missing_ok=True)
        until(lambda: chatter.log_path.stat().st_size > 1 << 20)
        chatter.bound_log(1 << 20)
        assert previous.stat().st_size >= 1 << 20
        assert chatter.log_path.stat().st_size < 1 << 20
    until(lambda: chatter.log_path.stat().st_size > 5000)
    lines = chatter.log_path.read_bytes().splitlines()
    assert all(len(line) == 999 for line in lines[1:-1])
    numbers = [int(line[:7]) for line in lines[1:-1]]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert chatter.poll() is None


def test_the_follower_goes_on_after_a_cut(tmp_path: Path):
    log = tmp_path / "a.log"
    seen: list[str] = []
    ended = threading.Event()
    with log.open("ab", buffering=0) as writer:
        follower = threading.Thread(target=follow, args=(log, ended.is_set, seen.append))
        follower.start()
        try:
            writer.write(b"first line, which is the longest of all\n")
            until(lambda: len(seen) == 1)
            set_aside_if_large(log, 10)
            time.sleep(0.25)  # two looks of the follower
            writer.write(b"second\n")
            until(lambda: len(seen) == 2)
        finally:
            ended.set()
            follower.join()
    assert seen == ["  | first line, which is the longest of all", "  | second"]


def test_a_full_disk_leaves_the_log_for_later(tmp_path: Path):
    with small_disk(tmp_path / "disk", 1) as disk:
        log = disk.folder / "a.log"
        log.write_bytes(b"x" * 50_000)
        disk.fill()
        set_aside_if_large(log, 40_000)
        assert log.stat().st_size == 50_000
        assert sorted(path.name for path in disk.folder.iterdir()) == ["a.log", "ballast"]
        disk.empty()
        set_aside_if_large(log, 40_000)
        assert log.stat().st_size == 0


def test_the_end_of_a_log_of_json_is_shown_as_text(tmp_path: Path):
    script = (
        "import json, os, signal; print(json.dumps({'level': 'ERROR', 'message': 'no room'})); "
        "import sys; sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = Child("child", ["-c", script], tmp_path / "log", {}, command=[sys.executable])
    assert child.obituary() == (
        f"the child was killed by SIGKILL, as the kernel does when memory runs out; its log is {tmp_path / 'log'}\n"
        "the log ends with:\nERROR no room"
    )
