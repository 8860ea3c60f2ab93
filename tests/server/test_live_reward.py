"""The live reward model on a real server: swaps under load, poison refused, and a process killed during a swap."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from bare_client import BareClient, Refused, ask
from live_system import LiveRun, System, direct_rewards, random_rows, scoring_inputs, wait_for
from safetensors.torch import load_file, save_file

from python_backend.store.weights import WeightsStore
from python_backend.wire.contract import CRITIC_INFER, REWARD_MODEL, REWARD_VERSION, REWARDS, VALUES, WEIGHTS_VERSION
from tools.weights import main
from trainer.publish import Publisher

TOLERANCE = 1e-5
NUM_CLIENTS, NUM_SWAPS = 8, 4
ROWS = random_rows([3, 17, 40], seed=0)


def store_of(run: LiveRun) -> WeightsStore:
    return WeightsStore(run.config.run.reward_weights_dir)


def changed(run: LiveRun, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """The checkpoint of version 0 with other weights."""
    shutil.copytree(run.config.reward.checkpoint, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def publish(run: LiveRun, folder: Path, *overrides: str) -> int:
    return main(["publish", "--model", "reward", "--config", str(run.path), str(folder), *overrides])


def serve_rewards(run: LiveRun, model: str = CRITIC_INFER) -> tuple[np.ndarray, int]:
    """The rows' rewards and their version."""
    answer = ask(run.url, model, scoring_inputs(ROWS), [REWARDS, REWARD_VERSION])
    (version,) = set(answer[REWARD_VERSION].ravel().tolist())
    return answer[REWARDS][:, 0], version


@pytest.fixture(autouse=True)
def _version_0_again(live: System) -> Iterator[None]:
    """Other tests of this server expect its checkpoint."""
    before = store_of(live.run).current()
    yield
    if store_of(live.run).current() != before:
        assert main(["rollback", "--model", "reward", "--config", str(live.run.path), "--to", "0"]) == 0


def answers(run: LiveRun) -> bool:
    with contextlib.suppress(Refused):
        serve_rewards(run)
        return True
    return False


def assert_serves(run: LiveRun, version: int) -> None:
    for model in (CRITIC_INFER, REWARD_MODEL):
        rewards, served = serve_rewards(run, model)
        assert served == version
        expected = direct_rewards(store_of(run).folder(version), ROWS)
        np.testing.assert_allclose(rewards, expected, atol=TOLERANCE, rtol=0)


def test_every_reply_names_its_version_and_none_fails_during_swaps(live: System, tmp_path: Path) -> None:
    run, store = live.run, store_of(live.run)
    folders = [
        changed(run, tmp_path / str(i), lambda tensors, i=i: tensors["score.weight"].mul_(1 + 0.5 * i))
        for i in range(1, NUM_SWAPS + 1)
    ]
    first, seen = store.current() or 0, defaultdict[int, list[tuple[np.ndarray, float]]](list)

    async def keep_asking(done: asyncio.Event, seed: int) -> None:
        async with BareClient(run.url) as client:
            while not done.is_set():
                rows = random_rows(np.random.default_rng(seed).integers(1, 60, 3).tolist(), seed=seed)
                outputs = [REWARDS, REWARD_VERSION, *((VALUES, WEIGHTS_VERSION) if seed % 2 else ())]
                answer = await client.infer(CRITIC_INFER if seed % 2 else REWARD_MODEL, scoring_inputs(rows), outputs)
                (version,) = set(answer[REWARD_VERSION].ravel().tolist())
                seen[version] += zip(rows, answer[REWARDS][:, 0].tolist(), strict=True)
                seed += NUM_CLIENTS
                await asyncio.sleep(0.02)

    async def swaps() -> None:
        done = asyncio.Event()
        clients = [asyncio.create_task(keep_asking(done, seed)) for seed in range(NUM_CLIENTS)]
        try:
            for number, folder in enumerate(folders, start=first + 1):
                assert await asyncio.to_thread(publish, run, folder) == 0
                while number not in seen:
                    await asyncio.sleep(0.01)
        finally:
            done.set()
        await asyncio.gather(*clients)  # a refused request raises here

    asyncio.run(swaps())
    assert {*range(first + 1, first + 1 + NUM_SWAPS)} <= set(seen)
    for version, scored in seen.items():
        expected = direct_rewards(store.folder(version), [row for row, _ in scored])
        np.testing.assert_allclose([reward for _, reward in scored], expected, atol=TOLERANCE, rtol=0)
    assert main(["ready", "--model", "reward", "--config", str(run.path)]) == 0
    assert metric(run, "rlhf_weights_version") == store.current()
    assert metric(run, "rlhf_weights_taken_up_total") >= NUM_SWAPS
    assert main(["rollback", "--model", "reward", "--config", str(run.path), "--to", "0"]) == 0
    assert_serves(run, store.current() or 0)


def metric(run: LiveRun, name: str) -> float:
    with urllib.request.urlopen(f"http://{run.config.server.metrics_url}/metrics", timeout=60) as answer:
        found = re.search(rf'^{name}{{model="reward_model"}} (\S+)', answer.read().decode(), re.MULTILINE)
    assert found, name
    return float(found[1])


@pytest.mark.slow
def test_a_process_that_is_killed_during_a_swap_comes_back_with_the_new_version(
    live: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor replaces it; the publisher waits for that."""
    run, store = live.run, store_of(live.run)
    killed: list[int] = []
    verify = Publisher.verify

    def killing(publisher: Publisher, *args: Any) -> None:
        verify(publisher, *args)
        for record in store.serving():
            psutil.Process(record.pid).kill()
            killed.append(record.pid)

    monkeypatch.setattr(Publisher, "verify", killing)
    new = changed(run, tmp_path / "new", lambda tensors: tensors["score.weight"].mul_(3.0))
    assert publish(run, new) == 0
    monkeypatch.undo()
    # The new process records what it serves while it loads; until Triton lets go of the killed one, requests fail.
    wait_for(lambda: answers(run))
    assert_serves(run, store.current() or 0)
    (record,) = store.serving()
    assert killed
    assert record.pid not in killed
