"""New weights come into service, in both ways, under load: one version per request, and none that is damaged."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bare_client import Answer, BareClient, ask
from live_system import (
    KEY,
    FinishedRun,
    LiveRun,
    System,
    direct_values,
    identity,
    random_rows,
    reload_model,
    scoring_inputs,
    training_inputs,
    wait_for,
)

from python_backend.checkpoints.inspection import WEIGHTS_FILE
from python_backend.models.modeling import CriticModel, load_critic, save_critic
from python_backend.store.control_key import control_key
from python_backend.wire.contract import CRITIC, CRITIC_INFER, CRITIC_SAVE, CRITIC_TRAIN
from trainer.control_plane import ControlPlane, LoadRefused
from trainer.publish import Publisher, VersionRejected

TOLERANCE = 1e-5
NUM_CLIENTS = 16
ROWS = random_rows([3, 17, 40], seed=0)
SAVE = {"dummy_var": np.zeros(1, np.int64)}


def serve_values(run: LiveRun) -> tuple[list[np.ndarray], int]:
    """The rows' served values and their version."""
    answer = ask(run.url, CRITIC_INFER, scoring_inputs(ROWS), ["values", "weights_version"])
    (version,) = set(answer["weights_version"].ravel().tolist())
    return [answer["values"][i, : row.size] for i, row in enumerate(ROWS)], version


def assert_serves(run: LiveRun, version: int) -> list[np.ndarray]:
    """The server serves `version`, and its values are that folder's; returns them."""
    values, served = serve_values(run)
    assert served == version
    for ours, direct in zip(values, direct_values(run.store.folder(version), ROWS), strict=True):
        np.testing.assert_allclose(ours, direct, atol=TOLERANCE, rtol=0)
    return values


def test_an_update_changes_the_served_values_by_swap(live: System) -> None:
    before = assert_serves(live.run, live.run.store.current() or 0)
    pid = live.run.store.serving()[0].pid
    answer = ask(live.run.url, CRITIC_TRAIN, training_inputs(seed=1), headers=KEY)
    after = assert_serves(live.run, int(answer["weights_version"][0]))
    assert max(float(np.abs(a - b).max()) for a, b in zip(after, before, strict=True)) > 1e-3
    assert live.run.critic_updates(up_to=live.run.journal.last_step())[-1]["reload"] == "swap"
    assert live.run.store.serving()[0].pid == pid


@pytest.fixture
def reloading_by_triton(finished: FinishedRun) -> FinishedRun:
    """The finished run with `critic.reload=triton`: the instance no longer takes up CURRENT by itself."""
    finished.stop_sidecar()
    reload_model(finished.run, CRITIC, lambda config: config["parameters"].update(reload={"string_value": "triton"}))
    finished.start_sidecar("critic.reload=triton")
    return finished


def test_an_update_changes_the_served_values_through_triton(reloading_by_triton: FinishedRun) -> None:
    run = reloading_by_triton.run
    before = assert_serves(run, run.store.current() or 0)
    pid = run.store.serving()[0].pid
    answer = ask(run.url, CRITIC_TRAIN, training_inputs(seed=2))
    after = assert_serves(run, int(answer["weights_version"][0]))
    assert max(float(np.abs(a - b).max()) for a, b in zip(after, before, strict=True)) > 1e-3
    assert run.critic_updates(up_to=run.journal.last_step())[-1]["reload"] == "triton"
    assert run.store.serving()[0].pid != pid
    with ControlPlane(run.config.server.grpc_url) as control:
        label = control.active_parameters(CRITIC)["weights_version"]
    assert label.startswith(f"{run.store.current()}-")


