"""The crash test of the live critic: after kills at named moments, the results must equal an undisturbed run's.

`make test-all` kills every victim once. `make crash` kills CRASH_KILLS (50) times; CRASH_RANKS=2 trains on two ranks.
"""

import os
import random
import time
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from crash_kills import VICTIMS, Killer, plan_kills, stop_accepting
from crash_system import DisturbedSystem, make_crash_run
from crash_traffic import Traffic, probes
from expected_outputs import direct_rewards, direct_values
from safetensors.torch import load_file

from rlhf_triton.models.batching import padded_rows
from rlhf_triton.store.durable import numbers_in
from rlhf_triton.store.journal import Entry, Journal

KILLS = int(os.environ.get("CRASH_KILLS", len(VICTIMS)))
SEED = int(os.environ.get("CRASH_SEED", 1))
RANKS = int(os.environ.get("CRASH_RANKS", 1))
LOOK_EVERY_S = 0.05
STEPS_AFTER = 6  # steps trained after the last kill
TOLERANCE = 1e-5  # for rewards and values, since the server shares forward passes among rows


def drive(system, traffic, killer, steps):
    """Restart killed processes until all kills and `steps` more steps are done."""
    traffic.thread.start()
    if killer is None:
        traffic.finish(steps)
    else:
        killer.thread.start()
    while traffic.thread.is_alive():
        system.restart_killed()
        if killer is not None and not killer.thread.is_alive():
            traffic.finish(steps)
            killer = None
        time.sleep(LOOK_EVERY_S)
    assert killer is None, f"the writer ended after {len(killer.done)} kills: {traffic.record.refusals}"


def results_of(config):
    """Return the journal's training results, by step."""
    results = Journal(config.run.journal_dir, config.run.identity).results()
    return {Entry.parse(result.entry).step: result for result in results if result.entry.endswith(".train")}


def manifests_of(system):
    return [system.store.manifest(version) for version in system.store.versions()]


def undisturbed(folder, checkpoints, steps):
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


def last_checkpoint(system, step):
    return system.config.run.dir / "checkpoints" / "critic" / str(step)


@pytest.mark.slow
@pytest.mark.timeout(300 + 120 * KILLS)
def test_no_kill_changes_what_is_trained_and_served(tmp_path, checkpoints):
    system = DisturbedSystem(make_crash_run(tmp_path / "disturbed", checkpoints, RANKS), random.Random(SEED + 1))
    traffic = Traffic(system.config.server.http_url, system.config.run.identity, SEED, partial(stop_accepting, system))
    plan = plan_kills(KILLS, SEED, ranks=RANKS)
    killer = Killer(system, traffic, plan, random.Random(SEED + 2))
    try:
        drive(system, traffic, killer, STEPS_AFTER)
        system.stop_program("sidecar")
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


def check_order(system, killer, plan):
    """Check that every victim and moment of the plan was hit, no other process ended, and no process is left."""
    assert system.troubles == []
    assert system.leftovers() == []
    hits = [kill for kill in killer.kills if kill["hit"]]
    assert {kill["victim"] for kill in hits} == {victim for victim, _ in plan}
    assert {kill["point"] for kill in hits} == {point for _, point in plan}


def check_steps(record, results, reference, last):
    """Check that each accepted step was trained once, in order, with the undisturbed run's loss and the same answer."""
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
        assert answer == answers[step], "a repeated step got another answer"


def check_versions(system, reference, rewound, last):
    """Check that there is one bit-identical version per step, in order, and one more for each rewind."""
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


def check_scores(system, record):
    """Check that each answer has its version's values, and that no version older than an acknowledged one scores."""
    assert record.stale == []
    assert record.served
    requests = probes(SEED)
    rewards = [direct_rewards(system.config.reward.model, rows) for rows in requests]
    values = {}
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


def check_checkpoint(ours, theirs):
    """Check that weights and optimizer are bit-identical."""
    files = sorted(path.name for path in theirs.glob("*.safetensors"))
    assert files == sorted(path.name for path in ours.glob("*.safetensors"))
    for name in files:
        found = load_file(ours / name)
        expected = load_file(theirs / name)
        assert found.keys() == expected.keys()
        assert [tensor for tensor in found if not torch.equal(found[tensor], expected[tensor])] == []
