"""A critic split over two processes inside the real server: bad requests, new weights, and processes that die."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from bare_client import ask
from critic_load import NUM_CLIENTS, CriticLoad
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
TOLERANCE = 1e-5
NUM_REQUESTS, NUM_SWAPS = 200, 6
ROWS = random_rows([3, 17, 40], seed=0)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Iterator[System]:
    run = make_run(tmp_path_factory.mktemp("split"), checkpoints, critic={"tensor_parallel": 2})
    system = start_system(run)
    yield system
    system.stop()


def ranks_of(system: System) -> tuple[psutil.Process, psutil.Process]:
    """The critic's two processes."""
    (record,) = system.run.store.serving()
    rank_0 = psutil.Process(record.pid)
    (rank_1,) = [child for child in rank_0.children() if "python_backend.serving.ranks.process" in child.cmdline()]
    return rank_0, rank_1


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assert_values(folder: Path, values: np.ndarray) -> None:
    for row, ours, direct in zip(ROWS, values, direct_values(folder, ROWS), strict=True):
        np.testing.assert_allclose(ours[: row.size], direct, atol=TOLERANCE, rtol=0)


def test_new_weights_under_load(system: System) -> None:
    with CriticLoad(system.run.url, ROWS) as load:
        before = system.run.store.current() or 0
        for seed in range(NUM_SWAPS):
            answer = ask(system.run.url, CRITIC_TRAIN, training_inputs(seed=seed))
        assert int(answer["weights_version"][0]) == before + NUM_SWAPS
        num_answers = len(load.answers)
        wait_for(lambda: len(load.answers) > num_answers + NUM_CLIENTS)
    assert {outcome for *_, outcome in load.outcomes} == {"200"}
    versions = {version for version, _ in load.answers}
    assert len(versions) > NUM_SWAPS // 2
    for version in versions:
        assert_values(system.run.store.folder(version), next(v for number, v in load.answers if number == version))


def test_a_killed_rank_ends_all_and_the_critic_is_served_again(system: System) -> None:
    """Rank 0, which answers Triton, refuses requests at once until it is unloaded."""
    ranks = ranks_of(system)
    with CriticLoad(system.run.url, ROWS) as load:
        ranks[1].kill()
        killed_at = time.monotonic()
        wait_for(lambda: all(map(is_gone, ranks)), timeout_s=120.0)
        wait_for(lambda: any(sent > killed_at + 0.5 and code == "200" for sent, _, code in list(load.outcomes)))
    assert {code for _, answered, code in load.outcomes if answered > killed_at} == {"200", "503", "404"}
    assert not set(ranks) & set(ranks_of(system))
    version, values = load.answers[-1]
    assert_values(system.run.store.folder(version), values)
