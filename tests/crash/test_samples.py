"""The crash test of asynchronous training: PPO two steps ahead, with vLLM and a live critic, each of which is killed.

`make test-all` kills each process once, `make crash` CRASH_KILLS (50) times in all. What trains then is compared with
the schedule, which follows from the seed.
"""

import os
import random
import time
from collections import Counter
from pathlib import Path

import crash_vllm
import numpy as np
import pytest
from crash_system import VLLM, DisturbedSystem
from live_system import make_run
from shebang import SHEBANG

from rlhf_triton.actor.data.prompt_reader import PromptReader
from rlhf_triton.actor.data.prompts import Positions, StepInputs
from rlhf_triton.actor.data.rollout_rows import rows_of
from rlhf_triton.actor.data.sample_records import group_of
from rlhf_triton.actor.replay.recorded_steps import find_steps
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.monitoring.log_lines import say
from rlhf_triton.store.jsonl import NewLines
from rlhf_triton.store.sealed_folder import saved_steps
from rlhf_triton.tools.server.health import is_alive
from rlhf_triton.tools.server.ports import free_port

VICTIMS = ("actor", "sidecar", "tritonserver", VLLM)
KILLS = int(os.environ.get("CRASH_KILLS", len(VICTIMS)))
SEED = int(os.environ.get("CRASH_SEED", 1))
AHEAD = 2
STALENESS = 1
# prompts per step, and responses per prompt
PROMPTS = 4
SIZE = 4
TOGETHER = 0.3  # share of the kills right after which another process is killed
LONGEST_PAUSE_S = 2.0  # from a step after a kill to the next kill
RECOVERY_S = 600.0  # time limit for a step after a kill
LOOK_EVERY_S = 0.05


def make_async_run(folder, checkpoints):
    """Write the YAML of an endless run that keeps all samples and versions; return its path."""
    command = folder / "vllm"
    folder.mkdir()
    support = str(Path(crash_vllm.__file__).parent)
    command.write_text(f"{SHEBANG}import sys\nsys.path.insert(0, {support!r})\nfrom crash_vllm import main\nmain()\n")
    command.chmod(0o755)
    sections = {
        "server": {"start_timeout_s": 900},
        "reward": {"store": True},
        "trainer": {
            "global_batch_size": PROMPTS * SIZE,
            "checkpoint_every": 10,
            "max_steps": 10**6,
            "publish": {"every": 1, "keep": 100_000},
        },
        "actor": {
            "steps": 10**9,
            "max_off_policy_steps": AHEAD,
            "max_staleness": STALENESS,
            "rollout_size": PROMPTS * SIZE,
            "responses_per_prompt": SIZE,
            "old_logprobs": "sampler",
            "kl_coef": 0.0,
            "engine": "vllm",
            "generation_vllm_servers": [f"127.0.0.1:{free_port()}"],
            "generation_vllm_command": str(command),
            "generation_batch_size": 100,
            "max_new_tokens": 24,
            "minibatch_size": PROMPTS * SIZE,
            "lr": 1e-4,
            "checkpoint_every": 5,
            "keep_checkpoints": 10**6,
            "validation_size": 0,
            "client": {"deadline_s": 20},
        },
    }
    return make_run(folder, checkpoints, **sections).path


class Steps:
    """Follows the steps of a run, and restarts what was killed."""

    def __init__(self, system):
        self.newest = 0
        self._system = system
        self._lines = NewLines(system.config.run.dir / "metrics.jsonl")

    def wait(self, condition):
        """Return once `condition` holds; fail after RECOVERY_S."""
        deadline = time.monotonic() + RECOVERY_S
        while not condition():
            assert time.monotonic() < deadline, f"the run has not recovered after step {self.newest}"
            self._system.restart_killed()
            for line in self._lines.read_objects():  # again from the first line on, when the actor has resumed
                self.newest = line["step"]
            time.sleep(LOOK_EVERY_S)

    def wait_for_another(self):
        """Wait for the next step, or until the actor has resumed from an earlier one."""
        before = self.newest
        self.wait(lambda: self.newest != before)


