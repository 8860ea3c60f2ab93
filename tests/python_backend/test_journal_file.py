"""A training entry's file: written in parts, with a digest that comes last, it is the file that safetensors reads."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from python_backend.store import journal_file
from python_backend.store.durable import staged_file
from python_backend.store.journal import Journal
from python_backend.store.journal_file import TrainingFile
from python_backend.wire.contract import ContractError, Limits, StepConflict
from python_backend.wire.training_payload import TrainPayload, sent_payload


def payload(*lengths: int) -> TrainPayload:
    generator = np.random.default_rng(sum(lengths))
    total = sum(lengths)
    targets = (generator.normal(size=total - len(lengths)).astype(np.float32) for _ in range(3))
    return TrainPayload(generator.integers(0, 100, total), np.asarray(lengths, np.int64), *targets)


@pytest.mark.parametrize("lengths", [(2,), (5, 3), (17, 2, 300)])
def test_safetensors_reads_what_was_written(lengths: tuple[int, ...], tmp_path: Path):
    content = payload(*lengths)
    file = TrainingFile(content)
    with staged_file(tmp_path, file.parts(), first=file.header) as staged:
        staged.rename(tmp_path / "entry")
    read = load_file(tmp_path / "entry")
    assert read.keys() == content.arrays().keys()
    assert all(np.array_equal(read[name], array) for name, array in content.arrays().items())
    with safe_open(tmp_path / "entry", framework="numpy") as opened:
        assert opened.metadata() == {"digest": content.digest()}
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_the_trace_of_a_request_is_not_part_of_its_content(tmp_path: Path):
    journal, content, trace = Journal(tmp_path, "run"), payload(5, 3), f"00-{'a' * 32}-{'b' * 16}-01"
    entry = journal.accept_training(content, run_id="run", step=1, traceparent=trace)
    accepted = (tmp_path / "run" / "entries" / entry.name).read_bytes()
    for other in (None, trace.replace("a", "c")):  # repeats of the request
        assert journal.accept_training(content, run_id="run", step=1, traceparent=other) == entry
    assert (tmp_path / "run" / "entries" / entry.name).read_bytes() == accepted
    assert journal.traceparent(entry) == trace
    assert journal.load(entry)[1] == content.digest()
    untraced = journal.accept_training(content, run_id="run", step=2)
    assert journal.traceparent(untraced) is None
    assert journal.load(untraced)[1] == content.digest()
    (tmp_path / "run" / "entries" / entry.name).write_bytes(b"")
    assert journal.traceparent(entry) is None


def test_arrays_that_are_not_contiguous_are_the_same_entry(tmp_path: Path):
    """numpy hands out views of what came over the wire; identity is of content."""
    plain = payload(4, 4)
    strided = TrainPayload(np.repeat(plain.tokens, 2)[::2], plain.lengths, plain.returns, plain.prev_values, plain.mask)
    assert not strided.tokens.flags.c_contiguous
    journal = Journal(tmp_path, "test")
    entry = journal.accept_training(strided, run_id=None, step=1)
    assert journal.accept_training(plain, run_id=None, step=1) == entry
    assert np.array_equal(journal.load(entry)[0].tokens, plain.tokens)


@pytest.mark.parametrize("step", [1, 2, 9])
def test_content_that_is_refused_is_not_accepted_whatever_its_step(step: int, tmp_path: Path):
    """The check runs while the file is written: a step that is new, one known, and one that does not fit."""
    journal = Journal(tmp_path, "test")
    journal.accept_training(payload(4, 4), run_id=None, step=1)

    def refuse() -> None:
        raise ContractError("returns[0, 1]: nan, must be finite")

    with pytest.raises(ContractError, match="must be finite"):
        journal.accept_training(payload(7, 3), run_id=None, step=step, check=refuse)
    assert [path.name for path in (tmp_path / "test" / "entries").iterdir()] == ["00000001.train"]


def test_rows_without_padding_are_not_copied_and_mean_the_same():
    tokens = np.arange(12).reshape(3, 4)
    targets = np.arange(9, dtype=np.float32).reshape(3, 3)
    arrays = {"tokens": tokens, "returns": targets, "prev_values": targets, "mask": np.ones_like(targets)}
    full = sent_payload(arrays, Limits(100)).packed()
    assert np.shares_memory(full.tokens, tokens)
    assert np.shares_memory(full.returns, targets)
    wide = {name: np.pad(array, ((0, 0), (0, 2))) for name, array in arrays.items()}
    assert sent_payload(wide, Limits(100)).packed().digest() == full.digest()


def test_a_refused_step_leaves_no_thread_on_the_callers_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Inside tritonserver they are the request's shared memory, which goes back when the call returns."""
    finished = []

    def slow(array: np.ndarray) -> bytes:
        time.sleep(0.05)
        finished.append(array)
        return b"digest"

    monkeypatch.setattr(journal_file, "field_digest", slow)
    with pytest.raises(StepConflict, match="send step 1 first"):
        Journal(tmp_path, "test").accept_training(payload(4, 4), run_id=None, step=9)
    assert len(finished) == 5
