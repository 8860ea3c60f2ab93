"""`python -m tools chaos --minutes N --out DIR`: the soak test of the whole loop, actor included.

A PPO run without an end; in its first 60 % a random process is killed from time to time, in the rest what it uses is
measured. The results are in DIR/result.json and DIR/soak.png.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from actor.policy.checkpoint import saved_steps
from benchmarks.learning import configuration, make_checkpoints
from benchmarks.support.benchmark import Record
from benchmarks.support.children import free_ports
from chaos.soak.verdict import (
    MOST_REQUESTS,
    ROWS,
    Ended,
    UsageSample,
    check_disk,
    check_processes,
    check_responses,
    check_survival,
    check_updates,
    draw,
    take_sample,
)
from chaos.system import ChaosSystem
from chaos.verdict import Verdict
from python_backend.monitoring.log_lines import say
from python_backend.store.jsonl import JsonlTail
from python_backend.store.sealed_folder import read_state

KILLS_UNTIL = 0.6  # of the duration
SETTLED_AFTER = 0.7  # of the duration: from here on growth is measured
LEAST_CALM = 0.25  # of the duration: growth is measured for at least this long
NUM_KILLS = 20
LEAST_PAUSE_S = 10.0  # between the step after a kill and the next kill
NUM_SAMPLES = 600
LOOK_EVERY_S = 0.1
LONGEST_UNTIL_S = 600.0  # until the next step after a kill


def write_soak_config(folder: Path, seed: int) -> Path:
    """Write checkpoints, prompts and the YAML of a PPO run without an end in `folder`; return the YAML's path."""
    make_checkpoints(folder, seed)
    data = configuration(argparse.Namespace(steps=10**9, rollout_size=ROWS), folder, "ppo", seed)
    data["run"]["run_id"] = "soak"
    data["server"] |= free_ports()
    data["critic"] |= {"reload": "swap"}
    data["trainer"] |= {
        "global_batch_size": ROWS,
        "checkpoint_every": 10,
        "keep_checkpoints": 3,
        "reload_on_save": "none",
        "publish": {"every": 1, "keep": 4},
    }
    data["trainer"]["optimizer"]["max_steps"] = 10**6
    data["actor"] |= {
        "checkpoint_every": 20,
        "keep_checkpoints": 3,
        "stop_grace_s": 60,
        "client": {"max_in_flight": MOST_REQUESTS, "backoff_s": 0.1, "deadline_s": 20},
    }
    path = folder / "soak.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


class Soak:
    """One soak test: kills processes and takes samples while the system runs."""

    def __init__(self, system: ChaosSystem, minutes: float, generator: random.Random) -> None:
        self.kills: list[dict[str, Any]] = []
        self.samples: list[UsageSample] = []
        self._system, self._seconds, self._random = system, minutes * 60, generator
        self._metrics = system.config.run.dir / "metrics.jsonl"
        self._started, self._new_lines, self._step = time.monotonic(), JsonlTail(self._metrics), 0
        self._victims: list[str] = []
        self._next_kill_s = 0.0  # set once the first step is complete
        self._next_sample_s = 0.0
        self._said_s = 0.0

    @property
    def calm_from_s(self) -> float:
        """When growth begins to be measured, in seconds since the start; later if the last kill lasted."""
        ends = [kill["time_s"] + (kill["until_s"] or 0.0) for kill in self.kills]
        return max([SETTLED_AFTER * self._seconds, *ends])

    def run(self, enough: threading.Event) -> None:
        """Run for the whole duration, longer if growth was not measured for long enough, or until `enough` is set."""
        while not self._is_over(now := time.monotonic() - self._started) and not enough.is_set():
            self._system.look()
            for line in self._new_lines.read_new():
                self._step = line["step"]
            if now >= self._next_sample_s:
                self._next_sample_s = now + max(1.0, self._seconds / NUM_SAMPLES)
                self.samples.append(take_sample(self._system, now, self._step))
            self._look_at_kills(now)
            if now - self._said_s >= 60.0:
                self._said_s = now
                say(f"{now / 60:6.1f} min  step {self._step}  {len(self.kills)} kills")
            time.sleep(LOOK_EVERY_S)  # within `enough.wait`, the signal handler that sets it would deadlock

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
            say(f"{now / 60:6.1f} min  step {self._step}  killed the {victim}")


def run_soak(minutes: float, seed: int, enough: threading.Event, record: Record) -> list[Verdict]:
    """Run the soak test in `record.out`, and return its verdicts. Call it from the main thread.

    Args:
        seed: seed of weights, prompts, victims and times.
        enough: once set, the test ends early, and the verdicts cover the run so far.

    Raises:
        ServerStartError: the server did not start at the beginning, or FAILED_STARTS restarts failed.
    """
    say(f"{minutes:g} minutes")
    system = ChaosSystem(write_soak_config(record.out, seed), random.Random(seed + 1), ("actor", "sidecar"))
    soak = Soak(system, minutes, random.Random(seed + 2))
    try:
        soak.run(enough)
        system.stop_program("actor")
        system.stop_program("sidecar")
    finally:
        system.stop()
    calm = [sample for sample in soak.samples if sample.time_s >= soak.calm_from_s]
    ended = _ended(system)
    run_dir = system.config.run.dir
    verdicts = [
        check_updates(ended, run_dir / "metrics.jsonl", run_dir / "critic_metrics.jsonl"),
        check_responses(ended),
        check_survival(soak.kills, system.troubles, system.leftovers()),
        *check_processes(calm),
        check_disk(calm),
    ]
    totals = {"minutes": minutes, "steps": ended.actor["step"], "kills": len(soak.kills), "calm_samples": len(calm)}
    samples = [asdict(sample) for sample in soak.samples]
    record.result |= {"summary": totals, "kills": soak.kills, "samples": samples}
    draw(record.out / "soak.png", soak.samples, soak.kills, soak.calm_from_s)
    return verdicts


def _ended(system: ChaosSystem) -> Ended:
    """Return the state of a stopped system. A run that never completed a step is at step 0."""
    checkpoints, current = system.config.run.dir / "checkpoints", system.store.current()
    last = max(saved_steps(checkpoints / "actor"), default=0)
    if not last or current is None:
        return Ended({"step": 0, "masked_samples": 0}, {"step": 0, "optimizer_step": 0}, 0)
    actor, critic = (read_state(checkpoints / role / str(last)) for role in ("actor", "critic"))
    return Ended(actor, critic, system.store.manifest(current).step)
