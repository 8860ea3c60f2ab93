"""The crash test of the live critic: processes are killed at named moments, and nothing may differ from a calm run.

`make test-all` kills every victim once. `make crash` kills CRASH_KILLS (50) times; CRASH_RANKS=2 trains on two ranks,
CRASH_FREEZES=N stops models N times for a few seconds, and with CRASH_HUNG=1 some victims hang until they are replaced.
"""

import asyncio
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from crash_kills import POINTS, VICTIMS, Killer, Points, freeze_models, plan_kills, stop_accepting
from crash_system import DisturbedSystem, make_crash_run
from crash_traffic import LONGEST, VOCAB_SIZE, RequestRecord, Traffic, batch, probes
from live_system import Checkpoints, direct_rewards, direct_values
from safetensors.torch import load_file
from tritonclient.utils import InferenceServerException

from rlhf_triton.client.errors import RequestFailed, RequestRefused
from rlhf_triton.config import RunConfig
from rlhf_triton.python_backend.models.batching import padded_rows
from rlhf_triton.store.durable import numbers_in
from rlhf_triton.store.journal import Entry, Heartbeat, Journal, Result
from rlhf_triton.store.weights import Manifest
from rlhf_triton.wire.contract import Limits
from rlhf_triton.wire.training_payload import train_payload

KILLS = int(os.environ.get("CRASH_KILLS", len(VICTIMS)))
SEED = int(os.environ.get("CRASH_SEED", 1))
RANKS = int(os.environ.get("CRASH_RANKS", 1))
FREEZES = int(os.environ.get("CRASH_FREEZES", 0))
IS_HUNG = os.environ.get("CRASH_HUNG") == "1"
LOOK_EVERY_S = 0.05
STEPS_AFTER = 6  # steps trained after the last kill
TOLERANCE = 1e-5  # of rewards and values: the server shares forward passes among rows


def drive(system: DisturbedSystem, traffic: Traffic, killer: Killer | None, steps: int) -> None:
    """Restart killed processes until all kills and `steps` more steps are done."""
    traffic.thread.start()
    if killer is None:
        traffic.finish(steps)
    else:
        killer.thread.start()
    while traffic.thread.is_alive():
        system.look()
        if killer is not None and not killer.thread.is_alive():
            traffic.finish(steps)
            killer = None
        time.sleep(LOOK_EVERY_S)
    assert killer is None, f"the writer ended after {len(killer.done)} kills: {traffic.record.refusals}"


def results_of(config: RunConfig) -> dict[int, Result]:
    """The journal's results of training, by step."""
    results = Journal(config.run.journal_dir, config.run.identity).results()
    return {Entry.parse(result.entry).step: result for result in results if result.entry.endswith(".train")}


def manifests_of(system: DisturbedSystem) -> list[Manifest]:
    return [system.store.manifest(version) for version in system.store.versions()]


def undisturbed(folder: Path, checkpoints: Checkpoints, steps: int) -> tuple[DisturbedSystem, Path]:
    """Train the same batches in a system that nothing disturbs; return it, stopped, and its last checkpoint."""
    system = DisturbedSystem(make_crash_run(folder, checkpoints, RANKS), random.Random(SEED))
    try:
        traffic = Traffic(system.config.server.http_url, system.config.run.identity, SEED, lambda: lambda: None)
        drive(system, traffic, None, steps)
        system.stop_program("sidecar")
    finally:
        traffic.thread.give_up()
        system.stop()
    assert not traffic.record.refusals
    return system, last_checkpoint(system, steps)


def last_checkpoint(system: DisturbedSystem, step: int) -> Path:
    return system.config.run.dir / "checkpoints" / "critic" / str(step)


