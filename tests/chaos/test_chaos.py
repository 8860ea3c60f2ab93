"""`python -m tools chaos`: its plan, batches and kill points; and the short forms of the crash test and soak test."""

import asyncio
import hashlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file
from tritonclient.utils import InferenceServerException

from chaos.crash import (
    POINTS,
    VICTIMS,
    Points,
    _drive,
    check_checkpoint,
    check_coverage,
    check_freshness,
    check_order,
    check_repeats,
    check_scores,
    check_steps,
    check_versions,
    check_whole,
    main,
    plan_kills,
    stop_for,
    stop_for_good,
    summary,
    ways_of,
)
from chaos.reference import Reference, ReferenceStep
from chaos.soak import (
    Ended,
    ProcessUsage,
    UsageSample,
    check_disk,
    check_processes,
    check_responses,
    check_survival,
    check_updates,
)
from chaos.system import Background, write_config
from chaos.traffic import LONGEST, VOCAB_SIZE, RequestRecord, Served, Traffic, batch
from python_backend.client.client import TrainAnswer
from python_backend.client.errors import RequestFailed, RequestRefused
from python_backend.config import RunConfig, load_config
from python_backend.store.journal import Heartbeat, Journal, Result
from python_backend.store.jsonl import write_jsonl
from python_backend.store.weights import Manifest, WeightsStore
from python_backend.wire.contract import Limits
from python_backend.wire.training_payload import train_payload

LOSSES = (0.5, 0.25, 0.125)
STEPS_OF = {0: 0, 1: 1, 2: 2, 3: 3}


def files(step: int) -> dict[str, str]:
    return {"model.safetensors": hashlib.sha256(str(step).encode()).hexdigest()}


def sha(step: int) -> str:
    """The digest of a version with these files."""
    return Manifest(0, "run", step, files(step), {}, None, 1).digest


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
    return [Manifest(version, "run", version, files(version), {}, None, 1) for version in range(4)]


# ---- steps ----


def test_a_faultless_record_keeps_its_promises(record: RequestRecord, reference: Reference):
    steps, scores = check_steps(record, results(), reference), check_scores(record, STEPS_OF, reference)
    assert steps.sentence().startswith("kept    each accepted step was trained once")
    assert scores.sentence() == "kept    no reward or value was wrong (4 checked)"
    assert check_versions(manifests(), 3, reference).kept


NEXT_LOSS = (3, 3.0, TrainAnswer(float(np.nextafter(np.float32(LOSSES[2]), np.float32(1))), 3))
OTHER_VERSION = (3, 3.0, TrainAnswer(LOSSES[2], 2))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda record, known: record.trained.reverse(), "steps [3, 2, 1] were acknowledged, steps 1 to 3 were sent"),
        (lambda record, known: record.trained.pop(1), "steps [1, 3] were acknowledged, steps 1 to 3 were sent"),
        (lambda record, known: known.pop(2), "the journal has results of steps [1, 3]"),
        (
            lambda record, known: known.update({4: replace(known[3], entry="00000004.train")}),
            "results of steps [1, 2, 3, 4]",
        ),
        (lambda record, known: known.update({2: replace(known[2], error="not finite")}), "error: not finite"),
        (
            lambda record, known: known.update({3: replace(known[3], loss_mean=float(np.nextafter(LOSSES[2], 1)))}),
            "step 3 has loss 0.125000",
        ),
        (lambda record, known: record.trained.__setitem__(2, NEXT_LOSS), "step 3 was answered with"),
        (lambda record, known: record.trained.__setitem__(2, OTHER_VERSION), "step 3 was answered with"),
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


@pytest.mark.parametrize(
    ("change", "current", "words"),
    [
        ({"files": files(9)}, 3, f"version 2 of step 2 has digest {sha(9)[:12]}…, without faults it is {sha(2)[:12]}…"),
        ({"step": 1, "files": files(1)}, 3, "the versions are of steps [0, 1, 1, 3]"),
        ({}, 2, "CURRENT names 2, the last version is 3"),
    ],
)
def test_a_fault_in_the_versions_is_named(reference: Reference, change: dict[str, object], current: int, words: str):
    every = manifests()
    every[2] = replace(every[2], **change)  # type: ignore[arg-type]
    found = check_versions(every, current, reference)
    assert words in found.sentence()
    assert len(found.violations) == 1


def test_versions_go_back_where_the_run_was_rewound_and_only_there(reference: Reference):
    steps = [0, 1, 2, 1, 2, 3]
    every = [Manifest(version, "run", step, files(step), {}, None, 1) for version, step in enumerate(steps)]
    assert check_versions(every, 5, reference, {1}).kept
    assert not check_versions(every, 5, reference, {2}).kept
    assert not check_versions(every[:-1], 4, reference, {1}).kept


