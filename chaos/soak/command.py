"""`python -m tools chaos --minutes N --out DIR`: the soak test of the whole loop, actor included.

A PPO run without an end; in its first 60 % a random process is killed from time to time, in the rest what it uses is
measured. The results are in DIR/result.json and DIR/soak.png.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actor.policy.checkpoint import saved_steps
from benchmarks.support.machine import describe_machine, describe_versions, now_utc
from chaos.soak.picture import draw
from chaos.soak.system import SoakSystem, write_soak_config
from chaos.soak.usage import UsageSample, take_sample
from chaos.soak.verdict import Ended, check_disk, check_processes, check_responses, check_survival, check_updates
from chaos.verdict import Verdict
from python_backend.store.jsonl import JsonlTail

KILLS_UNTIL = 0.6  # of the duration
SETTLED_AFTER = 0.7  # of the duration: from here on growth is measured
LEAST_CALM = 0.25  # of the duration: growth is measured for at least this long
NUM_KILLS = 20
LEAST_PAUSE_S = 10.0  # between the step after a kill and the next kill
NUM_SAMPLES = 600
LOOK_EVERY_S = 0.1
LONGEST_UNTIL_S = 600.0  # until the next step after a kill
Log = Callable[[str], None]


class Soak:
    """One soak test: kills processes and takes samples while the system runs."""

    def __init__(self, system: SoakSystem, minutes: float, generator: random.Random, log: Log) -> None:
        self.kills: list[dict[str, Any]] = []
        self.samples: list[UsageSample] = []
        self._system, self._seconds, self._random, self._log = system, minutes * 60, generator, log
        self._started, self._steps, self._step = time.monotonic(), _StepCount(system), 0
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
            self._step = self._steps.now()
            if now >= self._next_sample_s:
                self._next_sample_s = now + max(1.0, self._seconds / NUM_SAMPLES)
                self.samples.append(take_sample(self._system, now, self._step))
            self._look_at_kills(now)
            if now - self._said_s >= 60.0:
                self._said_s = now
                self._log(f"{now / 60:6.1f} min  step {self._step}  {len(self.kills)} kills")
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
            if self._system.is_whole() and self._system.progress_time() > pending["wall_time"]:
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
            self.kills.append(
                {
                    "time_s": round(now, 2),
                    "wall_time": time.time(),
                    "victim": victim,
                    "step": self._step,
                    "until_s": None,
                }
            )
            self._log(f"{now / 60:6.1f} min  step {self._step}  killed the {victim}")


class _StepCount:
    """The newest step in metrics.jsonl, read incrementally."""

    def __init__(self, system: SoakSystem) -> None:
        self._tail = JsonlTail(system.config.run.dir / "metrics.jsonl")
        self._last = 0

    def now(self) -> int:
        for line in self._tail.read_new():
            self._last = line["step"]
        return self._last


def run_soak(out: Path, minutes: float, seed: int, *, log: Log, enough: threading.Event) -> list[Verdict]:
    """Run the soak test in `out`, print and return its verdicts. Call it from the main thread.

    Args:
        seed: seed of weights, prompts, victims and times.
        log: receives the progress.
        enough: once set, the test ends early, and the verdicts cover the run so far.

    Raises:
        ServerStartError: the server did not start at the beginning, or FAILED_STARTS restarts failed.
    """
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    about = {"date": now_utc(), "seed": seed, "machine": describe_machine(), "versions": describe_versions()}
    log(f"{minutes:g} minutes, seed {seed}, in {out}")
    system = SoakSystem(write_soak_config(out, seed), random.Random(seed + 1), log)
    soak = Soak(system, minutes, random.Random(seed + 2), log)
    try:
        soak.run(enough)
        system.stop_actor()
        system.stop_sidecar()
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
    result = {
        **about, "summary": totals, "kills": soak.kills, "samples": [sample.to_json() for sample in soak.samples],
        "verdicts": [{"promise": v.promise, "checked": v.checked, "violations": v.violations} for v in verdicts],
    }  # fmt: skip
    (out / "result.json").write_text(json.dumps(result, indent=1))
    draw(out / "soak.png", soak.samples, soak.kills, soak.calm_from_s)
    for item in verdicts:
        log(item.sentence())
    return verdicts


def _ended(system: SoakSystem) -> Ended:
    """Return the state of a stopped system. A run that never completed a step is at step 0."""
    last = max(saved_steps(system.config.run.dir / "checkpoints" / "actor"), default=0)
    current = system.store.current()
    if not last or current is None:
        return Ended({"step": 0, "masked_samples": 0}, {"step": 0, "optimizer_step": 0}, 0)
    return Ended(system.state_of("actor", last), system.state_of("critic", last), system.store.manifest(current).step)
