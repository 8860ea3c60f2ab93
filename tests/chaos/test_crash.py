"""Processes killed outright, at any moment: each accepted step is trained once, in order, to the same bits."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
from bare_client import ask
from live_system import (
    Checkpoints,
    LiveRun,
    System,
    identity,
    make_run,
    start_system,
    stop_process,
    training_inputs,
    wait_for,
)

from python_backend.checkpoints.inspection import WEIGHTS_FILE
from python_backend.client.client import TritonClient
from python_backend.config import ClientSection
from python_backend.models.modeling import load_critic, save_critic
from python_backend.store.jsonl import read_jsonl
from python_backend.store.weights import sha256_of
from python_backend.wire.contract import CRITIC, CRITIC_TRAIN
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


def test_a_killed_critic_stub_is_replaced(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """Triton does not restart a stub; the sidecar sees it dead, without any request, and asks for another."""
    run = make_run(tmp_path / "stub", checkpoints, **settings())
    system = start_system(run)
    try:
        first = ask(run.url, CRITIC_TRAIN, {**payload(1), **identity("test", 1)})
        (record,) = run.store.serving()
        assert f"{CRITIC}_0" in record.instance
        psutil.Process(record.pid).send_signal(signal.SIGKILL)
        wait_for(lambda: any(fresh.pid != record.pid for fresh in run.store.serving()), system.sidecar)
        second = ask(run.url, CRITIC_TRAIN, {**payload(2), **identity("test", 2)})
        assert int(second["weights_version"][0]) == int(first["weights_version"][0]) + 1
        version = int(second["weights_version"][0])
        # If the new process starts slowly, supervisor and sidecar both request one, and two serve for a while.
        wait_for(
            lambda: [(r.pid != record.pid, r.version) for r in run.store.serving()] == [(True, version)],
            system.sidecar,
        )
    finally:
        system.stop()


def test_a_killed_actor_resumes_and_rewinds_the_critic(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """A checkpoint at step 2, killed during step 4: steps 3 and 4 are set aside and done again."""
    run = make_run(tmp_path / "actor", checkpoints, actor={"steps": 6, "checkpoint_every": 2})
    system = start_system(run)
    actor = run.start("actor")
    try:
        metrics = run.config.run.dir / "metrics.jsonl"
        # A step's line may be written before its payload is in the journal: the critic is not waited for.
        wait_for(lambda: min(len(read_jsonl(metrics)), run.journal.last_step()) >= 3, actor)
        actor.process.send_signal(signal.SIGKILL)
        actor.process.wait()
        killed_at = run.journal.last_step()
        checkpoint = max(int(path.name) for path in (run.config.run.dir / "checkpoints" / "actor").glob("[0-9]*"))
        assert checkpoint in (2, 4)
        version_before = run.store.current() or 0
        actor = run.start("actor-again", module="actor")
        assert actor.process.wait(180) == 0, actor.log_path.read_text()
        log = actor.log_path.read_text()
        print(log)
        assert f"resuming from the checkpoint of step {checkpoint}" in log
        assert [line["step"] for line in read_jsonl(metrics)] == [1, 2, 3, 4, 5, 6]
        summary = json.loads((run.config.run.dir / "actor_summary.json").read_text())
        assert summary["critic_updates"] == 6
        manifest = run.store.manifest(run.store.current() or 0)
        assert (manifest.step, manifest.version) == (6, summary["weights_version"])
        assert summary["weights_version"] > version_before
        aside = list((run.config.run.journal_dir / "test" / "set_aside").glob("*/*.train"))
        # One more may have been on its way to the server when the actor was killed.
        assert {int(path.name.split(".")[0]) for path in aside} <= set(range(checkpoint + 1, killed_at + 2))
        lines = read_jsonl(run.config.run.dir / "samples.jsonl")
        assert {line["when"] for line in lines} == {"before", "after"}

        actor = run.start("actor-finished", module="actor")  # nothing is left to do, and nothing is lost
        assert actor.process.wait(180) == 0, actor.log_path.read_text()
        again = json.loads((run.config.run.dir / "actor_summary.json").read_text())
        assert again["weights_version"] == summary["weights_version"]
        assert again["critic_updates"] == 6
    finally:
        stop_process(actor)
        system.stop()


@pytest.mark.parametrize("role", ["sidecar", "server"])
def test_an_actor_whose_server_or_sidecar_dies_ends_with_one_sentence(
    tmp_path: Path, checkpoints: Checkpoints, role: str
) -> None:
    client = {"retries": 1, "deadline_s": 10, "max_outage_s": 3}
    run = make_run(tmp_path / role, checkpoints, actor={"steps": 5000, "checkpoint_every": 2, "client": client})
    system = start_system(run)
    actor = run.start("actor")
    try:
        wait_for(lambda: len(read_jsonl(run.config.run.dir / "metrics.jsonl")) >= 3, actor)
        process = system.sidecar.process if role == "sidecar" else psutil.Process(server_pid(run))
        process.send_signal(signal.SIGKILL)
        assert actor.process.wait(120) == 2
        log = actor.log_path.read_text()
        print(log[-2000:])
        assert log.splitlines()[-1].startswith("error: ")
        assert "Traceback" not in log
        words = {
            "sidecar": "is in the journal and will be processed",
            "server": "is `python -m tools serve` running there?",
        }
        assert words[role] in log.splitlines()[-1]
    finally:
        stop_process(actor)
        system.stop()


def server_pid(run: LiveRun) -> int:
    """The tritonserver process."""
    return int(json.loads((run.config.run.dir / "server.json").read_text())["pid"])