def test_a_torn_or_changed_version_is_named(tmp_path: Path):
    store = WeightsStore(tmp_path / "weights")
    for step in range(2):
        tensors = {"w": torch.full((64,), float(step))}
        store.add(
            lambda folder, tensors=tensors: save_file(tensors, folder / "model.safetensors"),
            run_id="run",
            step=step,
            parent=None,
            epoch=1,
        )
    assert check_whole(store).sentence() == "kept    the files of every version match its manifest (2 checked)"
    path = store.folder(1) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\x01")
    assert "version 1: model.safetensors has digest" in check_whole(store).violations[0]
    path.write_bytes(content[:-4])
    assert check_whole(store).violations[0].startswith("version 1: cannot read model.safetensors")


# ---- scores ----


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (served(2, value=2e-5), "values of probe 0 by version 2: off by 2e-05"),
        (served(2, value=float("nan")), "values of probe 0 by version 2: off by nan"),
        (served(2, reward=2e-5), "rewards of probe 0 by version 2: off by 2e-05"),
        (replace(served(2), versions=(1,)), "values of probe 0 by version 1: off by 1"),
        (
            replace(served(2), versions=(2, 3)),
            "probe 0 was scored by versions (2, 3), expected a single existing version",
        ),
        (
            replace(served(2), versions=(7,)),
            "probe 0 was scored by versions (7,), expected a single existing version",
        ),
        (replace(served(2), values=b""), "values of probe 0 by version 2: 0 numbers, not 2"),
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


# ---- the soak test ----

USAGE = ProcessUsage(pid=7, rss_mb=400.0, files=30, sockets=20, threads=9)
SAMPLE = UsageSample(0.0, 1, {"actor": USAGE}, 3.0, 4, 2, 900, 6, 40.0)


def calm(seconds: float, **last: Any) -> list[UsageSample]:
    """A sample each minute, with other values in the last quarter: of the actor's process, or of the whole sample."""
    own = {name: value for name, value in last.items() if name in ProcessUsage.__annotations__}
    rest = {name: value for name, value in last.items() if name not in own}
    changed = replace(SAMPLE, processes={"actor": replace(USAGE, **own)}, **rest)
    times = range(0, int(seconds) + 1, 60)
    return [replace(changed if t > seconds * 3 / 4 else SAMPLE, time_s=float(t)) for t in times]


def violations(samples: list[UsageSample]) -> list[str]:
    return [line for item in check_processes(samples) for line in item.violations]


def test_what_is_flat_is_kept_and_what_was_not_measured_is_not():
    assert violations(calm(1800)) == []
    assert violations(calm(1800, rss_mb=900.0, pid=8)) == []  # a process is not compared with its predecessor
    assert violations(calm(240, rss_mb=450.0)) == []  # caches may fill in a short test
    assert violations(calm(240, rss_mb=700.0)) == ["actor had 400 MB, and 700 MB later"]
    assert check_disk(calm(1800)).kept
    assert not any(item.kept for item in [*check_processes([]), check_disk([])])


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"rss_mb": 450.0}, "actor had 400 MB, and 450 MB later"),
        ({"files": 40}, "actor had 30 files, and 40 later"),
        ({"threads": 20}, "actor had 9 threads, and 20 later"),
        ({"sockets": 500}, "actor had 500 sockets, expected at most 96"),
    ],
)
def test_what_grows_in_a_process_is_named(last: dict[str, Any], words: str):
    assert violations(calm(1800, **last)) == [words]


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"shared_memory_mb": 9.0}, "shared_memory_mb was 3, and 9 later"),
        ({"versions": 30}, "versions was 4, and 30 later"),
        ({"journal_entries": 100}, "journal_entries was 2, and 100 later"),
        ({"checkpoints": 20}, "checkpoints was 6, and 20 later"),
        ({"disk_mb": 80.0}, "disk_mb was 40, and 80 later"),
        ({"journal_results": 2000}, "the journal held 2000 results, expected at most 1100"),
    ],
)
def test_what_grows_on_disk_is_named(last: dict[str, Any], words: str):
    assert check_disk(calm(1800, **last)).violations == [words]


# ---- updates ----


def ended(step: int = 3, *, masked: int = 0, critic: int = 3, updates: int = 3, served: int = 3) -> Ended:
    return Ended({"step": step, "masked_samples": masked}, {"step": critic, "optimizer_step": updates}, served)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (ended(), ""),
        (ended(critic=2), "the critic's checkpoint is of step 2, but the actor ended after step 3"),
        (ended(updates=4), "the number of the critic's optimizer steps is 4, but"),
        (ended(served=2), "the served version contains updates up to step 2, but"),
    ],
)
def test_each_step_trains_the_critic_once(tmp_path: Path, end: Ended, words: str):
    write_jsonl(tmp_path / "metrics.jsonl", ({"step": step} for step in (1, 2, 3)))
    write_jsonl(tmp_path / "critic.jsonl", [{"step": 1, "loss_mean": 0.5}])
    found = check_updates(end, tmp_path / "metrics.jsonl", tmp_path / "critic.jsonl").violations
    assert (words in " ".join(found)) if words else found == []


