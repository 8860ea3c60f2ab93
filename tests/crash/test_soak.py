"""The soak test of the whole loop including the actor: a PPO run of SOAK_MINUTES (2) whose processes are killed."""

import os
import random
import time

import pytest
from crash_system import DisturbedSystem
from live_system import make_run

from rlhf_triton.store.jsonl import NewLines
from rlhf_triton.store.sealed_folder import saved_steps

MINUTES = float(os.environ.get("SOAK_MINUTES", 2))
SEED = int(os.environ.get("CRASH_SEED", 1))
KILLS_UNTIL = 0.8  # share of the duration
NUM_KILLS = 20
LEAST_PAUSE_S = 10.0  # between the step after a kill and the next kill
LOOK_EVERY_S = 0.1
LONGEST_UNTIL_S = 600.0  # until the next step after a kill
ROWS = 16  # responses per step


def make_soak_run(folder, checkpoints):
    """Write the YAML of an endless PPO run; return its path."""
    sections = {
        "critic": {"reload": "swap"},
        "trainer": {
            "global_batch_size": ROWS,
            "checkpoint_every": 10,
            "max_steps": 10**6,
            "publish": {"every": 1, "keep": 4},
        },
        "actor": {
            "steps": 10**9,
            "rollout_size": ROWS,
            "checkpoint_every": 20,
            "keep_checkpoints": 3,
            "validation_size": 0,
            "client": {"deadline_s": 20},
        },
    }
    return make_run(folder, checkpoints, **sections).path


class Soak:
    """A soak test that kills processes while the system runs."""

    def __init__(self, system, minutes, generator):
        self.kills = []
        self._system = system
        self._seconds = minutes * 60
        self._random = generator
        self._metrics = system.config.run.dir / "metrics.jsonl"
        self._started = time.monotonic()
        self._new_lines = NewLines(self._metrics)
        self._step = 0
        self._victims = []
        self._next_kill_s = 0.0  # set once the first step is complete

    def run(self):
        """Run for the whole duration, or longer if a step is still pending after a kill."""
        while not self._is_over(now := time.monotonic() - self._started):
            self._system.restart_killed()
            for line in self._new_lines.read_objects():
                self._step = line["step"]
            self._look_at_kills(now)
            time.sleep(LOOK_EVERY_S)

    def _is_over(self, now):
        pending = self._pending
        if pending is not None:
            return now > self._seconds and now - pending["time_s"] > LONGEST_UNTIL_S
        return now > self._seconds

    @property
    def _pending(self):
        """Return the last kill if no step has completed since."""
        return self.kills[-1] if self.kills and self.kills[-1]["until_s"] is None else None

    def _look_at_kills(self, now):
        pending = self._pending
        if pending is not None:
            if self._system.is_whole() and self._metrics.stat().st_mtime > pending["wall_time"]:
                pending["until_s"] = round(now - pending["time_s"], 2)
                self._plan_kill(now)
        elif not self._next_kill_s:
            if self._step >= 2:
                self._plan_kill(now)
        elif now >= self._next_kill_s and now < KILLS_UNTIL * self._seconds and self._system.is_whole():
            self._kill(now)

    def _plan_kill(self, now):
        pause_s = max(LEAST_PAUSE_S, KILLS_UNTIL * self._seconds / NUM_KILLS)
        self._next_kill_s = now + self._random.uniform(0.5, 1.0) * pause_s

    def _kill(self, now):
        if not self._victims:
            self._victims = self._random.sample(self._system.victims, len(self._system.victims))
        victim = self._victims.pop()
        processes = self._system.processes_of(victim)
        if processes and self._system.kill(self._random.choice(processes)):
            kill = {"time_s": round(now, 2), "wall_time": time.time(), "victim": victim, "step": self._step}
            self.kills.append(kill | {"until_s": None})
            print(f"{now / 60:6.1f} min  step {self._step}  killed the {victim}")


@pytest.mark.slow
@pytest.mark.timeout(900 + 180 * MINUTES)
def test_kills_lose_no_update_of_a_whole_run(tmp_path, checkpoints):
    system = DisturbedSystem(make_soak_run(tmp_path, checkpoints), random.Random(SEED + 1), ("actor", "sidecar"))
    soak = Soak(system, MINUTES, random.Random(SEED + 2))
    try:
        soak.run()
        system.stop_program("actor")
        system.stop_program("sidecar")
    finally:
        system.stop()
    last = max(saved_steps(system.config.run.dir / "checkpoints" / "actor"))
    pauses = [kill["until_s"] for kill in soak.kills]
    print(f"{last} steps, {len(pauses)} kills, the longest pause {max(pauses):.0f} s")
    system.check_run(last)
