"""Processes killed outright, at any moment: each accepted step is trained once, in order, to the same bits."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import numpy as np
import pytest
from live_system import (
    Checkpoints,
    LiveRun,
    System,
    make_run,
    start_system,
    training_inputs,
)

from python_backend.checkpoints.inspection import WEIGHTS_FILE
from python_backend.client.client import TritonClient
from python_backend.config import ClientSection
from python_backend.models.modeling import load_critic, save_critic
from python_backend.store.weights import sha256_of
from python_backend.wire.training_payload import train_payload
from trainer.critic_update import CriticUpdate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NUM_STEPS = 12
NUM_KILLS = 4
PATIENT = ClientSection(retries=60, train_retries=60, backoff_s=0.2, train_deadline_s=60)


def payload(step: int) -> dict[str, np.ndarray]:
    """What the scripted writer sends as `step`: several micro-batches, so that a kill may fall between them."""
    return training_inputs(seed=100 + step, rows=24, width=100)


async def write_steps(run: LiveRun) -> list[int]:
    """Send all steps, each when the one before is answered; their weights versions."""
    versions = []
    async with TritonClient(run.url, PATIENT) as client:
        for step in range(1, NUM_STEPS + 1):
            versions.append((await client.train(payload(step), run_id="test", step=step)).weights_version)
            if step % 5 == 0:
                await client.save(run_id="test", step=step)
    return versions


def calm_digests(run: LiveRun, folder: Path) -> list[str]:
    """sha256 of the weights after each step of a plain loop: no journal, no server, no kills."""
    critic = load_critic(run.store.folder(0))
    update = CriticUpdate(critic, run.config.trainer)
    digests = []
    for step in range(NUM_STEPS + 1):
        if step:
            update.train(train_payload(payload(step), critic.limits), lambda _: None)
        save_critic(critic, folder)
        digests.append(sha256_of(folder / WEIGHTS_FILE))
    return digests


def settings(**trainer: object) -> dict[str, dict[str, object]]:
    return {
        "trainer": {
            "global_batch_size": 8,
            "token_budget": 400,
            "checkpoint_every": 4,
            "publish": {"keep": 50},
            **trainer,
        }
    }


def test_killing_the_sidecar_changes_nothing(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """12 steps over HTTP with four SIGKILLs at random moments: the bits of a plain loop."""
    run = make_run(tmp_path / "shaken", checkpoints, **settings(reload_on_save="none"))
    system = start_system(run)
    seed = random.randrange(1 << 32)
    print(f"seed of the kills: {seed}")
    try:
        versions = asyncio.run(with_kills(system, random.Random(seed)))
        manifests = [run.store.manifest(version) for version in run.store.versions()]
        assert [manifest.step for manifest in manifests] == list(range(NUM_STEPS + 1)), "published once, in order"
        assert versions == [manifest.version for manifest in manifests[1:]]
        assert run.store.current() == versions[-1]
        assert [manifest.sha256 for manifest in manifests] == calm_digests(run, tmp_path)
        results = {result.entry: result for result in run.journal.results()}
        assert [results[f"{step:08d}.train"].error for step in range(1, NUM_STEPS + 1)] == [None] * NUM_STEPS
    finally:
        system.stop()


async def with_kills(system: System, generator: random.Random) -> list[int]:
    """Write the steps while the sidecar is killed and started again."""
    writer = asyncio.create_task(write_steps(system.run))
    for _ in range(NUM_KILLS):
        last = system.run.journal.last_step()
        await until(
            lambda last=last: system.run.journal.is_followed() and system.run.journal.last_step() > last, writer
        )
        await asyncio.sleep(generator.uniform(0, 0.6))
        system.sidecar.process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(system.sidecar.process.wait)
        system.sidecar = system.run.start("sidecar", module="trainer")
    return await writer


async def until(condition: object, writer: asyncio.Task[list[int]]) -> None:
    while not condition() and not writer.done():  # type: ignore[operator]
        await asyncio.sleep(0.01)
