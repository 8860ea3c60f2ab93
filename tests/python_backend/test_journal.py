"""`journal`: accepted means on disk, once and in order; whatever cannot follow is refused by name."""

from __future__ import annotations

import errno
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from python_backend.errors import RlhfError
from python_backend.store.journal import KEPT_RESULTS, Entry, Heartbeat, Journal, Result
from python_backend.wire.contract import StepConflict
from python_backend.wire.training_payload import TrainPayload


def payload(value: float = 0.0) -> TrainPayload:
    targets = np.full(3, value, np.float32)
    return TrainPayload(np.array([1, 2, 3, 4, 5]), np.array([2, 3]), targets, targets, np.ones(3, np.float32))


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal", "run")


def train(journal: Journal, step: int | None, value: float | None = None) -> Entry:
    value = float(step or 0) if value is None else value
    return journal.accept_training(payload(value), run_id="run", step=step)


def done(journal: Journal, entry: Entry, **more: object) -> None:
    digest = journal.load(entry)[1] if entry.kind == "train" else None
    journal.finish(entry, Result(entry.name, entry.step, digest=digest, **more))


def conflict(text: str):
    return pytest.raises(StepConflict, match=re.escape(text))


def test_a_payload_comes_back_as_it_was_sent(journal: Journal):
    entry = train(journal, 1, 0.5)
    loaded, digest = journal.load(entry)
    for name, array in payload(0.5).arrays().items():
        np.testing.assert_array_equal(loaded.arrays()[name], array)
    assert digest == loaded.digest() == payload(0.5).digest()


def test_entries_are_done_in_order(journal: Journal):
    names = [
        train(journal, 1).name,
        train(journal, 2).name,
        journal.accept_save(run_id=None).name,
        journal.accept_save(run_id="run").name,
        train(journal, 3).name,
        journal.accept_rewind(run_id="run", target=1).name,
    ]
    assert names == [
        "00000001.train",
        "00000002.train",
        "00000002.save.1",
        "00000002.save.2",
        "00000003.train",
        "00000003.rewind.1.1",
    ]
    assert [entry.name for entry in journal.entries()] == names
    assert [Entry.parse(name).name for name in names] == names


def test_saves_of_a_long_run_keep_their_order(journal: Journal):
    for _ in range(11):
        journal.accept_save(run_id=None)
    assert [entry.rank for entry in journal.entries()] == list(range(1, 12))  # not as text: 1, 10, 11, 2
    assert Entry.parse("100000000.train") > Entry.parse("99999999.train")


def test_the_same_step_twice_is_one_entry(journal: Journal):
    first = train(journal, 1, 7)
    assert train(journal, 1, 7) == first  # while it waits
    done(journal, first, loss_mean=0.25)
    assert train(journal, 1, 7) == first  # and after its answer
    journal.forget_covered(1)
    assert train(journal, 1, 7) == first  # and after the checkpoint
    assert journal.entries() == []
    assert journal.result(first).loss_mean == 0.25


@pytest.mark.parametrize("answered", [False, True])
def test_a_known_step_with_other_content_is_refused(journal: Journal, answered: bool):
    for step in (1, 2, 3):
        entry = train(journal, step)
        if answered:
            done(journal, entry)
    with conflict(
        "step: 2 of run 'run' was already sent with other content; the last step is 3: send step 4, "
        "or send critic_save once with rewind_to 1"
    ):
        train(journal, 2, 99)
    assert len(journal.entries()) == 3


def test_a_gap_is_refused(journal: Journal):
    with conflict("step: 2, but the last step of run 'run' is 0; send step 1 first"):
        train(journal, 2)
    train(journal, 1)
    with conflict("step: 5, but the last step of run 'run' is 1; send step 2 first"):
        train(journal, 5)


def test_another_run_is_refused(journal: Journal):
    for ask in (
        lambda: journal.accept_training(payload(), run_id="other", step=1),
        lambda: journal.accept_save(run_id="other"),
        lambda: journal.accept_rewind(run_id="other", target=0),
    ):
        with conflict("run_id: 'other', but this critic belongs to run 'run'"):
            ask()
    assert journal.entries() == []


def test_without_a_step_each_payload_is_the_next(journal: Journal):
    steps = [journal.accept_training(payload(), run_id=None, step=None).step for _ in range(3)]
    assert steps == [1, 2, 3]