# ---- under load ----


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request under load."""

    rows: list[np.ndarray]
    answer: Answer


async def keep_asking(url: str, done: asyncio.Event, seed: int, seen: set[int]) -> list[Asked]:
    """One client: asks until `done`, requests of one to three rows; `seen` gets the versions of the answers."""
    generator = np.random.default_rng(seed)
    asked = []
    async with BareClient(url) as client:
        while not done.is_set():
            rows = random_rows(
                generator.integers(1, 60, generator.integers(1, 4)).tolist(), seed=len(asked) + 1000 * seed
            )
            asked.append(Asked(rows, await client.infer(CRITIC_INFER, scoring_inputs(rows))))
            seen.update(asked[-1].answer["weights_version"].ravel().tolist())
            await asyncio.sleep(0.03)  # two cores must start two fresh stubs beside this
    return asked


def test_no_request_fails_or_mixes_versions_during_reloads(live: System) -> None:
    """5 swaps and 2 reloads through Triton's load API, under 16 clients."""
    first, reloads = live.run.next_step(), len(triton_reloads(live.run))
    seen: set[int] = set()

    async def train_and_save() -> None:
        async with BareClient(live.run.url, headers=KEY) as client:
            for i in range(5):
                arrays = {**training_inputs(seed=10 + i), **identity("test", first + i)}
                answer = await client.infer(CRITIC_TRAIN, arrays)
                while int(answer["weights_version"][0]) not in seen:
                    await asyncio.sleep(0.01)
                if i in (1, 3):
                    await client.infer(CRITIC_SAVE, SAVE)
                    await asyncio.to_thread(wait_for, lambda i=i: len(triton_reloads(live.run)) > reloads + i // 2)

    async def under_load() -> list[list[Asked]]:
        done = asyncio.Event()
        clients = [asyncio.create_task(keep_asking(live.run.url, done, seed, seen)) for seed in range(NUM_CLIENTS)]
        try:
            await train_and_save()
        finally:
            done.set()
        return await asyncio.gather(*clients)  # a refused request raises here

    asked = [item for client in asyncio.run(under_load()) for item in client]
    by_version: dict[int, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for item in asked:
        versions = set(item.answer["weights_version"].ravel().tolist())
        assert len(versions) == 1
        by_version[versions.pop()] += [(row, item.answer["values"][i]) for i, row in enumerate(item.rows)]
    assert len(by_version) >= 5
    for version, pairs in by_version.items():
        direct = direct_values(live.run.store.folder(version), [row for row, _ in pairs])
        for (row, values), expected in zip(pairs, direct, strict=True):
            np.testing.assert_allclose(values[: row.size], expected, atol=TOLERANCE, rtol=0)


def test_a_swap_inside_a_request_of_many_rows_changes_none_of_its_values(live: System) -> None:
    """64 rows are many forwards: the request stays with the version it began with, in each of its rows."""
    first = live.run.next_step()

    async def train() -> None:
        async with BareClient(live.run.url, headers=KEY) as client:
            for i in range(6):
                await client.infer(CRITIC_TRAIN, {**training_inputs(seed=40 + i), **identity("test", first + i)})

    async def crossed() -> list[Asked]:
        """Requests that were under way when a newer version than theirs was served already."""
        training, found, seed = asyncio.create_task(train()), [], 0
        async with BareClient(live.run.url) as client:
            while not training.done():
                rows = random_rows([*range(65, 129)], seed=seed)
                item = Asked(
                    rows, await client.infer(CRITIC_INFER, scoring_inputs(rows), ["values", "weights_version"])
                )
                seed += 1
                newest = max(record.version or 0 for record in live.run.store.serving())
                if int(item.answer["weights_version"].min()) < newest:  # critic_train's answer may come much later
                    found.append(item)
        await training
        return found

    items = asyncio.run(crossed())
    assert items
    for item in items[:3]:
        (version,) = set(item.answer["weights_version"].ravel().tolist())
        direct = direct_values(live.run.store.folder(version), item.rows)
        for i, (row, expected) in enumerate(zip(item.rows, direct, strict=True)):
            np.testing.assert_allclose(item.answer["values"][i, : row.size], expected, atol=TOLERANCE, rtol=0)


def triton_reloads(run: LiveRun) -> list[dict[str, Any]]:
    """The sidecar's lines on reloads at a critic_save."""
    return [line for line in run.critic_metrics() if line.get("reason") == "save"]


# ---- damaged versions ----


class TruncatingPublisher(Publisher):
    """The disk loses the end of the file after the version was verified."""

    def verify(self, version: int, *args: Any) -> None:
        super().verify(version, *args)
        cut(self._store.folder(version) / WEIGHTS_FILE)


def cut(path: Path) -> None:
    """Another file in its place: cut in place it would kill whoever is reading it just then."""
    half = path.with_name("half")
    half.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    half.replace(path)


def next_critic(run: LiveRun) -> CriticModel:
    """What is served, and a little more: never equal to a version in the store, which would be taken instead."""
    critic = load_critic(run.store.folder(run.store.current() or 0))
    with torch.no_grad():
        for parameter in critic.model.parameters():
            parameter += 0.01 * torch.rand_like(parameter)
    return critic


def test_a_truncated_version_is_refused_the_old_one_serves_on_and_then_the_next(live: System) -> None:
    """The sidecar beside the publisher has nothing to do."""
    run, current, counted = live.run, live.run.store.current() or 0, rejections(live.run)
    servers = {"servers": [run.config.server.grpc_url], "reload": "swap", "timeout_s": 120.0}
    publisher = TruncatingPublisher(run.store, run_id=run.run_id, epoch=99, **servers, keep=12)
    with pytest.raises(VersionRejected, match=r"was refused by critic_0.*model\.safetensors is damaged"):
        publisher.publish(next_critic(run), step=run.journal.last_step(), beat=lambda _: None)
    assert run.store.current() == current
    assert_serves(run, current)
    wait_for(lambda: rejections(run) == counted + 1, timeout_s=120.0)
    answer = ask(run.url, CRITIC_TRAIN, training_inputs(seed=30), headers=KEY)
    assert_serves(run, int(answer["weights_version"][0]))


def rejections(run: LiveRun) -> int:
    """What the server's metrics say."""
    with urllib.request.urlopen(f"http://{run.config.server.metrics_url}/metrics", timeout=60) as answer:
        found = re.search(r'^rlhf_weights_rejected_total\{model="critic"\} (\d+)', answer.read().decode(), re.MULTILINE)
    return int(found[1]) if found else 0


@pytest.mark.slow
def test_a_fresh_process_refuses_a_damaged_version_that_somebody_named_and_the_sidecar_puts_it_back(
    live: System,
) -> None:
    """CURRENT is changed by hand: Triton's load fails with a sentence, and the process that serves stays."""
    store, current = live.run.store, live.run.store.current() or 0
    live.stop_sidecar()  # it would put CURRENT back at once
    try:
        critic = next_critic(live.run)
        origin = {"run_id": live.run.run_id, "step": live.run.journal.last_step(), "parent": None, "epoch": 99}
        damaged = store.add(lambda folder: save_critic(critic, folder), **origin)
        cut(store.folder(damaged.version) / WEIGHTS_FILE)
        store.set_current(damaged.version)
        key = control_key(live.run.config.run.weights_dir)
        with ControlPlane(live.run.config.server.grpc_url, key) as control, pytest.raises(LoadRefused) as caught:
            control.load(CRITIC, parameters={"weights_version": "a damaged one"}, timeout_s=60.0)
        print(caught.value)
        assert f"weights version {damaged.version} cannot be served" in str(caught.value)
        assert "python -m tools weights rollback" in str(caught.value)
        assert serve_values(live.run)[1] == current
    finally:
        live.start_sidecar()
    wait_for(lambda: store.current() == current, live.sidecar)
    assert_serves(live.run, current)
