"""`run.deterministic`: the whole loop gives the same bits, whoever is killed in the middle of it."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_system import Checkpoints, LiveRun, System, make_run, start_system, stop_process, validations_of, wait_for

from actor.policy.checkpoint import saved_steps
from python_backend.store.jsonl import read_jsonl
from python_backend.store.weights import sha256_of
from tools.server.child import Child

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
STEPS, CHECKPOINT_EVERY, KILLED_AT = 7, 3, 5
# What another clock, other weights version numbers or a second start of the actor change.
OF_THIS_RUN = ("time", "timers/", "tokens_per_s", "client/", "train_rollouts/weights_version")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What must not depend on who was killed."""

    policy: str  # sha256 of the weights
    optimizer: str
    critic: str
    lines: list[dict[str, Any]]  # metrics.jsonl
    validations: list[Any]


def outcome(run: LiveRun) -> Outcome:
    folder = run.config.run.dir
    lines = [
        {name: value for name, value in line.items() if not name.startswith(OF_THIS_RUN)}
        for line in read_jsonl(folder / "metrics.jsonl")
    ]
    current = run.store.manifest(run.store.current() or 0)
    assert current.step == STEPS
    return Outcome(
        sha256_of(folder / "policy" / "model.safetensors"),
        sha256_of(folder / "checkpoints" / "actor" / str(STEPS) / "optimizer.safetensors"),
        current.sha256,
        lines,
        validations_of(folder),
    )


def deterministic_run(folder: Path, checkpoints: Checkpoints) -> LiveRun:
    """Few steps, several optimizer steps and micro-batches in each."""
    client = {"retries": 60, "train_retries": 60, "backoff_s": 0.2}
    return make_run(
        folder,
        checkpoints,
        run={"deterministic": True},
        trainer={"global_batch_size": 3, "token_budget": 64},
        actor={
            "steps": STEPS,
            "checkpoint_every": CHECKPOINT_EVERY,
            "rollout_size": 12,
            "generation_batch_size": 6,
            "max_new_tokens": 24,
            "token_budget": 128,
            "update_epochs": 2,
            "client": client,
            "kl_coef": 0.1,
            "kl_target": 0.01,
            "kl_horizon": 100,
            "rewards_normalization": "running",
            "rewards_clip": 2,
            "missing_eos_penalty": 0.5,
            "entropy_bonus": 0.01,
            "clip_ratio_high": 0.28,
            "update_max_kl": 0.5,
            "validation_every": CHECKPOINT_EVERY,
        },
    )


def finish(actor: Child) -> None:
    """Wait until the actor has ended well."""
    try:
        assert actor.process.wait(240) == 0, actor.log_path.read_text()
    finally:
        stop_process(actor)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Iterator[System]:
    """A system on which an actor has run to its end without any kill."""
    system = start_system(deterministic_run(tmp_path_factory.mktemp("calm"), checkpoints))
    try:
        finish(system.run.start("actor"))
        yield system
    finally:
        system.stop()


def kill_critic(system: System) -> None:
    """SIGKILL to the sidecar and to every process that serves the critic; then another sidecar."""
    for record in system.run.store.serving():
        psutil.Process(record.pid).kill()
    system.sidecar.process.kill()
    system.sidecar.process.wait()
    system.start_sidecar()


def kill_actor_between_checkpoints(run: LiveRun, actor: Child) -> None:
    """Once step 5 is accepted: its update, or the next one, is on the way; the newest checkpoint is of step 3."""
    wait_for(lambda: run.journal.last_step() >= KILLED_AT, actor)
    actor.process.kill()
    assert actor.process.wait() == -signal.SIGKILL
    assert max(saved_steps(run.config.run.dir / "checkpoints" / "actor"), default=0) == CHECKPOINT_EVERY


