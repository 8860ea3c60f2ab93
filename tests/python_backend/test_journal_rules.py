"""`journal` where steps do not fit: two actors, damaged files, ways back, entries half set aside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_journal import conflict, done, payload, rewound, train

from python_backend.errors import RlhfError
from python_backend.store.journal import KEPT_RESULTS, Entry, Journal, Result
from python_backend.store.journal_entry import DamagedEntry
from python_backend.store.ownership import Sender

HOLD_THE_LOCK = """
import sys
from pathlib import Path
from python_backend.store.journal import (Journal, RlhfError)
try:
    with Journal(Path(sys.argv[1]), "run").lock(patience_s=0) as epoch:
        print("holds it in epoch", epoch, flush=True)
        sys.stdin.read()
except RlhfError as error:
    print(error, flush=True)
"""


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal", "run")


def answered(journal: Journal, *steps: int, value: float = 0.0) -> None:
    for step in steps:
        done(journal, train(journal, step, value + step))


# ---- two actors ----


def test_the_actor_that_rewinds_last_owns_the_run(journal: Journal):
    answered(journal, 1, 2, 3)
    rewound(journal, 0)  # an actor on another machine begins anew, or resumes
    told = "the run was rewound from step 3 to step 0: the actor that requested the last rewind owns the run"
    with conflict("step: 4, but the last step of run 'run' is 0; send step 1 first; " + told):
        train(journal, 4)
    answered(journal, 1, 2, value=50)
    with conflict("step: 2 of run 'run' was already sent with other content") as caught:
        train(journal, 2)
    assert told in str(caught.value)
    assert train(journal, 3, 53).step == 3  # the owner goes on


def test_an_earlier_owner_is_refused_however_long_ago_the_rewind_was(journal: Journal):
    first, second = Sender("first", 1), Sender("second", 1)
    for sender in (first, second):
        rewind = journal.accept_rewind(run_id="run", target=0, sender=sender)
        done(journal, rewind, owners=journal.owners(rewind))
        journal.drop(rewind)
    last = 2 * KEPT_RESULTS
    for step in (1, last):
        journal.finish(Entry(step, 0, "train"), Result(f"{step:08d}.train", step, digest="x"))
    journal.forget_covered(last)
    assert len(journal.results()) == 2, "all but the last step's and the newest rewind's are gone"
    assert journal.owners() == ["second/1", "first/1"]
    for late in (
        lambda: journal.accept_training(payload(), run_id="run", step=last + 1, sender=first),
        lambda: journal.accept_rewind(run_id="run", target=last - 5, sender=first),
    ):
        with conflict("the actor that requested the last rewind owns the run"):
            late()
    assert journal.accept_training(payload(), run_id="run", step=last + 1, sender=second).step == last + 1


def test_a_step_that_never_fitted_is_not_blamed_on_a_rewind(journal: Journal):
    answered(journal, 1, 2, 3)
    rewound(journal, 1)
    for step in (9, 7):
        with pytest.raises(Exception, match=f"step: {step}") as caught:
            train(journal, step)
        assert "rewound" not in str(caught.value)
    with pytest.raises(Exception, match="step: 1 of run") as caught:
        train(journal, 1, 99)
    assert "rewound" not in str(caught.value)


# ---- two sidecars ----


def test_two_processes_cannot_follow_one_journal(journal: Journal):
    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD_THE_LOCK, str(journal.root)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    first = start()
    try:
        assert first.stdout.readline() == "holds it in epoch 1\n"
        second = start()
        assert f"another sidecar follows the journal in {journal.root}" in second.communicate()[0]
        with pytest.raises(RlhfError), journal.lock(patience_s=0):
            pass
        first.kill()  # without any cleanup
        first.communicate()
        with journal.lock(patience_s=0) as epoch:
            assert epoch == 2
    finally:
        first.kill()
        first.communicate()


# ---- order ----


def test_steps_that_arrive_in_reverse_are_all_taken_in_the_end(journal: Journal):
    waiting = [3, 2, 1]
    refused = []
    while waiting:
        for step in list(waiting):
            try:
                train(journal, step)
                waiting.remove(step)
            except ValueError as error:
                refused.append(str(error))
    assert [entry.step for entry in journal.entries()] == [1, 2, 3]
    assert len(refused) == 3
    assert "send step 1 first" in refused[0]


# ---- ways back ----


def test_trainings_after_a_base_stay(journal: Journal):
    answered(journal, 1, 2, 3)
    save = journal.accept_save(run_id=None)
    journal.finish(save, Result(save.name, 3))
    answered(journal, 4)
    journal.forget_covered(3, base=1)
    assert [entry.name for entry in journal.entries()] == ["00000002.train", "00000003.train", "00000004.train"]
    journal.forget_covered(3)
    assert [entry.step for entry in journal.entries()] == [4]


def test_a_save_says_what_is_needed_still(journal: Journal):
    said = journal.accept_save(run_id=None, keep_steps=[2, 4])
    silent = journal.accept_save(run_id=None)
    again = Journal(journal.root, "run")
    assert again.keep_steps(said) == [2, 4]
    assert again.keep_steps(silent) is None


def test_what_is_left_of_a_killed_rewind_has_no_gap(journal: Journal, monkeypatch: pytest.MonkeyPatch):
    for step in range(1, 7):
        train(journal, step)
    rewind = journal.accept_rewind(run_id=None, target=2)
    rename, moves = Path.rename, []

    def killed(path: Path, target: Path) -> Path:
        if len(moves) == 2:
            raise KeyboardInterrupt
        moves.append(path.name)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            journal.set_aside_after(rewind)
    assert [entry.step for entry in journal.entries() if entry.kind == "train"] == [1, 2, 3, 4]


def test_numbers_of_what_was_set_aside_are_not_given_twice(journal: Journal):
    for _ in range(3):
        train(journal, 1)
        rewound(journal, 0)
        journal.forget_aside(keep=1)
    assert [path.name for path in (journal.root / "run" / "set_aside").iterdir()] == ["3"]


# ---- damage ----


def file_of(journal: Journal, step: int) -> Path:
    return journal.root / "run" / "entries" / f"{step:08d}.train"


@pytest.mark.parametrize("position", [3, 20, 60, -1])
def test_one_wrong_bit_anywhere_is_found(journal: Journal, position: int):
    entry = train(journal, 1)
    data = bytearray(file_of(journal, 1).read_bytes())
    data[position] ^= 1
    file_of(journal, 1).write_bytes(data)
    with pytest.raises(DamagedEntry, match=r"00000001\.train is damaged"):
        journal.load(entry)


def test_every_shorter_file_is_found(journal: Journal):
    entry = train(journal, 1)
    data = file_of(journal, 1).read_bytes()
    for size in range(0, len(data), 7):
        file_of(journal, 1).write_bytes(data[:size])
        with pytest.raises(DamagedEntry):
            journal.load(entry)


@pytest.mark.parametrize("told", [False, True])
def test_whoever_repeats_a_damaged_step_gets_what_the_sidecar_says(journal: Journal, told: bool):
    entry = train(journal, 1)
    file_of(journal, 1).write_bytes(b"?")
    if told:
        journal.set_aside_damaged(entry)
        journal.set_aside_damaged(entry)  # a sidecar killed between the two begins again
        journal.finish(entry, Result(entry.name, 0, error="it is damaged"))
    assert train(journal, 1) == entry
    assert train(journal, 2).step == 2
    assert (journal.result(entry) is not None) == told
    kept = list((journal.root / "run" / "set_aside").glob("*/*"))
    assert [path.read_bytes() for path in kept] == ([b"?"] if told else [])


def test_a_file_that_names_another_digest_is_not_that_content(journal: Journal):
    """As where two files were swapped: each is whole, and neither is damaged by itself."""
    first, second = train(journal, 1), train(journal, 2)
    assert journal.load(first)[1] == payload(1).digest()
    data = file_of(journal, 1).read_bytes().replace(payload(1).digest().encode(), payload(2).digest().encode())
    file_of(journal, 1).write_bytes(data)
    with pytest.raises(DamagedEntry, match="its content has digest " + payload(1).digest()[:12]):
        journal.load(Entry(1, 0, "train"))
    assert journal.load(second)[1] == payload(2).digest()
