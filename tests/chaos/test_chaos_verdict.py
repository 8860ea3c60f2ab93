"""`chaos.verdict`: each promise is kept by a faultless record, and broken by the one fault it is there for."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace as changed
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from chaos.reference import Reference, ReferenceStep
from chaos.traffic import RequestRecord, Served
from chaos.verdict import (
    check_checkpoint,
    check_coverage,
    check_freshness,
    check_order,
    check_repeats,
    check_scores,
    check_steps,
    check_versions,
    check_whole,
)
from python_backend.client.client import TrainAnswer
from python_backend.store.journal import Result
from python_backend.store.weights import Manifest, WeightsStore

LOSSES = (0.5, 0.25, 0.125)
STEPS_OF = {0: 0, 1: 1, 2: 2, 3: 3}


def sha(step: int) -> str:
    return hashlib.sha256(str(step).encode()).hexdigest()


def values(step: int) -> np.ndarray:
    return np.asarray([[step, step + 0.5]], np.float32)


def served(version: int, *, value: float = 0.0, reward: float = 0.0) -> Served:
    return Served(
        0,
        (version,),
        np.asarray([[2.0 + reward]], np.float32).tobytes(),
        (values(version) + np.float32(value)).tobytes(),
    )


@pytest.fixture
def reference(tmp_path: Path) -> Reference:
    steps = [ReferenceStep(loss, sha(i), [values(i)]) for i, loss in enumerate((None, *LOSSES))]
    folder = tmp_path / "reference"
    folder.mkdir()
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    save_file({"exp_avg/w": torch.zeros(3)}, folder / "optimizer.safetensors")
    return Reference(steps, [np.asarray([2.0], np.float32)], folder)


@pytest.fixture
def record() -> RequestRecord:
    answers = [(step, float(step), TrainAnswer(loss, step)) for step, loss in enumerate(LOSSES, 1)]
    record = RequestRecord(trained=answers, repeated=[(2, answers[1][2])])
    record.served.update([served(0), served(2), served(2), served(3)])
    return record


def results() -> dict[int, Result]:
    return {step: Result(f"{step:08d}.train", step, loss, "digest") for step, loss in enumerate(LOSSES, 1)}


def manifests() -> list[Manifest]:
    return [Manifest(version, "run", version, sha(version), {}, None, 1) for version in range(4)]


# ---- steps ----


def test_faultless_steps_are_kept(record: RequestRecord, reference: Reference):
    assert (
        check_steps(record, results(), reference).sentence().startswith("kept    each accepted step was trained once")
    )


NEXT_LOSS = (3, 3.0, TrainAnswer(float(np.nextafter(np.float32(LOSSES[2]), np.float32(1))), 3))
OTHER_VERSION = (3, 3.0, TrainAnswer(LOSSES[2], 2))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda record, known: record.trained.reverse(), "steps 3, 2, 1 were acknowledged, steps 1 to 3 were sent"),
        (lambda record, known: record.trained.pop(1), "steps 1, 3 were acknowledged, steps 1 to 3 were sent"),
        (lambda record, known: record.trained.insert(1, record.trained[0]), "steps 1, 1-3 were acknowledged"),
        (lambda record, known: known.pop(2), "the journal has results of steps 1, 3"),
        (lambda record, known: known.update({4: changed(known[3], entry="00000004.train")}), "results of steps 1-4"),
        (lambda record, known: known.update({2: changed(known[2], error="not finite")}), "error: not finite"),
        (
            lambda record, known: known.update({3: changed(known[3], loss_mean=float(np.nextafter(LOSSES[2], 1)))}),
            "step 3 has loss 0.125000",
        ),
        (lambda record, known: record.trained.__setitem__(2, NEXT_LOSS), "step 3 was answered with"),
        (
            lambda record, known: record.trained.__setitem__(2, (3, 3.0, TrainAnswer(LOSSES[2], 2))),
            "step 3 was answered with",
        ),
        (lambda record, known: record.refusals.append("step 2: sent"), "rejected or not answered: step 2: sent"),
    ],
)
def test_a_fault_in_the_steps_is_named(
    record: RequestRecord, reference: Reference, fault: Callable[[RequestRecord, dict[int, Result]], None], words: str
):
    known = results()
    fault(record, known)
    found = check_steps(record, known, reference)
    assert words in found.sentence()
    assert (found.kept, len(found.violations)) == (False, 1)


def test_a_repeat_with_another_answer_is_named(record: RequestRecord):
    assert check_repeats(record).kept
    record.repeated.append((3, TrainAnswer(LOSSES[2], 4)))
    assert "step 3 was answered with" in check_repeats(record).sentence()


# ---- versions ----


def test_faultless_versions_are_kept(reference: Reference):
    assert check_versions(manifests(), 3, reference).kept


@pytest.mark.parametrize(
    ("change", "current", "words"),
    [
        ({"sha256": sha(9)}, 3, f"version 2 of step 2 has sha256 {sha(9)[:12]}…, without faults it is {sha(2)[:12]}…"),
        ({"step": 1, "sha256": sha(1)}, 3, "the versions are of steps 0-1, 1, 3"),
        ({}, 2, "CURRENT names 2, the last version is 3"),
    ],
)
def test_a_fault_in_the_versions_is_named(reference: Reference, change: dict[str, object], current: int, words: str):
    every = manifests()
    every[2] = changed(every[2], **change)  # type: ignore[arg-type]
    found = check_versions(every, current, reference)
    assert words in found.sentence()
    assert len(found.violations) == 1


def test_versions_go_back_where_the_run_was_rewound_and_only_there(reference: Reference):
    steps = [0, 1, 2, 1, 2, 3]
    every = [Manifest(version, "run", step, sha(step), {}, None, 1) for version, step in enumerate(steps)]
    assert check_versions(every, 5, reference, {1}).kept
    assert not check_versions(every, 5, reference, {2}).kept
    assert not check_versions(every[:-1], 4, reference, {1}).kept


@pytest.fixture
def store(tmp_path: Path) -> WeightsStore:
    store = WeightsStore(tmp_path / "weights")
    for step in range(2):

        def write(folder: Path, step: int = step) -> None:
            save_file({"w": torch.full((64,), float(step))}, folder / "model.safetensors")

        store.add(write, run_id="run", step=step, parent=None, epoch=1)
    return store


def test_a_torn_version_is_named(store: WeightsStore):
    assert check_whole(store).sentence() == "kept    the files of every version match its manifest (2 checked)"
    path = store.folder(1) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    assert check_whole(store).violations[0].startswith("version 1: cannot read model.safetensors")


def test_a_changed_byte_is_named(store: WeightsStore):
    path = store.folder(1) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert "version 1: model.safetensors has sha256" in check_whole(store).violations[0]


# ---- scores ----


def test_faultless_scores_are_kept(record: RequestRecord, reference: Reference):
    assert check_scores(record, STEPS_OF, reference).sentence() == "kept    no reward or value was wrong (4 checked)"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (served(2, value=2e-5), "values of probe 0 by version 2: off by 2e-05"),
        (served(2, value=float("nan")), "values of probe 0 by version 2: off by nan"),
        (served(2, reward=2e-5), "rewards of probe 0 by version 2: off by 2e-05"),
        (changed(served(2), versions=(1,)), "values of probe 0 by version 1: off by 1"),
        (
            changed(served(2), versions=(2, 3)),
            "probe 0 was scored by versions (2, 3), expected a single existing version",
        ),
        (
            changed(served(2), versions=(7,)),
            "probe 0 was scored by versions (7,), expected a single existing version",
        ),
        (changed(served(2), values=b""), "values of probe 0 by version 2: 0 numbers, not 2"),
    ],
)
def test_a_wrong_score_is_named(record: RequestRecord, reference: Reference, answer: Served, words: str):
    record.served[answer] += 1
    assert check_scores(record, STEPS_OF, reference).violations == [words]


def test_an_old_version_after_a_newer_answer_is_named(record: RequestRecord):
    assert check_freshness(record).kept
    record.stale.append((4.25, 2, 3))
    assert check_freshness(record).violations == [
        "at 4.2 s a row was scored by version 2, after version 3 had been reported as served"
    ]


# ---- the rest ----


def test_a_checkpoint_is_compared_tensor_by_tensor(reference: Reference, tmp_path: Path):
    last = tmp_path / "3"
    shutil.copytree(reference.checkpoint, last)
    assert check_checkpoint(last, reference).kept
    save_file({"exp_avg/w": torch.tensor([0.0, 0.0, 1e-30])}, last / "optimizer.safetensors")
    assert check_checkpoint(last, reference).violations == ["optimizer.safetensors: exp_avg/w differs"]
    save_file({"other": torch.zeros(3)}, last / "optimizer.safetensors")
    assert len(check_checkpoint(last, reference).violations) == 2
    (last / "optimizer.safetensors").unlink()
    assert check_checkpoint(last, reference).violations == ["3/optimizer.safetensors is missing"]


def test_what_is_left_behind_is_named():
    assert check_order([], []).kept
    assert check_order(["process 7: stub"], ["the sidecar ended"]).violations == [
        "process 7: stub",
        "the sidecar ended",
    ]


def test_a_victim_that_was_missed_is_named():
    plan = [("sidecar", "verify"), ("critic", "idle")]
    kills = [{"victim": victim, "point": point, "hit": True} for victim, point in plan]
    assert check_coverage(kills, plan).kept
    kills[1]["hit"] = False
    assert check_coverage(kills, plan).violations == [
        "no kill hit the victim 'critic'",
        "no kill hit the point 'idle'",
    ]
