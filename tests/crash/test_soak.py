"""The soak test of the whole loop, actor included: a PPO run in which processes are killed, and then left alone.

In the first 60 % of SOAK_MINUTES (2) a random process is killed from time to time; in the rest, what the processes use
may not grow, from the median of its first quarter to that of its last one, within the life of one process.
"""

import contextlib
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from crash_system import DisturbedSystem
from live_system import Checkpoints, make_run

from rlhf_triton.actor.policy.checkpoint import saved_steps
from rlhf_triton.store.jsonl import NewLines, read_jsonl
from rlhf_triton.store.sealed_folder import read_state
from rlhf_triton.tools.server.shared_memory import SHARED_MEMORY

MINUTES = float(os.environ.get("SOAK_MINUTES", 2))
SEED = int(os.environ.get("CRASH_SEED", 1))
KILLS_UNTIL = 0.6  # of the duration
SETTLED_AFTER = 0.7  # of the duration: from here on growth is measured
LEAST_CALM = 0.25  # of the duration: growth is measured for at least this long
NUM_KILLS = 20
LEAST_PAUSE_S = 10.0  # between the step after a kill and the next kill
NUM_SAMPLES = 600
LOOK_EVERY_S = 0.1
LONGEST_UNTIL_S = 600.0  # until the next step after a kill
ROWS = 16  # responses per step
MOST_REQUESTS = 32  # in flight
LONG_S = 900.0  # of calm, after which allocators and caches have settled
MEMORY_SHARE, SHORT_MEMORY_SHARE = 0.05, 0.5  # allowed growth after a long and a short calm
MEMORY_MB = 16.0  # in addition
FILES, THREADS = 4, 4  # a sample may include short-lived ones
FLAT_MB = 2.0
FLAT_FILES = 16  # versions, entries or checkpoints that are being replaced
QUARTER = 4
ON_DISK = "on disk"


def make_soak_run(folder: Path, checkpoints: Checkpoints) -> Path:
    """Write the YAML of a PPO run without an end; return its path."""
    sections: dict[str, dict[str, Any]] = {
        "critic": {"reload": "swap"},
        "trainer": {
            "global_batch_size": ROWS,
            "checkpoint_every": 10,
            "max_steps": 10**6,
            "reload_on_save": "none",
            "publish": {"every": 1, "keep": 4},
        },
        "actor": {
            "steps": 10**9,
            "rollout_size": ROWS,
            "checkpoint_every": 20,
            "keep_checkpoints": 3,
            "validation_size": 0,
            "client": {"max_in_flight": MOST_REQUESTS, "backoff_s": 0.1, "deadline_s": 20, "retries": 6},
        },
    }
    return make_run(folder, checkpoints, **sections).path


class Soak:
    """One soak test: kills processes and takes samples while the system runs."""

    def __init__(self, system: DisturbedSystem, minutes: float, generator: random.Random) -> None:
        self.kills: list[dict[str, Any]] = []
        self.samples: list[UsageSample] = []
        self._system = system
        self._seconds = minutes * 60
        self._random = generator
        self._metrics = system.config.run.dir / "metrics.jsonl"
        self._started = time.monotonic()
        self._new_lines = NewLines(self._metrics)
        self._step = 0
        self._victims: list[str] = []
        self._next_kill_s = 0.0  # set once the first step is complete
        self._next_sample_s = 0.0

    @property
    def calm_from_s(self) -> float:
        """When growth begins to be measured, in seconds since the start; later if the last kill lasted."""
        ends = [kill["time_s"] + (kill["until_s"] or 0.0) for kill in self.kills]
        return max([SETTLED_AFTER * self._seconds, *ends])

    def run(self) -> None:
        """Run for the whole duration, longer if growth was not measured for long enough."""
        while not self._is_over(now := time.monotonic() - self._started):
            self._system.look()
            for line in self._new_lines.read_objects():
                self._step = line["step"]
            if now >= self._next_sample_s:
                self._next_sample_s = now + max(1.0, self._seconds / NUM_SAMPLES)
                self.samples.append(take_sample(self._system, now))
            self._look_at_kills(now)
            time.sleep(LOOK_EVERY_S)

    def _is_over(self, now: float) -> bool:
        pending = self._pending
        if pending is not None:
            return now > self._seconds and now - pending["time_s"] > LONGEST_UNTIL_S
        return now > max(self._seconds, self.calm_from_s + LEAST_CALM * self._seconds)

    @property
    def _pending(self) -> dict[str, Any] | None:
        """The last kill, while no step has been completed since."""
        return self.kills[-1] if self.kills and self.kills[-1]["until_s"] is None else None

    def _look_at_kills(self, now: float) -> None:
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

    def _plan_kill(self, now: float) -> None:
        pause_s = max(LEAST_PAUSE_S, KILLS_UNTIL * self._seconds / NUM_KILLS)
        self._next_kill_s = now + self._random.uniform(0.5, 1.0) * pause_s

    def _kill(self, now: float) -> None:
        if not self._victims:
            self._victims = self._random.sample(self._system.victims, len(self._system.victims))
        victim = self._victims.pop()
        processes = self._system.processes_of(victim)
        if processes and self._system.kill(self._random.choice(processes)):
            kill = {"time_s": round(now, 2), "wall_time": time.time(), "victim": victim, "step": self._step}
            self.kills.append(kill | {"until_s": None})
            print(f"{now / 60:6.1f} min  step {self._step}  killed the {victim}")


