"""The journal and critic_save: an accepted entry is on disk, once and in order; conflicting requests are refused."""

import contextlib
import dataclasses
import errno
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from journal_entries import done, payload, train
from safetensors import safe_open
from safetensors.numpy import load_file
from triton_python_backend_utils import Request

from rlhf_triton.errors import RlhfError
from rlhf_triton.python_backend.serving.critic_save import TritonPythonModel
from rlhf_triton.store.heartbeat import Heartbeat
from rlhf_triton.store.journal import KEPT_RESULTS, Entry, Journal, Result
from rlhf_triton.store.journal_entry import DamagedEntry, read_training_file
from rlhf_triton.store.ownership import Sender
from rlhf_triton.wire.contract import STATUS, WEIGHTS_VERSION, ContractError

WRITE_AND_STALL = """
import sys
from pathlib import Path
from rlhf_triton.store.durable import staged_file
with staged_file(Path(sys.argv[1]), [b"half of an entry"]):
    print("writing", flush=True)
    sys.stdin.read()
"""


def conflict(text):
    """Expect a refusal with these words."""
    return contextlib.nullcontext() if text is None else pytest.raises(ContractError, match=re.escape(text))


def rewound(journal, target, sender=None, error=None):
    """Rewind the journal as the sidecar does, without the weights."""
    entry = journal.accept_rewind(run_id="run", target=target, sender=sender)
    owners = journal.owners(entry)
    if error is None:
        journal.set_aside_after(entry)
    done(journal, entry, error=error, owners=owners[error is not None :])
    journal.drop(entry)
    return entry


def entries_folder(journal):
    return journal.root / "run" / "entries"