@pytest.mark.slow
@pytest.mark.timeout(300 + 120 * KILLS)
def test_no_kill_changes_what_is_trained_and_served(tmp_path: Path, checkpoints: Checkpoints) -> None:
    system = DisturbedSystem(make_crash_run(tmp_path / "disturbed", checkpoints, RANKS), random.Random(SEED + 1))
    traffic = Traffic(system.config.server.http_url, system.config.run.identity, SEED, partial(stop_accepting, system))
    plan = plan_kills(KILLS, SEED, ranks=RANKS)
    killer = Killer(system, traffic, plan, random.Random(SEED + 2), hung=IS_HUNG)
    try:
        drive(system, traffic, killer, STEPS_AFTER)
        system.stop_program("sidecar")  # it may still reload a model, and a frozen process would then end the server
        freeze_models(system, FREEZES, random.Random(SEED + 4), killer.thread.given_up)
    finally:
        killer.thread.give_up()  # first, so that nothing is killed while the system stops
        traffic.thread.give_up()
        system.stop()
    for thread in (traffic.thread, killer.thread):
        if thread.error is not None:
            raise thread.error
    record = traffic.record
    last = traffic.last_step
    print(
        f"{last} steps, {record.served.total()} scores, {len(record.rewound)} rewinds, {len(record.failures)} retries"
    )
    reference, checkpoint = undisturbed(tmp_path / "undisturbed", checkpoints, last)

    check_order(system, killer, plan)
    check_steps(record, results_of(system.config), results_of(reference.config), last)
    check_versions(system, manifests_of(reference), {step for step, _, _ in record.rewound}, last)
    check_scores(system, record)
    check_checkpoint(last_checkpoint(system, last), checkpoint)


def check_order(system: DisturbedSystem, killer: Killer, plan: Sequence[tuple[str, str]]) -> None:
    """Every victim and every moment of the plan was hit; nothing else ended, and nothing is left behind."""
    assert system.troubles == []
    assert system.leftovers() == []
    hits = [kill for kill in killer.kills if kill["hit"]]
    assert {kill["victim"] for kill in hits} == {victim for victim, _ in plan}
    assert {kill["point"] for kill in hits} == {point for _, point in plan}


def check_steps(record: RequestRecord, results: dict[int, Result], reference: dict[int, Result], last: int) -> None:
    """Each accepted step was trained once, in order, with the loss of the undisturbed run; its answer says so."""
    assert record.refusals == []
    steps = list(range(1, last + 1))
    assert [step for step, _, _ in record.trained] == steps
    assert sorted(results) == sorted(reference) == steps
    assert [results[step].error for step in steps] == [None] * last
    assert [results[step].loss_mean for step in steps] == [reference[step].loss_mean for step in steps]
    answers = {step: answer for step, _, answer in record.trained}
    for step in steps:
        told = (results[step].weights_version, float(np.float32(results[step].loss_mean)))
        assert (answers[step].weights_version, answers[step].loss_mean) == told
    for step, answer in record.repeated:
        assert answer == answers[step], "a step that is sent again gets the same answer"


def check_versions(system: DisturbedSystem, reference: Sequence[Manifest], rewound: set[int], last: int) -> None:
    """One version a step, in order and bit-identical; a rewind adds another of its step, after those of later steps."""
    manifests = manifests_of(system)
    steps = [manifest.step for manifest in manifests]
    assert (steps[0], steps[-1]) == (0, last)
    for before, step in pairwise(steps):
        assert step == before + 1 or (step in rewound and step <= before)
    digests = {manifest.step: manifest.digest for manifest in reference}
    assert [manifest.digest for manifest in manifests] == [digests[step] for step in steps]
    assert system.store.current() == manifests[-1].version
    for version in numbers_in(system.store.root):
        system.store.verify_files(version)


def check_scores(system: DisturbedSystem, record: RequestRecord) -> None:
    """Each answer names one version and has its values; once a step is acknowledged, no older version scores."""
    assert record.stale == []
    assert record.served
    requests = probes(SEED)
    rewards = [direct_rewards(system.config.reward.model, rows) for rows in requests]
    values: dict[tuple[int, int], np.ndarray] = {}
    for served in record.served:
        (version,) = set(served.versions)
        if (version, served.probe) not in values:
            for probe, rows in enumerate(requests):
                alone = direct_values(system.store.folder(version), rows)
                values[version, probe] = padded_rows(alone, width=max(row.size for row in rows))
        expected = values[version, served.probe].ravel()
        np.testing.assert_allclose(np.frombuffer(served.values, np.float32), expected, atol=TOLERANCE, rtol=0)
        found = np.frombuffer(served.rewards, np.float32)
        np.testing.assert_allclose(found, rewards[served.probe], atol=TOLERANCE, rtol=0)


