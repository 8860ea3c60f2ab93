"""Runs with an environment: PPO with served critic and reward, and GRPO without a server, killed between turns."""

import dataclasses
import functools
import os
import random
import signal
from pathlib import Path

import psutil
import pytest
import yaml
from live_system import make_run, run_actor, start_system
from run_checkpoints import POSITIONS
from safetensors.numpy import load_file
from waiting import wait_for

from rlhf_triton.config.loading import load_config
from rlhf_triton.store.jsonl import read_jsonl, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
CLASSES = Path(__file__).parents[1] / "support" / "environment_classes.py"
KILLS = int(os.environ.get("AGENT_KILLS", "1"))  # by hand: 20
STEPS = 12


def agent_run(folder, checkpoints, name="Countdown", **sections):
    folder.mkdir(parents=True)
    rows = [{"id": str(i), "text": "The server ", "turns": 1 + i % 3} for i in range(16)]
    if "agent" in sections.get("environment", {}):
        rows = [{"id": str(i), "messages": [{"role": "user", "content": f"Say {i}."}]} for i in range(16)]
    prompts = folder / "rows.jsonl"
    write_jsonl(prompts, rows)
    environment = {
        **({"class": f"{CLASSES}:{name}"} if name else {}),
        "max_turns": 4,
        "max_tokens": POSITIONS,
        "truncated": "score",
        **sections.pop("environment", {}),
    }
    given = {
        "prompts_path": str(prompts),
        "validation_prompts": str(prompts),
        "stop_strings": ["e"],
        "steps": STEPS,
        **sections.pop("actor", {}),
    }
    return make_run(folder, checkpoints, environment=environment, actor=given, rewards={"model": {}}, **sections)


def steps_of(run):
    """Return the metrics of each step of a run beside its servers."""
    system = start_system(run)
    try:
        code, log = run_actor(run, "actor")
    finally:
        system.stop()
    assert code == 0, log
    return [*read_jsonl(run.config.run.dir / "metrics.jsonl")]


def test_ppo_trains_all_context_rows_of_an_agents_conversation(tmp_path, checkpoints):
    """Each conversation has three rows; critic and policy train all of them."""
    agent = {"agent": f"{CLASSES.with_name('agents.py')}:in_two_contexts"}
    run = agent_run(tmp_path / "run", checkpoints, "", environment=agent, actor={"steps": 3, "kl_reference": "triton"})
    lines = steps_of(run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["train_rollouts/turns"] == 4.0
        assert line["train_rollouts/reward_environment"] == 1.5
        assert line["train_rollouts/rewards"] != 1.5
        assert line["train_optim/minibatches"] == 2.0
        assert line["train_rollouts/masked_samples"] == 0
    assert [line["weights_version"] for line in run.critic_updates(up_to=3)] == [1, 2, 3]


def lines_of(log):
    return log.read_text().count("\n")


def without_server(run):
    """Return the run as deterministic GRPO with only the environment's rewards."""
    data = yaml.safe_load(run.path.read_text())
    for section in ("reward", "rewards", "critic"):
        del data[section]
    data["run"]["deterministic"] = True
    data["actor"]["algorithm"] |= {"name": "grpo", "responses_per_prompt": 4}
    run.path.write_text(yaml.safe_dump(data))
    return dataclasses.replace(run, config=load_config(run.path))


def test_an_actor_killed_between_turns_resumes_bit_identically(tmp_path, checkpoints):
    runs = []
    for name in ("undisturbed", "killed"):
        log = tmp_path / f"{name}.log"
        environment = {"options": {"log": str(log)}, "workers": 2}
        runs.append(without_server(agent_run(tmp_path / name, checkpoints, "Logged", environment=environment)))
        log.touch()
    kill = runs[1]
    luck = random.Random(0)
    log = tmp_path / "killed.log"
    for i in range(KILLS):
        actor = kill.start(f"actor-{i}", module="rlhf_triton.actor")
        seen = lines_of(log) + luck.randrange(1, 40)
        wait_for(functools.partial(lambda seen: lines_of(log) >= seen, seen), actor)
        actor.process.kill()
        assert actor.process.wait() == -signal.SIGKILL
    found = []
    for run in runs:
        code, text = run_actor(run, "last")
        assert code == 0, text
        lines = [*read_jsonl(run.config.run.dir / "metrics.jsonl")]
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        rewards = [line["train_rollouts/rewards"] for line in lines]
        found.append((rewards, load_file(run.config.run.dir / "policy" / "model.safetensors")))
    assert found[0][0] == found[1][0]
    assert all((found[0][1][name] == found[1][1][name]).all() for name in found[0][1])
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in commands if "environments.worker" in line and str(tmp_path) in line]