def test_racing_writers_get_numbers_of_their_own(journal: Journal):
    entries: list[Entry] = []

    def write(value: int) -> None:
        mine = Journal(journal.root, "run")
        entries.append(mine.accept_training(payload(value), run_id=None, step=None))
        entries.append(mine.accept_save(run_id=None))

    threads = [threading.Thread(target=write, args=(value,)) for value in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trains = [entry for entry in entries if entry.kind == "train"]
    assert sorted(entry.step for entry in trains) == list(range(1, 9))
    assert len(set(entries)) == 16
    values = {float(journal.load(entry)[0].returns[0]) for entry in trains}
    assert values == set(range(8))  # no payload was lost to another


def test_racing_senders_of_one_step_agree_or_one_is_refused(journal: Journal):
    outcomes: list[object] = []

    def write(value: float) -> None:
        try:
            outcomes.append(Journal(journal.root, "run").accept_training(payload(value), run_id="run", step=1))
        except StepConflict:
            outcomes.append("refused")

    threads = [threading.Thread(target=write, args=(value,)) for value in (1, 1, 1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = float(journal.load(Entry(1, 0, "train"))[0].returns[0])
    assert outcomes.count("refused") == (1 if won == 1 else 3)


def test_a_full_disk_accepts_nothing(journal: Journal, monkeypatch: pytest.MonkeyPatch):
    train(journal, 1)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            train(journal, 2)
    assert [entry.step for entry in journal.entries()] == [1]
    assert list((journal.root / "run" / "entries").glob(".*")) == []  # nothing half-written either
    assert train(journal, 2).step == 2


def test_what_a_killed_writer_left_is_no_entry(journal: Journal):
    train(journal, 1)
    (journal.root / "run" / "entries" / ".00000002.train.abc.tmp").write_bytes(b"half")
    assert [entry.step for entry in journal.entries()] == [1]
    assert journal.last_step() == 1


def test_results_survive_a_new_process(journal: Journal):
    entry = train(journal, 1)
    assert journal.result(entry) is None
    done(journal, entry, loss_mean=0.5, error=None)
    again = Journal(journal.root, "run")
    assert again.result(entry) == Result("00000001.train", 1, 0.5, payload(1).digest())
    assert again.results() == [again.result(entry)]


def test_a_checkpoint_covers_only_what_is_answered(journal: Journal):
    for step in (1, 2, 3):
        entry = train(journal, step)
        if step != 2:
            done(journal, entry)
    journal.forget_covered(2)
    assert [entry.step for entry in journal.entries()] == [2, 3]
    assert journal.last_step() == 3


def test_old_results_are_forgotten_but_their_steps_are_not_taken_again(journal: Journal):
    last = KEPT_RESULTS + 2
    for step in (1, 2, 3, last):
        journal.finish(Entry(step, 0, "train"), Result(f"{step:08d}.train", step, digest="x"))
    journal.forget_covered(last)
    assert [result.entry for result in journal.results()] == ["00000003.train", f"{last:08d}.train"]
    with conflict("step: 1 of run 'run' was trained too long ago to compare"):
        train(journal, 1)
    assert train(journal, last + 1).step == last + 1


# ---- rewind ----


def rewound(journal: Journal, target: int) -> list[str]:
    """What the sidecar does with a rewind, but for the weights."""
    entry = journal.accept_rewind(run_id="run", target=target)
    aside = journal.set_aside_after(entry)
    done(journal, entry)
    journal.drop(entry)
    return sorted(aside)


@pytest.mark.parametrize("target", [0, 1, 2, 3])
def test_a_rewind_makes_its_target_the_last_step(journal: Journal, target: int):
    for step in (1, 2, 3):
        done(journal, train(journal, step), loss_mean=float(step))
    aside = rewound(journal, target)
    assert len(aside) == 2 * (3 - target)
    assert journal.last_step() == target
    assert train(journal, target + 1, 50).step == target + 1  # other content is free to follow
    assert journal.result(Entry(target + 1, 0, "train")) is None
    kept = [p.name for p in (journal.root / "run").rglob("*.train*") if "set_aside" in p.parts]
    assert sorted(kept) == aside  # nothing is lost


def test_rewinding_again_and_again(journal: Journal):
    for target in (0, 1, 0, 2, 1):
        while journal.last_step() < 3:
            done(journal, train(journal, journal.last_step() + 1, np.random.default_rng().random()))
        rewound(journal, target)
        assert journal.last_step() == target
        assert journal.entries() == [Entry(step, 0, "train") for step in range(1, target + 1)]


def test_a_rewind_far_back_remembers_its_target(journal: Journal):
    """Results that old are gone; without them the run would seem to begin anew."""
    last = KEPT_RESULTS + 500
    for step in range(last - 2, last + 1):
        journal.finish(Entry(step, 0, "train"), Result(f"{step:08d}.train", step, digest="x"))
    rewound(journal, 100)
    assert journal.last_step() == 100
    assert train(journal, None).step == 101


def test_a_rewind_ahead_is_refused(journal: Journal):
    train(journal, 1)
    with conflict("rewind_to: 2, but the last step of run 'run' is 1"):
        journal.accept_rewind(run_id=None, target=2)


def test_nothing_new_is_accepted_during_a_rewind(journal: Journal):
    first = train(journal, 1)
    rewind = journal.accept_rewind(run_id=None, target=0)
    for ask in (
        lambda: train(journal, 2),
        lambda: journal.accept_training(payload(), run_id=None, step=None),
        lambda: journal.accept_rewind(run_id=None, target=1),
        lambda: journal.accept_save(run_id=None),  # it would be set aside, and its caller would wait for ever
    ):
        with conflict("a rewind of run 'run' to step 0 is in progress"):
            ask()
    assert train(journal, 1) == first  # an entry that exists may be sent again
    journal.finish(rewind, Result(rewind.name, 0))
    assert train(journal, 2).step == 2


def test_a_save_names_its_step_even_before_that_has_arrived(journal: Journal):
    train(journal, 1)
    assert journal.accept_save(run_id=None, step=2).name == "00000002.save.1"
    assert train(journal, 2).step == 2
    assert [entry.kind for entry in journal.entries()] == ["train", "train", "save"]
    with conflict("step: 4, but the last step of run 'run' is 2"):
        journal.accept_save(run_id=None, step=4)


def test_a_save_that_is_asked_for_again_while_it_waits_is_one_entry(journal: Journal):
    """A caller whose deadline is shorter than a reload would otherwise queue another reload with each attempt."""
    train(journal, 1)
    first = journal.accept_save(run_id=None, step=1)
    assert journal.accept_save(run_id=None, step=1) == first
    train(journal, 2)
    assert journal.accept_save(run_id=None, step=2) != first
    done(journal, first)
    assert journal.accept_save(run_id=None, step=1).name == "00000001.save.2"


def test_whoever_waits_for_what_a_rewind_took_out_is_told(journal: Journal):
    """Such as a step that another process accepted between the rewind's check and its entry."""
    train(journal, 1)
    rewind = journal.accept_rewind(run_id=None, target=1)
    late = Entry(2, 0, "train")
    (journal.root / "run" / "entries" / late.name).touch()
    assert journal.result(late) is None
    journal.set_aside_after(rewind)
    assert "removed by a rewind" in (journal.result(late).error or "")


# ---- the sidecar's lock ----


def test_one_sidecar_and_a_higher_epoch_each_time(journal: Journal):
    assert not journal.is_followed()
    with journal.lock() as first:
        assert journal.is_followed()
        other = Journal(journal.root, "run")
        with (
            pytest.raises(RlhfError, match=re.escape(f"another sidecar follows the journal in {journal.root}")),
            other.lock(patience_s=0),
        ):
            pass
    assert not journal.is_followed()
    with journal.lock() as second:
        assert second == first + 1


def test_a_server_looking_does_not_cost_the_sidecar_its_lock(journal: Journal):
    with journal.lock():
        pass
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            journal.is_followed()

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for _ in range(20):
            with Journal(journal.root, "run").lock():
                pass
    finally:
        stop.set()
        looker.join()


def test_heartbeat(journal: Journal):
    assert journal.heartbeat() is None
    with journal.lock():
        beat = Heartbeat(1, 2, 3, "training", 4.5)
        journal.beat(beat)
    assert journal.heartbeat() == beat


def test_a_save_names_its_step_and_stands_behind_it(journal: Journal):
    train(journal, 1)
    early = journal.accept_save(run_id="run", step=2)  # it overtook its step
    assert journal.last_step() == 1  # a save is no step
    train(journal, 2)
    train(journal, 3)
    done(journal, early)
    late = journal.accept_save(run_id="run", step=2)
    names = ["00000001.train", "00000002.train", early.name, late.name, "00000003.train"]
    assert [entry.name for entry in journal.entries()] == names
    with conflict("step: 5, but the last step of run 'run' is 3"):
        journal.accept_save(run_id="run", step=5)