def check_checkpoint(ours: Path, theirs: Path) -> None:
    """Weights and optimizer are bit-identical."""
    files = sorted(path.name for path in theirs.glob("*.safetensors"))
    assert files == sorted(path.name for path in ours.glob("*.safetensors"))
    for name in files:
        found, expected = load_file(ours / name), load_file(theirs / name)
        assert found.keys() == expected.keys()
        assert [tensor for tensor in found if not torch.equal(found[tensor], expected[tensor])] == []


# ---- the test itself ----


def test_a_plan_meets_every_victim_and_every_kill_point() -> None:
    assert set(plan_kills(42, SEED)) == {(victim, point) for victim in VICTIMS for point in POINTS}
    assert {victim for victim, _ in plan_kills(KILLS, SEED)} == set(VICTIMS)
    victims = {*VICTIMS, "rank 0", "rank 1"}
    assert set(plan_kills(56, 1, ranks=2)) == {(victim, point) for victim in victims for point in POINTS}


def test_a_batch_is_the_same_again_ragged_and_valid() -> None:
    limits = Limits(VOCAB_SIZE, LONGEST)
    payload, again, other = (train_payload(batch(3, step), limits) for step in (7, 7, 8))
    assert payload.digest() == again.digest() != other.digest()
    assert len(set(payload.lengths.tolist())) > 1
    assert payload.mask.sum() == (payload.lengths - 1).sum()


def test_a_request_to_a_dead_process_is_repeated_and_one_that_is_refused_is_not():
    """Triton may answer either with status 400."""
    traffic = Traffic("127.0.0.1:1", "crash", 1, lambda: lambda: None)

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


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = RunConfig.model_validate({"run": {"dir": tmp_path / "run", "run_id": "crash"}})
    for folder in ("journal/crash/entries", "weights/critic", "checkpoints/critic"):
        (config.run.dir / folder).mkdir(parents=True)
    (tmp_path / "shm").mkdir()
    (config.run.weights_dir / "CURRENT").write_text("0\n")
    return config


def happen(config: RunConfig, point: str) -> str:
    """Do what the system does at that point; return what is seen of it."""
    run = config.run.dir
    if point == "idle":
        Journal(config.run.journal_dir, "crash").beat(Heartbeat(1, 0, 0, "idle", 2.0))
        return "heartbeat"
    if point == "CURRENT":
        (config.run.weights_dir / "next").write_text("1\n")
        (config.run.weights_dir / "next").replace(config.run.weights_dir / "CURRENT")
        return "CURRENT"
    made = {
        "journal write": run / "journal/crash/entries/.00000001.train.ab.tmp",
        "training": run / "journal/crash/entries/00000001.train",
        "verify": config.run.weights_dir / "1",
        "reload": run.parent / "shm/ours-1",
        "checkpoint": run / "checkpoints/critic/.staging-ab",
    }[point]
    made.touch()
    return made.name


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_point_is_seen_when_it_comes_and_not_if_it_was_there_before(config: RunConfig, point: str):
    points = Points(config, config.run.dir.parent / "shm", "ours-")
    look = points.looks[point]
    num_looks = iter(range(100))
    expected: list[str] = []

    def look_and_act() -> set[object]:
        if next(num_looks) == 2:
            expected.append(happen(config, point))
        return look()

    points.looks[point] = look_and_act
    seen = points.wait(point, 60.0, threading.Event())
    assert next(num_looks) == 3
    assert expected[0] in str(seen)
    assert points.wait(point, 0.05, threading.Event()) is None