def stop_actor_between_checkpoints(run: LiveRun, actor: Child) -> int:
    """SIGTERM during the step after `KILLED_AT`, or as it begins or ends; returns the last whole step."""
    wait_for(lambda: run.journal.last_step() >= KILLED_AT and f"step {KILLED_AT}/" in actor.log_path.read_text(), actor)
    assert actor.stop(signal.SIGTERM, 60.0) == 130
    last = int(read_jsonl(run.config.run.dir / "metrics.jsonl")[-1]["step"])
    for room in ("actor", "critic"):
        assert max(saved_steps(run.config.run.dir / "checkpoints" / room)) == last, room
    assert f"stopped after step {last}, whose checkpoint is written" in actor.log_path.read_text()
    return last


def assert_resumed(run: LiveRun, actor: Child) -> None:
    """It went on from its checkpoint, and the critic went back to it."""
    assert f"resuming from the checkpoint of step {CHECKPOINT_EVERY}" in actor.log_path.read_text()
    aside = {path.name for path in (run.config.run.journal_dir / "test" / "set_aside").glob("*/*.train*")}
    assert aside & {f"{KILLED_AT:08d}.train", f"{KILLED_AT:08d}.train.json"}
    manifests = [run.store.manifest(version) for version in run.store.versions()]
    assert [manifest.step for manifest in manifests].count(KILLED_AT) == 2, "trained before the rewind, and after it"


def test_a_killed_actor_without_a_critic_changes_no_bit(calm: System, tmp_path: Path) -> None:
    """Adapters, groups and a coefficient that follows: all of it goes on from the checkpoint."""

    def start(folder: str) -> Child:
        settings = {
            "run.dir": tmp_path / folder,
            "actor.algorithm.name": "grpo",
            "actor.algorithm.responses_per_prompt": 2,
            "actor.policy.lora_rank": 2,
            "actor.max_staleness": 0,
        }
        return calm.run.start(f"actor-{folder}", *(f"{k}={v}" for k, v in settings.items()), module="actor")

    def bits(folder: str) -> list[Any]:
        checkpoint = tmp_path / folder / "checkpoints" / "actor" / str(STEPS)
        lines = [
            {name: value for name, value in line.items() if not name.startswith(OF_THIS_RUN)}
            for line in read_jsonl(tmp_path / folder / "metrics.jsonl")
        ]
        return [
            *(sha256_of(checkpoint / f"{name}.safetensors") for name in ("adapters", "optimizer")),
            *validations_of(tmp_path / folder),
            lines,
        ]

    finish(start("whole"))
    killed = start("killed")
    wait_for(lambda: len(read_jsonl(tmp_path / "killed" / "metrics.jsonl")) >= KILLED_AT - 1, killed)
    killed.process.kill()
    killed.process.wait()
    assert max(saved_steps(tmp_path / "killed" / "checkpoints" / "actor")) == CHECKPOINT_EVERY
    finish(start("killed"))
    assert len(bits("killed")[-1]) == STEPS
    assert bits("killed") == bits("whole")


def test_killing_all_three_changes_no_bit(calm: System, tmp_path: Path, checkpoints: Checkpoints) -> None:
    """The critic's process and the sidecar while the actor runs; then the actor, whose step 5 is trained already, the
    sidecar and the critic. It goes back to step 3, and its requests hold other rows than before; then SIGTERM.
    """
    run = deterministic_run(tmp_path, checkpoints)
    system = start_system(run)
    actor = run.start("actor")
    try:
        wait_for(lambda: run.journal.last_step() >= 1, actor)
        kill_critic(system)
        kill_actor_between_checkpoints(run, actor)
        wait_for(lambda: run.store.manifest(run.store.current() or 0).step >= KILLED_AT, system.sidecar)
        kill_critic(system)
        actor = run.start("actor-again", "actor.client.rows_per_request=3", module="actor")
        last = stop_actor_between_checkpoints(run, actor)
        assert_resumed(run, actor)
        assert last in (KILLED_AT, KILLED_AT + 1)
        actor = run.start("actor-at-last", module="actor")
        finish(actor)
        assert f"resuming from the checkpoint of step {last}" in actor.log_path.read_text()
        found, expected = outcome(run), outcome(calm.run)
        assert found == expected
        assert [line["train_rollouts/staleness_rows"] for line in expected.lines] == [{"0": 12}] * STEPS
    finally:
        stop_process(actor)
        system.stop()