def disturb(system, generator, kills):
    """Kill processes at random moments until there were `kills`, and steps after them; return how often each was."""
    steps = Steps(system)
    killed = Counter()
    victims = []
    while killed.total() < kills:
        steps.wait_for_another()
        time.sleep(generator.uniform(0.0, LONGEST_PAUSE_S))
        is_last = False
        while not is_last and killed.total() < kills:
            victims = victims or generator.sample(VICTIMS, len(VICTIMS))
            victim = victims.pop()
            if any(system.kill(process) for process in system.processes_of(victim) if is_alive(process)):
                killed[victim] += 1
                say(f"{killed.total():>3}/{kills}  step {steps.newest:>4}  killed {victim}")
            is_last = generator.random() > TOGETHER
            time.sleep(0.0 if is_last else generator.uniform(0.0, 0.5))
    steps.wait(system.is_whole)
    last = steps.newest
    steps.wait(lambda: steps.newest > last)
    return killed


def schedule(config, num_steps):
    """Return the samples of the first steps in the order of their prompts; they follow from the run's seed."""
    reader = PromptReader.from_config(config, load_tokenizer(config.actor.policy.model), None)
    inputs = StepInputs(config.actor.prompts.sources, reader, seed=config.run.seed)
    samples = []
    for number, (prompt, _) in enumerate(inputs.read(num_steps * PROMPTS, Positions())):
        step_seed = inputs.seed_of(number // PROMPTS + 1)
        first = number % PROMPTS * SIZE
        for index in range(first, first + SIZE):
            seed = int(np.random.SeedSequence([step_seed, index]).generate_state(1)[0]) >> 1
            response = crash_vllm.response(seed, config.actor.generation.max_new_tokens)
            samples.append((*prompt.tokens.tolist(), *response))
    return samples


def trained_rows(recorded):
    """Return the rows that the steps have trained, in order, each with its step."""
    places = [(step, number) for step in sorted(recorded.steps) for number in recorded.step(step).header["groups"]]
    return [
        (step, row) for step, number in places for row in rows_of(group_of(recorded.group(step, number)).conversations)
    ]


@pytest.mark.slow
@pytest.mark.timeout(600 + 120 * KILLS)
def test_each_scheduled_sample_trains_once_despite_kills(tmp_path, checkpoints):
    path = make_async_run(tmp_path / "run", checkpoints)
    system = DisturbedSystem(path, random.Random(SEED + 1), ("actor", "sidecar"))
    try:
        killed = disturb(system, random.Random(SEED + 2), KILLS)
        system.stop_program("actor")
        system.stop_program("sidecar")
    finally:
        system.stop()
    run = system.config.run
    last = max(saved_steps(run.dir / "checkpoints" / "actor"))
    recorded = find_steps(run.sample_journal_dir, 1, last)
    system.check_run(last)
    assert sorted(recorded.steps) == [*range(1, last + 1)]

    rows = trained_rows(recorded)
    trained = [tuple(row.tokens.tolist()) for _, row in rows]
    scheduled = schedule(system.config, last)
    lost = Counter(scheduled) - Counter(trained)
    repeated = Counter(trained) - Counter(scheduled)
    print(
        f"{dict(killed)} killed, {last} steps, {len(trained)} samples, {lost.total()} lost, "
        f"{repeated.total()} repeated or not scheduled"
    )
    assert trained == scheduled
    check_versions(system.store, rows)


def check_versions(critics, rows):
    """Check that rows name the versions that they were trained with, and that these are as new as they must be.

    Each token names its version of the policy, each row those of critic and reward model.
    """
    ages = Counter()
    for step, row in rows:
        assert row.policy_steps is not None
        ages.update((step - 1 - row.policy_steps[row.sampled]).tolist())
        missing = step - 1 - critics.manifest(row.score.version).step
        assert 0 <= missing <= STALENESS, f"step {step}: the critic lacks {missing} updates"
        assert row.score.reward_version == 0
    print("tokens by the age of their policy:", dict(sorted(ages.items())))
    assert 0 <= min(ages) <= max(ages) <= AHEAD