def test_steps_that_are_missing_or_failed_are_violations(tmp_path: Path):
    write_jsonl(tmp_path / "metrics.jsonl", ({"step": step} for step in (1, 3)))
    write_jsonl(tmp_path / "critic.jsonl", [{"step": 2, "error": "not finite"}])
    assert check_updates(ended(), tmp_path / "metrics.jsonl", tmp_path / "critic.jsonl").violations == [
        "metrics.jsonl has 2 steps from [1] to [3], expected 1 to 3",
        "step 2: not finite",
    ]


def test_masked_responses_and_processes_that_end_are_violations():
    assert check_responses(ended()).kept
    assert check_responses(ended(masked=2)).violations == ["2 responses were not scored"]
    kills = [{"victim": "actor", "until_s": 3.0}, {"victim": "critic", "until_s": None}]
    found = check_survival(kills, ["the actor ended"], ["shared memory x"]).violations
    assert found == ["no step within the time limit after the critic was killed", "the actor ended", "shared memory x"]


# ---- the plan ----


def test_a_plan_meets_every_victim_and_every_kill_point(tmp_path: Path):
    for seed in (1, 2, 3):
        assert set(plan_kills(42, seed)) == {(victim, point) for victim in VICTIMS for point in POINTS}
    assert {victim for victim, _ in plan_kills(6, 1)} == set(VICTIMS)
    assert {point for _, point in plan_kills(20, 1)} == set(POINTS)
    assert ways_of(5, hung=False) == ["killed", "killed", "killed", "stopped", "killed"]
    assert ways_of(5, hung=True) == ["killed", "hung", "killed", "stopped", "killed"]
    victims = {*VICTIMS, "rank 0", "rank 1"}
    assert set(plan_kills(56, 1, ranks=2)) == {(victim, point) for victim in victims for point in POINTS}
    config = load_config(write_config(tmp_path, 2))
    assert (config.trainer.ranks, config.critic.reload) == (2, "swap")
    assert 0 not in (config.server.http_port, config.server.grpc_port, config.server.metrics_port)


def test_a_stopped_process_continues_and_a_hung_one_is_awaited_until_it_ends():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process, enough = psutil.Process(child.pid), threading.Event()
    try:
        assert stop_for(process, 0.01, enough)
        assert process.status() != psutil.STATUS_STOPPED
        threading.Timer(0.2, child.kill).start()
        assert stop_for_good(process, enough)
        child.communicate()
        assert not stop_for(process, 0.01, enough)
    finally:
        child.kill()
        child.communicate()


# ---- the traffic ----


def test_a_batch_is_the_same_again_ragged_and_valid():
    limits = Limits(VOCAB_SIZE, LONGEST)
    payload, again, other = (train_payload(batch(3, step), limits) for step in (7, 7, 8))
    assert payload.digest() == again.digest() != other.digest()
    assert len(set(payload.lengths.tolist())) > 1
    assert payload.mask.sum() == (payload.lengths - 1).sum()


def test_a_rewind_removes_later_answers_and_goes_back_at_most_to_the_last_save_or_rewind():
    record = RequestRecord(trained=[(1, 0.0, "a"), (2, 0.1, "b")], repeated=[(2, "b")], saved=[(1, 0.1, 1)])
    record.rewind(1, 3)
    assert (record.trained, record.repeated, record.saved) == ([(1, 0.0, "a")], [], [(1, 0.1, 1)])
    assert [(step, version) for step, _, version in record.rewound] == [(1, 3)]
    traffic = Traffic("127.0.0.1:1", "chaos", 1, lambda: lambda: None)
    assert [traffic.earliest_rewind(step) for step in (2, 14)] == [0, 11]
    traffic.record.saved.append((10, 0.1, 10))
    assert traffic.earliest_rewind(12) == 10
    traffic.record.rewind(11, 13)
    assert [traffic.earliest_rewind(step) for step in (13, 15)] == [11, 12]


