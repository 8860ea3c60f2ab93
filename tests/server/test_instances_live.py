"""Two instances of the critic in the real server: they share the requests, change versions together, and are replaced.

On GPUs Triton makes an instance for each of them (`device: cuda`); here both are on the CPU (`instances: 2`).
"""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from bare_client import ask
from critic_load import CriticLoad
from live_system import (
    Checkpoints,
    System,
    direct_values,
    make_run,
    random_rows,
    start_system,
    training_inputs,
    wait_for,
)

from python_backend.wire.contract import CRITIC_TRAIN

pytestmark = pytest.mark.slow
ROWS = random_rows([3, 17, 40], seed=0)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Iterator[System]:
    run = make_run(tmp_path_factory.mktemp("instances"), checkpoints, critic={"instances": 2})
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
    with CriticLoad(system.run.url, ROWS) as load:
        for seed in range(3):
            version = int(ask(system.run.url, CRITIC_TRAIN, training_inputs(seed=seed))["weights_version"][0])
        wait_for(lambda: [record.version for record in system.run.store.serving()] == [version] * 2)
        count = len(load.answers)
        wait_for(lambda: len(load.answers) > count + 50)
    assert {outcome for *_, outcome in load.outcomes} == {"200"}
    assert {number for number, _ in load.answers[count + 20 :]} == {version}
    for row, ours, direct in zip(
        ROWS, load.answers[-1][1], direct_values(system.run.store.folder(version), ROWS), strict=True
    ):
        assert abs(ours[: row.size] - direct).max() < 1e-5


def test_a_killed_instance_is_replaced(system: System) -> None:
    with CriticLoad(system.run.url, ROWS) as load:
        victim = processes_of(system)[0]
        victim.kill()
        wait_for(lambda: len({record.pid for record in system.run.store.serving()} - {victim.pid}) == 2, system.server)
        count = len(load.outcomes)
        wait_for(lambda: len(load.outcomes) > count + 50 and {code for *_, code in load.outcomes[-50:]} == {"200"})
