"""Two instances of the critic in the real server: they share the requests, change versions together, and are replaced.

Versions are adapters, which each instance merges into version 0.

On GPUs Triton makes an instance for each of them (`device: cuda`); here both are on the CPU (`instances: 2`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import psutil
import pytest
from bare_client import ask
from critic_load import CriticLoad
from live_system import (
    Checkpoints,
    System,
    make_run,
    random_rows,
    scoring_inputs,
    start_system,
    training_inputs,
    wait_for,
)

from python_backend.models.modeling import load_critic
from python_backend.wire.contract import CRITIC, CRITIC_SAVE, CRITIC_TRAIN

pytestmark = pytest.mark.slow
ROWS = random_rows([3, 17, 40], seed=0)
OTHER_THREADS = 8  # gRPC's, and Python's own


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Iterator[System]:
    adapters = {"lora_rank": 2, "precision": "bfloat16", "publish": {"format": "adapter"}}
    sections = {"critic": {"instances": 2}, "trainer": {**adapters, "threads": 2, "nice": 7}}
    run = make_run(tmp_path_factory.mktemp("instances"), checkpoints, **sections)
    system = start_system(run)
    wait_for(lambda: len(run.store.serving()) == 2, system.server)
    yield system
    system.stop()


def processes_of(system: System) -> list[psutil.Process]:
    """The critic's two processes."""
    first, second = (psutil.Process(record.pid) for record in system.run.store.serving())
    return [first, second]


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def test_requests_are_shared(system: System) -> None:
    processes = processes_of(system)
    before = [cpu_s(process) for process in processes]
    with CriticLoad(system.run.url, ROWS) as load:
        wait_for(lambda: len(load.answers) > 400)
    shares = [cpu_s(process) - start for process, start in zip(processes, before, strict=True)]
    assert min(shares) > 0.1 * sum(shares)


def test_new_weights_under_load(system: System) -> None:
    store = system.run.store
    with CriticLoad(system.run.url, ROWS) as load:
        for seed in range(3):
            version = int(ask(system.run.url, CRITIC_TRAIN, training_inputs(seed=seed))["weights_version"][0])
        wait_for(lambda: [record.version for record in store.serving()] == [version] * 2)
        count = len(load.answers)
        wait_for(lambda: len(load.answers) > count + 50)
    assert {outcome for *_, outcome in load.outcomes} == {"200"}
    assert {number for number, _ in load.answers[count + 20 :]} == {version}
    assert [store.manifest(number).base for number in (0, version)] == [None, 0]
    critics = [load_critic(store.folder(number)) for number in (0, version)]
    for row, ours in zip(ROWS, load.answers[-1][1], strict=True):
        before, after = (critic.values([row])[0] for critic in critics)
        assert abs(ours[: row.size] - after).max() < 1e-5 < abs(before - after).max()


def test_the_sidecar_stays_out_of_the_servers_way(system: System) -> None:
    """Once it has trained, it has the threads of PyTorch, of gRPC and of Python."""
    sidecar = psutil.Process(system.sidecar.process.pid)
    # Seen once is enough: others may give other priorities to what runs on their machine.
    wait_for(lambda: sidecar.nice() == psutil.Process().nice() + 7, system.sidecar)
    assert sidecar.num_threads() <= 2 + OTHER_THREADS


def test_a_save_brings_a_fresh_process_that_serves_the_same(system: System) -> None:
    store = system.run.store
    old, version = {record.pid for record in store.serving()}, store.current() or 0
    rows = scoring_inputs(ROWS)

    def replaced() -> bool:
        pids = {record.pid for record in store.serving()}
        return len(pids) == 2 and not pids & old

    before = ask(system.run.url, CRITIC, rows)["values"]
    ask(system.run.url, CRITIC_SAVE, {"dummy_var": np.zeros(1, np.int64)})
    wait_for(replaced, system.sidecar)
    after = ask(system.run.url, CRITIC, rows)
    assert set(after["weights_version"].ravel().tolist()) == {version}
    np.testing.assert_allclose(after["values"], before, atol=1e-5, rtol=0)


def test_a_killed_instance_is_replaced(system: System) -> None:
    with CriticLoad(system.run.url, ROWS) as load:
        victim = processes_of(system)[0]
        victim.kill()
        wait_for(lambda: len({record.pid for record in system.run.store.serving()} - {victim.pid}) == 2, system.server)
        count = len(load.outcomes)
        wait_for(lambda: len(load.outcomes) > count + 50 and {code for *_, code in load.outcomes[-50:]} == {"200"})