def test_a_request_to_a_dead_process_is_repeated_and_one_that_is_refused_is_not():
    """Triton may answer either with status 400."""
    traffic = Traffic("127.0.0.1:1", "chaos", 1, lambda: lambda: None)

    def answers(*errors: RequestFailed) -> Callable[[], Awaitable[str]]:
        waiting = [*errors]

        async def ask() -> str:
            if waiting:
                raise waiting.pop() from InferenceServerException("no", "400")
            return "done"

        return ask

    assert asyncio.run(traffic._until_answered("step 3", answers(RequestFailed("no")))) == "done"
    assert not traffic.record.refusals
    assert asyncio.run(traffic._until_answered("step 3", answers(RequestRefused("no", "why")))) is None
    assert traffic.record.refusals == ["step 3: no"]


def test_a_writer_that_ends_before_the_kills_is_named():
    """With the request that was refused, as the verdicts then cover only a part of the plan."""
    system, enough = SimpleNamespace(troubles=[], look=lambda: None), threading.Event()
    traffic = SimpleNamespace(thread=Background("traffic", lambda: None), record=RequestRecord(refusals=["step 8: no"]))
    killer = SimpleNamespace(thread=Background("killer", lambda: killer.thread.given_up.wait()), done=[("a", "b")])
    _drive(system, traffic, killer, enough)  # type: ignore[arg-type]
    killer.thread.give_up()
    assert system.troubles == ["the writer ended after 1 kills: step 8: no"]


def test_an_outage_is_a_span_without_any_answer():
    latencies = [(1.0, 0.1), (0.5, 0.1), (4.0, 0.1), (4.5, 0.1)]
    record = RequestRecord(latencies=latencies, failures=[(2.0, "scorer", "dead")])
    kills = [{"time_s": 1.2, "hit": True}, {"time_s": 4.5, "hit": True}]
    record.trained.append((1, 2.0, "answer"))
    totals = summary(record, kills)
    assert [kill["trained_after_s"] for kill in kills] == [0.8, None]
    assert (totals["longest_outage_s"], totals["scoring_requests"], totals["scoring_requests_given_up"]) == (3.0, 4, 1)


# ---- the kill points ----


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = RunConfig.model_validate({"run": {"dir": tmp_path / "run", "run_id": "chaos"}})
    for folder in ("journal/chaos/entries", "weights/critic", "checkpoints/critic"):
        (config.run.dir / folder).mkdir(parents=True)
    (tmp_path / "shm").mkdir()
    (config.run.weights_dir / "CURRENT").write_text("0\n")
    return config


def happen(config: RunConfig, point: str) -> str:
    """Do what the system does at that point; return what is seen of it."""
    run = config.run.dir
    if point == "idle":
        Journal(config.run.journal_dir, "chaos").beat(Heartbeat(1, 0, 0, "idle", 2.0))
        return "heartbeat"
    if point == "CURRENT":
        (config.run.weights_dir / "next").write_text("1\n")
        (config.run.weights_dir / "next").replace(config.run.weights_dir / "CURRENT")
        return "CURRENT"
    made = {
        "journal write": run / "journal/chaos/entries/.00000001.train.ab.tmp",
        "training": run / "journal/chaos/entries/00000001.train",
        "verify": config.run.weights_dir / "1",
        "reload": run.parent / "shm/ours-1",
        "checkpoint": run / "checkpoints/critic/.staging-ab",
    }[point]
    made.touch()
    return made.name


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_point_is_seen_when_it_comes_and_not_if_it_was_there_before(config: RunConfig, point: str):
    points = Points(config, config.run.dir.parent / "shm", "ours-")
    look, num_looks, expected = points.looks[point], iter(range(100)), list[str]()

    def look_and_act() -> set[object]:
        if next(num_looks) == 2:
            expected.append(happen(config, point))
        return look()

    points.looks[point] = look_and_act
    seen = points.wait(point, 60.0, threading.Event())
    assert next(num_looks) == 3
    assert expected[0] in str(seen)
    assert points.wait(point, 0.05, threading.Event()) is None


# ---- the command ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kills", "1"], "is not empty; name a new or empty folder"),
        (["--minutes", "1", "--hung"], "--minutes takes no other arguments than --out and --seed"),
    ],
)
def test_wrong_arguments_are_refused(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "result.json").write_text("mine")
    try:
        code = main([*options, "--out", str(tmp_path)])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("options", "num_verdicts"), [(["--kills", "6"], 9), (["--minutes", "2"], 6)])
def test_short_form(options: list[str], num_verdicts: int, tmp_path: Path):
    """Of the crash test, with one kill of every victim, and of the soak test; the command checks every promise."""
    out = tmp_path / "chaos"
    command = [sys.executable, "-m", "tools", "chaos", *options, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "result.json").read_text())
    assert result["kills"], done.stdout
    assert "--kills" not in options or {kill["victim"] for kill in result["kills"]} == set(VICTIMS)
    assert [verdict["violations"] for verdict in result["verdicts"]] == [[]] * num_verdicts
    assert "--minutes" not in options or (out / "soak.png").stat().st_size > 10_000
