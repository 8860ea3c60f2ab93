"""A critic split over two processes inside the real server: bad requests, new weights, and processes that die."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from bare_client import Refused, ask, ask_all
from critic_load import NUM_CLIENTS, CriticLoad
from live_system import (
    Checkpoints,
    System,
    direct_values,
    make_run,
    random_rows,
    scoring_inputs,
    start_system,
    training_inputs,
    wait_for,
)
from safetensors.torch import load_file, save_file

from python_backend.checkpoints.inspection import WEIGHTS_FILE
from python_backend.store.weights import MANIFEST_FILE
from python_backend.wire.contract import CRITIC, CRITIC_TRAIN

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


def test_bad_requests_fail_alone(system: System) -> None:
    generator = np.random.default_rng(0)
    rows = [random_rows(generator.integers(1, 100, 2), seed=i) for i in range(NUM_REQUESTS)]
    is_bad = generator.random(NUM_REQUESTS) < 0.3
    requests = [(CRITIC, scoring_inputs(each)) for each in rows]
    for i in np.flatnonzero(is_bad):
        requests[i][1]["tokens"][0, 0] = (-1, 10_000)[i % 2]
    answers = ask_all(system.run.url, requests)
    folder = system.run.store.folder(system.run.store.current() or 0)
    for answer, each, bad in zip(answers, rows, is_bad, strict=True):
        if bad:
            assert isinstance(answer, Refused)
            assert answer.code == "400"
        else:
            assert not isinstance(answer, Refused), str(answer)
            if each is rows[0] or len(each[0]) > 95:  # the direct forward pass is slow
                for row, values, direct in zip(each, answer["values"], direct_values(folder, each), strict=True):
                    np.testing.assert_allclose(values[: row.size], direct, atol=TOLERANCE, rtol=0)


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


def test_a_version_that_one_rank_refuses_is_served_nowhere(system: System) -> None:
    """The sidecar would not publish it, so the test does; the sidecar moves CURRENT back."""
    store = system.run.store
    served = store.current() or 0

    def write(folder: Path) -> None:
        shutil.copytree(store.folder(served), folder, dirs_exist_ok=True)
        (folder / MANIFEST_FILE).unlink()
        tensors = load_file(folder / WEIGHTS_FILE)
        tensors["model.layers.0.self_attn.q_proj.weight"][-1] = torch.nan  # in the part of rank 1 only
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})

    with CriticLoad(system.run.url, ROWS) as load:
        damaged = store.add(write, run_id=system.run.run_id, step=99, parent=served, epoch=99).version
        store.set_current(damaged)
        wait_for(lambda: any(record.rejected == damaged for record in store.serving()))
        assert "rank 1: " in (store.serving()[0].error or "")
        wait_for(lambda: store.current() == served, system.sidecar)
    assert {outcome for *_, outcome in load.outcomes} == {"200"}
    assert {version for version, _ in load.answers} == {served}


@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_rank_ends_all_and_the_critic_is_served_again(system: System, victim: int) -> None:
    ranks = ranks_of(system)
    with CriticLoad(system.run.url, ROWS) as load:
        ranks[victim].kill()
        killed_at = time.monotonic()
        wait_for(lambda: all(map(is_gone, ranks)), timeout_s=120.0)
        wait_for(lambda: any(sent > killed_at + 0.5 and code == "200" for sent, _, code in list(load.outcomes)))
    codes = Counter(code for _, answered, code in load.outcomes if answered > killed_at)
    if (
        victim == 1
    ):  # rank 0 refuses requests at once until it is unloaded; Triton waits for a killed one, and sends 500
        assert set(codes) == {"200", "503", "404"}
    assert not set(ranks) & set(ranks_of(system))
    version, values = load.answers[-1]
    assert_values(system.run.store.folder(version), values)