class JournalMachine(RuleBasedStateMachine):
    """Compares the journal with a dict of accepted entries; each call reopens it, as other processes do."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(os, "fsync", lambda descriptor: None)  # it takes most of the time
        self.contents = {}  # payloads of the accepted steps
        self.pending = []  # without a result
        self.kept = set()  # training entries that have one, until a checkpoint covers them

    def teardown(self):
        self.patch.undo()
        self.folder.cleanup()

    @property
    def journal(self):
        return Journal(Path(self.folder.name), "run")

    def rewinding(self, otherwise=None):
        """Return why no new entry is accepted during a rewind."""
        to = [entry.target for entry in self.pending if entry.kind == "rewind"]
        return f"a rewind of run 'run' to step {to[0]} is in progress" if to else otherwise

    @rule(ahead=st.sampled_from([None, None, 1, 1, 1, 0, -1, -2, 2]), value=st.integers(1, 2))
    def train(self, ahead, value):
        last = len(self.contents)
        step = last + 1 if ahead is None else max(1, last + ahead)
        message = self.rewinding()
        if step in self.contents:
            message = None if self.contents[step] == value else f"step: {step} of run 'run' was already sent with other"
        elif step > last + 1:
            message = f"step: {step}, but the last step of run 'run' is {last}; send step {last + 1} first"
        with conflict(message):
            entry = train(self.journal, None if ahead is None else step, value)
            assert entry == Entry(step, 0, "train")
            if step not in self.contents:
                self.contents[step] = value
                self.pending.append(entry)

    @rule(ahead=st.none() | st.integers(-2, 2))
    def save(self, ahead):
        last = len(self.contents)
        step = last if ahead is None else max(0, last + ahead)
        message = f"step: {step}, but the last step of run 'run' is {last}" if step > last + 1 else None
        with conflict(self.rewinding(message)):
            entry = self.journal.accept_save(run_id="run", step=None if ahead is None else step)
            same = [other for other in self.pending if (other.kind, other.step) == ("save", step)]
            if ahead is not None and same:
                assert entry == min(same), "a repeated save is another entry"
            else:
                assert (entry.kind, entry.step) == ("save", step)
                assert entry > max(same, default=Entry(step, 0, "train"))
                self.pending.append(entry)

    @rule(to=st.integers(0, 3))
    def rewind(self, to):
        last = len(self.contents)
        ahead = f"rewind_to: {to}, but the last step of run 'run' is {last}"
        repeated = [entry for entry in self.pending if entry.target == to]
        with conflict(None if repeated else ahead if to > last else self.rewinding()):
            entry = self.journal.accept_rewind(run_id=None, target=to)
            assert (entry.kind, entry.target, [entry]) == ("rewind", to, repeated or [entry])
            self.pending += [] if repeated else [entry]

    @precondition(lambda self: self.pending and min(self.pending).step <= len(self.contents))
    @rule()
    def answer(self):
        entry = min(self.pending)
        if entry.kind == "rewind":
            self.journal.set_aside_after(entry)
            removed = {other for other in {*self.pending, *self.kept} - {entry} if other.step > entry.target}
            self.pending = [other for other in self.pending if other not in removed]
            self.kept -= removed
            self.contents = {step: value for step, value in self.contents.items() if step <= entry.target}
            for other in removed:
                assert "removed by a rewind" in str(self.journal.result(other).error)
        done(self.journal, entry)
        self.pending.remove(entry)
        if entry.kind == "train":
            self.kept.add(entry)
        else:
            self.journal.drop(entry)

    @rule(step=st.integers(0, 6), base=st.sampled_from([None, 0, 1, 2]))
    def cover(self, step, base):
        self.journal.forget_covered(step, base=base)
        self.kept = {entry for entry in self.kept if entry.step > (step if base is None else min(base, step))}

    @invariant()
    def is_what_was_accepted(self):
        assert self.journal.last_step() == len(self.contents)
        assert self.journal.entries() == sorted([*self.pending, *self.kept])
        for entry in self.journal.entries():
            assert (self.journal.result(entry) is None) == (entry in self.pending)
            if entry.kind == "train":
                assert self.journal.load(entry)[0].returns[0] == self.contents[entry.step]


TestJournal = JournalMachine.TestCase
# A failure is short enough to read; to find a shorter one takes minutes.
TestJournal.settings = settings(max_examples=25, stateful_step_count=40, phases=[Phase.generate])


# ---- entries ----


@pytest.mark.parametrize("lengths", [(2,), (17, 2, 300)])
def test_entry_file_is_readable_with_safetensors(journal, lengths):
    plain = payload(0.5, lengths)
    strided = np.repeat(plain.tokens, 2)[::2]  # numpy hands out views of what came over the wire
    entry = journal.accept_training(dataclasses.replace(plain, tokens=strided), run_id="run", step=1)
    assert journal.accept_training(plain, run_id=None, step=1) == entry
    read = load_file(entries_folder(journal) / entry.name)
    (loaded, digest) = journal.load(entry)
    assert read.keys() == plain.arrays().keys()
    for name, array in plain.arrays().items():
        np.testing.assert_array_equal(read[name], array)
        np.testing.assert_array_equal(loaded.arrays()[name], array)
    with safe_open(entries_folder(journal) / entry.name, framework="numpy") as opened:
        assert opened.metadata() == {"digest": plain.digest()} == {"digest": digest}
    assert [path.name for path in entries_folder(journal).iterdir()] == [entry.name]


def test_entries_sort_by_step_and_rank(journal):
    train(journal, 1)
    for number in range(11):
        journal.accept_save(run_id=None, keep_steps=[number, 4])
    journal.accept_rewind(run_id="run", target=1)
    names = [f"00000001.{what}" for what in ("train", *(f"save.{rank}" for rank in range(1, 12)), "rewind.12.1")]
    assert [entry.name for entry in journal.entries()] == names
    assert [Entry.parse(name) for name in names] == journal.entries()
    assert journal.requested_keep_steps(Entry(1, 2, "save")) == [1, 4]
    assert Entry.parse("100000000.train") > Entry.parse("99999999.train")


@pytest.mark.parametrize("kind", ["training", "save", "rewind"])
def test_journal_refuses_requests_of_another_run(journal, kind):
    content = {"training": {"payload": payload(), "step": 1}, "save": {}, "rewind": {"target": 0}}[kind]
    with conflict("run_id: 'other', but this critic belongs to run 'run'"):
        getattr(journal, f"accept_{kind}")(run_id="other", **content)
    assert journal.entries() == []


def test_repeated_request_may_have_another_traceparent(journal):
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    for other in (trace, None, trace.replace("a", "c")):  # repeats of the request
        entry = journal.accept_training(payload(), run_id="run", step=1, traceparent=other)
        assert journal.traceparent(entry) == trace
    assert (journal.load(entry)[1], journal.traceparent(train(journal, 2))) == (payload().digest(), None)
    (entries_folder(journal) / entry.name).write_bytes(b"")
    assert journal.traceparent(entry) is None


def test_full_disk_leaves_no_entry(journal, monkeypatch):
    train(journal, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            train(journal, 2)
    assert [path.name for path in entries_folder(journal).iterdir()] == ["00000001.train"]  # nothing half-written
    assert train(journal, 2).step == 2


def test_step_is_refused_after_its_result_was_pruned(journal):
    last = KEPT_RESULTS + 2
    for step in (1, 2, 3, last):
        journal.finish(Entry(step, 0, "train"), Result(entry=f"{step:08d}.train", weights_version=step, digest="x"))
    journal.forget_covered(last)
    assert [result.entry for result in journal.results()] == ["00000003.train", f"{last:08d}.train"]
    with conflict("step: 1 of run 'run' was trained too long ago to compare"):
        train(journal, 1)
    assert train(journal, last + 1).step == last + 1
    rewound(journal, 2)  # a step without a result
    assert train(journal, None).step == 3


def test_trained_entries_are_archived_once_a_checkpoint_covers_them(journal):
    """The newest ones, and none that failed; the run itself no longer knows them."""

    def on_disk():
        return [(path.parent.name, path.name[:8].lstrip("0")) for path in journal.training_files()]

    for step in range(1, 6):
        done(journal, train(journal, step), loss_mean=None if step == 4 else 0.5)
    train(journal, 6)
    assert on_disk() == [("entries", step) for step in "12356"]
    journal.forget_covered(5, base=2, archive=2)
    assert on_disk() == [("archive", "1"), ("archive", "2"), ("entries", "3"), ("entries", "5"), ("entries", "6")]
    journal.forget_covered(6, archive=2)
    assert on_disk() == [("archive", "3"), ("archive", "5"), ("entries", "6")]
    assert [read_training_file(path)[0].returns[0] for path in journal.training_files()] == [3, 5, 6]
    assert [entry.step for entry in journal.entries()] == [6]
    assert (journal.last_step(), train(journal, 7).step) == (6, 7)
    done(journal, Entry(6, 0, "train"))
    done(journal, Entry(7, 0, "train"))
    journal.set_aside_after(journal.accept_rewind(run_id="run", target=4))
    assert on_disk() == [("archive", "3")]
    journal.forget_covered(4)
    assert on_disk() == []


def test_requests_of_an_owner_before_a_rewind_are_refused(journal):
    owner = Sender("second", 2)
    for sender in (Sender("first", 1), Sender("second", 1), owner):
        rewound(journal, 0, sender)
    last = 2 * KEPT_RESULTS
    for step in (1, last):
        journal.finish(Entry(step, 0, "train"), Result(entry=f"{step:08d}.train", weights_version=step, digest="x"))
    journal.forget_covered(last)
    assert len(journal.results()) == 2, "results remain besides the last step's and the newest rewind's"
    assert journal.owners() == ["second/2", "second/1", "first/1"]
    for late in (Sender("first", 1), Sender("second", 1)):
        for ask in (
            lambda sender: journal.accept_training(payload(), run_id="run", step=last + 1, sender=sender),
            lambda sender: journal.accept_save(run_id="run", sender=sender),
            lambda sender: journal.accept_rewind(run_id="run", target=last - 5, sender=sender),
        ):
            with conflict("run 'run' was rewound after this request was sent"):
                ask(late)
    assert journal.accept_training(payload(), run_id="run", step=last + 1, sender=owner).step == last + 1


def test_a_duplicate_rewind_changes_nothing(journal):
    """A server hung with the first attempt; another server completed the second, and the actor has trained since."""
    done(journal, train(journal, 1))
    first = rewound(journal, 0, Sender("actor", 1))
    done(journal, train(journal, 1))
    assert journal.accept_rewind(run_id="run", target=0, sender=Sender("actor", 1)) == first
    assert journal.entries() == [Entry(1, 0, "train")]
    assert rewound(journal, 0, Sender("actor", 2)) > first  # another request is served
    assert journal.entries() == []


def test_a_rewind_that_failed_does_not_change_the_owner(journal):
    rewound(journal, 0, Sender("old", 1))
    rewound(journal, 0, Sender("new", 1), error="0 cannot be reached")
    assert journal.owners() == ["old/1"]
    assert rewound(journal, 0, Sender("new", 1)).rank == 3, "a failed rewind is not tried again"


def test_rewind_removes_the_newest_entries_first(journal, monkeypatch):
    for step in range(1, 7):
        train(journal, step)
    rewind = journal.accept_rewind(run_id=None, target=2)
    rename = Path.rename
    left = []

    def renamed(path, target):
        left.append([entry.step for entry in journal.entries() if entry.kind == "train"])
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    journal.set_aside_after(rewind)
    assert left == [list(range(1, last + 1)) for last in (6, 5, 4, 3)]


def test_rewind_sets_removed_entries_aside(journal):
    for number in ("1", "2", "3"):
        done(journal, train(journal, 1))
        rewound(journal, 0)
        journal.forget_aside(keep=1)
        (folder,) = (journal.root / "run" / "set_aside").iterdir()
        assert folder.name == number
        assert sorted(path.name for path in folder.glob("*.train*")) == ["00000001.train", "00000001.train.json"]


# ---- damage ----


def test_load_detects_damage_anywhere_in_an_entry(tmp_path):
    journal = Journal(tmp_path / "journal", "run")
    entry = train(journal, 1)
    path = entries_folder(journal) / "00000001.train"
    data = path.read_bytes()
    (mine, other) = (payload(value).digest().encode() for value in (1, 2))
    flipped = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in (3, 20, 60, len(data) - 1)]
    for damaged in (*flipped, data.replace(mine, other), *(data[:size] for size in range(0, len(data), 7))):
        path.write_bytes(damaged)
        with pytest.raises(DamagedEntry, match=r"00000001\.train is damaged"):
            journal.load(entry)


def test_repeated_step_with_a_damaged_entry_returns_the_same_entry(journal):
    entry = train(journal, 1)
    (entries_folder(journal) / entry.name).write_bytes(b"?")
    assert train(journal, 1) == entry
    for _ in range(2):  # a sidecar killed between the two begins again
        journal.set_aside_damaged(entry)
    journal.finish(entry, Result(entry=entry.name, weights_version=0, error="it is damaged"))
    assert train(journal, 1) == entry
    assert train(journal, 2).step == 2
    assert [path.read_bytes() for path in (journal.root / "run" / "set_aside").glob("*/*")] == [b"?"]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"epoch": 1'])
def test_invalid_heartbeat_file_counts_as_none(journal, content):
    journal.root.mkdir()
    (journal.root / "heartbeat.json").write_text(content)
    assert journal.heartbeat() is None


# ---- others act meanwhile ----


def send_during(journal, step, meanwhile):
    """Call `meanwhile` after the payload is written, before the step is accepted."""
    sending = Journal(journal.root, "run")
    accepting = sending._accepting

    def late(sender):
        meanwhile()
        return accepting(sender)

    sending._accepting = late
    return sending.accept_training(payload(), run_id="run", step=step)


def unfinished(journal):
    return list(entries_folder(journal).glob(".*"))


def test_a_rewind_that_completes_during_an_accept_leaves_no_gap(journal):
    for step in (1, 2, 3):
        done(journal, train(journal, step))
    with conflict("step: 4, but the last step of run 'run' is 1; send step 2 first; the run was rewound from step 3"):
        send_during(journal, 4, lambda: rewound(journal, 1))
    assert [path.name for path in entries_folder(journal).iterdir()] == ["00000001.train"]
    assert send_during(journal, None, lambda: rewound(journal, 0)).step == 1
    with conflict("a rewind of run 'run' to step 0 is in progress"):
        send_during(journal, 2, lambda: journal.accept_rewind(run_id=None, target=0))
    assert [entry.kind for entry in journal.entries()] == ["train", "rewind"]


def test_concurrent_duplicate_steps_become_one_entry(journal):
    first = send_during(journal, 1, lambda: train(Journal(journal.root, "run"), 1, 0.0))
    assert journal.entries() == [first]
    assert len(list(entries_folder(journal).iterdir())) == 1


def test_accept_times_out_if_a_suspended_writer_holds_the_lock(journal, monkeypatch):
    train(journal, 1)
    monkeypatch.setattr("rlhf_triton.store.journal.ACCEPT_PATIENCE_S", 0.05)
    other = Journal(journal.root, "run")
    for ask in (lambda: train(other, 2), lambda: other.accept_save(run_id=None)):
        with journal._accepting(None), pytest.raises(OSError, match=r"locked by another process .*ACCEPT"):
            ask()
    assert [path.name for path in entries_folder(journal).iterdir()] == ["00000001.train"]
    assert train(journal, 2).step == 2


def test_sweep_removes_temporary_files_of_dead_writers_only(journal):
    train(journal, 1)
    command = [sys.executable, "-c", WRITE_AND_STALL, str(entries_folder(journal))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"writing\n"
        journal.sweep()
        assert len(unfinished(journal)) == 1
        assert journal.last_step() == 1
        child.kill()
        child.wait()
    journal.sweep()
    assert unfinished(journal) == []


def test_sidecar_lock_is_exclusive_and_raises_the_epoch(journal):
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


# ---- critic_save ----


HOUR_S = 3600.0


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Return critic_save of run `run`; 0.4 s without a heartbeat are too long."""
    monkeypatch.setattr("rlhf_triton.python_backend.serving.journal_model.FOLLOWER_GRACE_S", 0.05)
    monkeypatch.setattr("rlhf_triton.python_backend.serving.journal_model.HEARTBEAT_TIMEOUT_S", 0.4)
    parameters = {"journal": str(tmp_path), "run_id": "run"}
    config = {"name": "critic_save", "parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    model = TritonPythonModel()
    model.initialize({"model_config": json.dumps(config)})
    yield model
    model.finalize()


def ask(model, sender, **inputs):
    """Send a request with the header that names its sender; returns what waits for its response."""
    arrays = {name: np.atleast_1d(np.asarray(value, np.int64)) for name, value in inputs.items()}
    request = Request(arrays, (STATUS, WEIGHTS_VERSION), json.dumps({"X-Triton-Sender": sender}))
    model.execute([request])
    return functools.partial(request.responses.get, timeout=120)


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
def test_request_fails_if_the_sidecar_is_silent_despite_clock_skew(model, monkeypatch, ahead_s):
    """A full disk keeps the sidecar from writing its heartbeat, so the server looks at the disk itself."""
    journal = model.served.journal
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("rlhf_triton.python_backend.serving.journal_model.refusal", lambda _: full)
    with journal.lock():
        journal.write_heartbeat(Heartbeat(epoch=1, step=7, micro_batch=0, state="training", time=time.time() + ahead_s))
        error = str(ask(model, "", rewind_to=0)().error)
    assert "the sidecar has made no progress for" in error
    assert "(step 7, micro-batch 0, training); the journal's disk cannot be written: No space left on device" in error


def test_request_that_cannot_be_processed_now_fails_with_the_cause_and_stays_in_the_journal(model, monkeypatch):
    monkeypatch.setattr("rlhf_triton.python_backend.serving.journal_model.HEARTBEAT_TIMEOUT_S", HOUR_S)
    journal = model.served.journal
    kept = "the save after step 0 of run 'run' is in the journal and will be processed: repeat the request"
    missing = "UNAVAILABLE: no sidecar follows the journal: start `python -m rlhf_triton.trainer`; "
    assert str(ask(model, "", dummy_var=0, step=0)().error).startswith(missing + kept)
    with journal.lock():
        now = time.time()
        blocked = Heartbeat(
            epoch=1, step=2, micro_batch=0, state="publishing step 2", time=now, trouble="No space left"
        )
        journal.write_heartbeat(blocked)
        error = str(ask(model, "", dummy_var=0, step=0)().error)
        assert f"the sidecar cannot continue (publishing step 2): No space left; {kept}" in error
    assert [entry.kind for entry in journal.entries()] == ["save"]
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    error = str(ask(model, "", rewind_to=0)().error)
    assert error.startswith("UNAVAILABLE: the journal cannot be written: ")
    assert "No space left on device" in error
    assert len(journal.entries()) == 1


@pytest.mark.parametrize(
    ("sender", "is_served"),
    [("old/1", False), ("new/0", False), *((sender, True) for sender in ("new/1", "", "curl", "5", "/1", "a/-1"))],
)
def test_sender_header_decides_whether_a_request_is_served_after_a_rewind(model, sender, is_served):
    journal = model.served.journal
    for owner in ("old", "new"):
        rewound(journal, 0, Sender(owner, 1))
    with journal.lock():
        response = ask(model, sender, dummy_var=0, step=0, keep_steps=[3, 0])
        for entry in journal.entries():
            assert journal.requested_keep_steps(entry) == [0, 3]
            journal.finish(entry, Result(entry=entry.name, weights_version=7))
        answer = response()
    if is_served:
        assert answer.outputs[WEIGHTS_VERSION].tolist() == [7]
    else:
        assert "INVALID_ARG: run 'run' was rewound after this request was sent" in str(answer.error)