@dataclass(frozen=True)
class UsageSample:
    """What the system uses at one moment."""

    time_s: float
    pids: dict[str, int]
    """Of the processes by name; a model of several processes or none is left out."""
    numbers: dict[tuple[str, str], float]
    """By process (or ON_DISK) and kind."""


def take_sample(system: DisturbedSystem, time_s: float) -> UsageSample:
    """Return what the system uses now; a process that ends meanwhile is left out."""
    run, journal = system.config.run, system.config.run.journal_dir / system.config.run.identity
    folders = [run.weights_dir, journal / "entries", run.dir / "checkpoints"]
    found: dict[tuple[str, str], float] = {
        (ON_DISK, "shared memory MB"): _megabytes(SHARED_MEMORY, system.region_prefix),
        (ON_DISK, "versions"): len(system.store.versions()),
        (ON_DISK, "journal entries"): _num_files(journal / "entries"),
        (ON_DISK, "checkpoints"): sum(_num_files(run.dir / "checkpoints" / role) for role in ("actor", "critic")),
        # Metrics and logs grow with the number of steps.
        (ON_DISK, "MB"): sum(map(_megabytes, folders)),
    }
    pids = {}
    for name in system.victims:
        processes = system.processes_of(name)
        if len(processes) == 1:
            with contextlib.suppress(psutil.Error):
                pids[name] = processes[0].pid
                found[name, "memory MB"] = processes[0].memory_info().rss / 1e6
                found[name, "files"] = processes[0].num_fds() - len(processes[0].net_connections("all"))
                found[name, "threads"] = processes[0].num_threads()
    return UsageSample(round(time_s, 2), pids, found)


def _num_files(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0


def _megabytes(root: Path, prefix: str = "") -> float:
    """Return the size on disk of the files below `root` whose names begin with `prefix`."""
    total = 0
    for folder, _, names in os.walk(root):  # which ignores a folder that was removed since it was listed
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(folder) / name).stat().st_blocks * 512 if name.startswith(prefix) else 0
    return total / 1e6


def growth(calm: Sequence[UsageSample]) -> list[str]:
    """Return what has grown between the first and the last quarter, within the life of one process."""
    share = MEMORY_SHARE if calm[-1].time_s - calm[0].time_s >= LONG_S else SHORT_MEMORY_SHARE
    allowed = {
        "memory MB": (share, MEMORY_MB),
        "files": (0.0, FILES),
        "threads": (0.0, THREADS),
        "shared memory MB": (0.0, FLAT_MB),
        "MB": (0.25, FLAT_MB),
    }
    found = []
    for name, kind in calm[-1].numbers:
        values = [
            sample.numbers[name, kind]
            for sample in calm
            if (name, kind) in sample.numbers and sample.pids.get(name) == calm[-1].pids.get(name)
        ]
        size = max(1, len(values) // QUARTER)
        before, after = statistics.median(values[:size]), statistics.median(values[-size:])
        slope, slack = allowed.get(kind, (0.0, FLAT_FILES))
        if after > before * (1 + slope) + slack:
            found.append(f"{name}: {before:g} {kind}, and {after:g} later")
    return found


@pytest.mark.slow
@pytest.mark.timeout(900 + 180 * MINUTES)
def test_kills_cost_no_update_and_nothing_grows(tmp_path: Path, checkpoints: Checkpoints) -> None:
    system = DisturbedSystem(make_soak_run(tmp_path, checkpoints), random.Random(SEED + 1), ("actor", "sidecar"))
    soak = Soak(system, MINUTES, random.Random(SEED + 2))
    try:
        soak.run()
        system.stop_program("actor")
        system.stop_program("sidecar")
    finally:
        system.stop()
    run_dir = system.config.run.dir
    last = max(saved_steps(run_dir / "checkpoints" / "actor"))
    pauses = [kill["until_s"] for kill in soak.kills]
    print(f"{last} steps, {len(pauses)} kills, the longest pause {max(pauses):.0f} s")

    assert system.troubles == [], "only killed processes end"
    assert system.leftovers() == []
    actor, critic = (read_state(run_dir / "checkpoints" / role / str(last)) for role in ("actor", "critic"))
    current = system.store.current()
    assert current is not None
    # A step is one optimizer step, so the critic's checkpoint counts its updates.
    trained = (critic["step"], critic["optimizer_step"], system.store.manifest(current).step)
    assert trained == (last, last, last), "each step trained the critic once"
    assert [line["step"] for line in read_jsonl(run_dir / "metrics.jsonl")] == list(range(1, last + 1))
    assert [line for line in read_jsonl(run_dir / "critic_metrics.jsonl") if "error" in line] == []
    assert actor["masked_samples"] == 0, "every response was scored"
    calm = [sample for sample in soak.samples if sample.time_s >= soak.calm_from_s]
    assert calm
    assert growth(calm) == []
