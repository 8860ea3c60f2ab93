"""An actor on two ranks against the real system: killed ranks, and what it leaves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_system import Checkpoints, LiveRun, System, make_run, start_system, stop_process, wait_for
from safetensors.torch import load_file

from python_backend.store.jsonl import read_jsonl
from python_backend.store.weights import sha256_of
from tools.server.child import Child

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
STEPS = 6
OF_THIS_RUN = ("time", "timers/", "tokens_per_s", "client/", "train_rollouts/weights_version")


def ranked_run(folder: Path, checkpoints: Checkpoints) -> LiveRun:
    """Long responses and long updates, so that a kill hits one of them."""
    client = {"retries": 60, "train_retries": 60, "backoff_s": 0.2}
    return make_run(
        folder,
        checkpoints,
        run={"deterministic": True},
        actor={
            "ranks": 2,
            "steps": STEPS,
            "checkpoint_every": 2,
            "rollout_size": 12,
            "max_new_tokens": 48,
            "update_epochs": 6,
            "token_budget": 128,
            "kl_coef": 0.1,
            "client": client,
        },
    )


def outcome(run: LiveRun) -> list[Any]:
    """What must not depend on who was killed: the policy, the files of the last checkpoint, the critic, the metrics."""
    folder = run.config.run.dir
    lines = [
        {name: value for name, value in line.items() if not name.startswith(OF_THIS_RUN)}
        for line in read_jsonl(folder / "metrics.jsonl")
    ]
    files = sorted((folder / "checkpoints" / "actor" / str(STEPS)).rglob("*.safetensors"))
    slices: dict[str, list[Any]] = {}  # not bytes: which rank writes a tensor that is not sharded may differ
    for file in files:
        for name, tensor in load_file(file).items():
            slices.setdefault(name, []).append(tensor.tolist())
    critic = run.store.manifest(run.store.current() or 0)
    return [sha256_of(folder / "policy" / "model.safetensors"), slices, critic.sha256, lines]


@pytest.fixture(scope="module")
def systems(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Iterator[list[System]]:
    """Two systems with the same settings."""
    folder = tmp_path_factory.mktemp("ranks")
    started = [start_system(ranked_run(folder / name, checkpoints)) for name in ("calm", "killed")]
    yield started
    for system in started:
        system.stop()


def ranks_of(agent: Child) -> dict[int, psutil.Process]:
    """The processes of the ranks, by rank."""
    found = {}
    for process in psutil.Process(agent.process.pid).children(recursive=True):
        try:
            found[int(process.environ()["RANK"])] = process
        except (KeyError, psutil.Error):
            continue
    return found


def kill(agent: Child, rank: int) -> None:
    """SIGKILL one rank, and wait until all ranks of this attempt are gone."""
    ranks = ranks_of(agent)
    begin = time.monotonic()
    ranks[rank].kill()
    wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks.values()), agent)
    print(f"all ranks were gone {time.monotonic() - begin:.1f} s after the death of rank {rank}")


def test_killed_ranks_change_no_bit(systems: list[System]) -> None:
    """Rank 1 is killed while responses are generated, then while the policy is updated, and then rank 0."""
    calm, killed = (system.run for system in systems)
    agent = calm.start("actor")
    assert agent.process.wait(600) == 0, agent.log_path.read_text()
    agent = killed.start("actor")
    try:
        wait_for(lambda: "INFO step 3/" in agent.log_path.read_text(), agent)
        kill(agent, 1)  # step 4 has begun, with its responses
        wait_for(lambda: killed.journal.last_step() >= 4, agent)
        kill(agent, 1)  # the batch of step 4 was sent just before the update
        wait_for(lambda: "INFO step 5/" in agent.log_path.read_text(), agent)
        kill(agent, 0)
        assert agent.process.wait(600) == 0, agent.log_path.read_text()
        log = agent.log_path.read_text()
        print(log)
        assert log.count("resuming from the checkpoint of step") == 3
        assert "Traceback" not in log
        for ours, theirs in zip(outcome(killed), outcome(calm), strict=True):
            assert ours == theirs
    finally:
        stop_process(agent)


def test_a_stopped_actor_resumes_on_another_number_of_ranks(systems: list[System], tmp_path: Path) -> None:
    """Without a critic, as the other test has trained that of the system."""
    grpo = [f"run.dir={tmp_path}", "actor.algorithm.name=grpo", "actor.algorithm.responses_per_prompt=2"]

    def start(name: str, *overrides: str) -> Child:
        return systems[0].run.start(name, *grpo, *overrides, module="actor")

    actor = start("actor-stopped")
    wait_for(lambda: "INFO step 1/" in actor.log_path.read_text(), actor)
    assert stop_process(actor) == 130, actor.log_path.read_text()
    assert "whose checkpoint is written" in actor.log_path.read_text()
    actor = start("actor-alone", "actor.ranks=1", "actor.steps=3")
    assert actor.process.wait(300) == 0, actor.log_path.read_text()
    assert "is from 2 ranks, and the run continues on 1" in actor.log_path.read_text()
    actor = start("actor-again", "actor.steps=4", "actor.policy.lora_rank=2")
    assert actor.process.wait(300) == 2
    log = actor.log_path.read_text()
    assert (log.count("error: "), "Traceback" in log) == (1, False)
