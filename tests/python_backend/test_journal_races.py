"""`journal` where others act meanwhile: rewinds during an accept, killed and stopped writers, strays."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sidecar_rig import Rig
from test_journal import conflict, done, payload, rewound, train

from python_backend.store import journal as journal_module
from python_backend.store.journal import Entry, Journal

STALL_WHILE_ACCEPTING = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_journal import payload
from python_backend.store.journal import Journal

def stall():
    print("writing", flush=True)
    sys.stdin.read()

Journal(Path(sys.argv[1]), "run").accept_training(payload(), run_id=None, step=int(sys.argv[2]), check=stall)
"""


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal", "run")


def entries_folder(journal: Journal) -> Path:
    return journal.root / "run" / "entries"


def send_during(journal: Journal, step: int | None, meanwhile: Callable[[], object]) -> Entry:
    """Have `meanwhile` happen while the payload is being written."""

    def check() -> None:
        give_up_at = time.monotonic() + 120
        while not unfinished(journal) and time.monotonic() < give_up_at:
            time.sleep(0.001)
        meanwhile()

    return journal.accept_training(payload(), run_id="run", step=step, check=check)


# ---- a rewind while a payload is being accepted ----


def test_a_rewind_that_completes_during_an_accept_leaves_no_gap(journal: Journal):
    for step in (1, 2, 3):
        done(journal, train(journal, step))
    with conflict("step: 4, but the last step of run 'run' is 1; send step 2 first; the run was rewound from step 3"):
        send_during(journal, 4, lambda: rewound(journal, 1))
    assert [entry.step for entry in journal.entries()] == [1]
    assert [path.name for path in entries_folder(journal).iterdir()] == ["00000001.train"]
    assert train(journal, 2, 50).step == 2


def test_a_payload_without_a_step_follows_the_rewind(journal: Journal):
    for step in (1, 2, 3):
        done(journal, train(journal, step))
    assert send_during(journal, None, lambda: rewound(journal, 1)).step == 2


def test_nothing_is_accepted_while_a_rewind_is_under_way(journal: Journal):
    for step in (1, 2):
        done(journal, train(journal, step))
    with conflict("a rewind of run 'run' to step 1 is in progress"):
        send_during(journal, 3, lambda: journal.accept_rewind(run_id=None, target=1))
    assert [entry.kind for entry in journal.entries()] == ["train", "train", "rewind"]


def test_a_step_that_arrives_twice_at_once_is_one_entry(journal: Journal):
    first = send_during(journal, 1, lambda: train(Journal(journal.root, "run"), 1, 0.0))
    assert journal.entries() == [first]
    assert len(list(entries_folder(journal).iterdir())) == 1


def test_a_writer_that_was_stopped_while_it_links_holds_nobody_up_for_ever(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
):
    train(journal, 1)
    monkeypatch.setattr(journal_module, "ACCEPT_PATIENCE_S", 0.05, raising=False)
    with journal._accepting():
        other = Journal(journal.root, "run")
        for ask in (lambda: train(other, 2), lambda: other.accept_save(run_id=None)):
            with pytest.raises(OSError, match=r"locked by another process .*ACCEPT"):
                ask()
    assert [path.name for path in entries_folder(journal).iterdir()] == ["00000001.train"]
    assert train(journal, 2).step == 2


# ---- what a killed writer leaves ----


@pytest.fixture
def stalled(rig: Rig) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is writing the payload of step 3."""
    rig.train(1)
    arguments = [str(rig.journal.root), "3", str(Path(__file__).parent)]
    child = subprocess.Popen(
        [sys.executable, "-c", STALL_WHILE_ACCEPTING, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    rig.train(2)
    assert child.stdout is not None
    assert child.stdout.readline() == b"writing\n"
    while not unfinished(rig.journal):
        time.sleep(0.005)
    yield child
    child.kill()
    child.communicate()


def unfinished(journal: Journal) -> list[Path]:
    return list(entries_folder(journal).glob(".*"))


def test_what_a_killed_writer_left_goes_and_what_a_live_one_writes_stays(rig: Rig, stalled: subprocess.Popen[bytes]):
    rig.save()
    rig.stop()
    rig.start()
    rig.save()
    assert len(unfinished(rig.journal)) == 1  # neither a checkpoint nor a start takes it from its writer
    stalled.kill()
    stalled.wait()
    rig.train(3)
    rig.save()
    assert unfinished(rig.journal) == []


def test_a_sidecar_removes_what_a_killed_one_left(rig: Rig):
    rig.train(1)
    rig.stop()
    left = [
        rig.journal.root / ".heartbeat.json.ab.tmp",
        rig.journal.root / "run" / "results" / ".cd.tmp",
        rig.store.root / ".ef.tmp",
        rig.store.root / "serving" / ".gh.tmp",
        rig.checkpoints.root / ".ij.tmp",
    ]
    for path in left:
        path.touch()
    rig.start().train(2)
    rig.save()
    assert [path for path in left if path.exists()] == []


# ---- files that are not ours ----


STRAYS = ["notes.txt", "00000007", "7.train", "00000007.train.json", "99999999999999999999.train", "00000001.save.x"]


def test_stray_files_break_nobody(rig: Rig):
    rig.train(1)
    folder = rig.journal.root / "run"
    (folder / "set_aside" / "old").mkdir(parents=True)
    (folder / "set_aside" / "99999999999999999999").mkdir()
    for name in STRAYS:
        (folder / "entries" / name).write_text("?")
        (folder / "results" / name.removesuffix(".json")).write_text("?")
    assert rig.train(2)[0].error is None
    assert rig.rewind(1).error is None
    assert rig.train(2)[0].error is None
    assert rig.save().error is None
    rig.stop()
    assert rig.start().train(3)[0].error is None
    assert rig.journal.last_step() == 3
    assert (folder / "set_aside" / "1").is_dir()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"epoch": 1'])
def test_a_heartbeat_that_a_power_failure_emptied_is_none(journal: Journal, content: str):
    journal.root.mkdir()
    (journal.root / "heartbeat.json").write_text(content)
    assert journal.heartbeat() is None
