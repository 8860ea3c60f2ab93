"""Hits processes (SIGKILL, SIGSTOP) one by one, at stages of the work that are recognised from outside by files."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from chaos.system import RANK, ChaosSystem
from chaos.traffic import Background, Traffic
from python_backend.config import RunConfig
from python_backend.monitoring.log_lines import say
from python_backend.store.journal import Journal
from python_backend.store.jsonl import JsonlTail
from tools.server.health import is_alive
from tools.server.shared_memory import SHARED_MEMORY

POLL_S = 0.001
VICTIMS = ("tritonserver", "critic", "critic_train", "critic_save", "reward_model", "sidecar")
POINTS = ("journal write", "training", "verify", "CURRENT", "reload", "checkpoint", "idle")
FIRST_GUESS_S = {"training": 0.3, "reload": 4.0}  # assumed durations, until the sidecar's metrics report them
NOTHING = "nothing"
STOP_S = 3.0  # longest temporary stop: too short for the supervisor to replace the process
HUNG_S = 120.0  # time limit for a hung process to be replaced
LONGEST_FREEZE_S = 5.0
MODELS = tuple(victim for victim in VICTIMS if victim not in ("tritonserver", "sidecar"))
CATCH_S = 5.0  # longest wait for critic_train to write
CATCH_POLL_S = 0.0005
CAUGHT_S = 6.0  # longest stop in the middle of a write
GONE_POLL_S = 0.2
RECOVERY_S = 300.0  # time limit for the system to recover
MOMENT_S = 60.0  # time limit for a kill point to come
ATTEMPTS = 3  # per kill: a kill point may not come in time, or a victim may end just before it is hit
LOOK_EVERY_S = 0.2
BREATH_S = 1.0  # longest random pause before a kill
REWIND_EVERY = 3  # kills
HASTE = 0.3  # share of the kills that do not wait for a step to be trained after the last kill


def plan_kills(num_kills: int, seed: int, *, ranks: int = 1) -> list[tuple[str, str]]:
    """Return (victim, kill point) of each kill; for every seed, 42 kills cover each pair once.

    Args:
        ranks: number of ranks that train the critic; above 1, each is a victim, too.
    """
    generator = random.Random(seed)
    victims, points = [*VICTIMS, *(f"{RANK}{rank}" for rank in range(ranks) if ranks > 1)], list(POINTS)
    generator.shuffle(victims)
    generator.shuffle(points)
    # 6 victims (8 with two ranks) and 7 points have no common divisor, so stepping through both covers all pairs.
    return [(victims[i % len(victims)], points[i % len(points)]) for i in range(num_kills)]


class Points:
    """Waits for the kill points of one run."""

    def __init__(self, config: RunConfig, shared_memory: Path, region_prefix: str, generator: random.Random) -> None:
        self._journal = Journal(config.run.journal_dir, config.run.identity)
        self._entries = config.run.journal_dir / config.run.identity / "entries"
        self._weights = config.run.weights_dir
        self._checkpoints = config.run.dir / "checkpoints" / "critic"
        self._shared_memory = shared_memory
        self._prefix = region_prefix
        self._metrics = JsonlTail(config.run.dir / "critic_metrics.jsonl")
        self._spans = dict(FIRST_GUESS_S)
        self._random = generator

    def wait(self, point: str, timeout_s: float, give_up: threading.Event) -> str:
        """Wait for the kill point, and then for a random part of its duration; return a description of what was seen.

        Returns NOTHING if the point does not come within `timeout_s`, or once `give_up` is set.
        """
        look = self._observer(point)
        deadline = time.monotonic() + timeout_s
        while (seen := look()) is None:
            if time.monotonic() > deadline or give_up.is_set():
                return NOTHING
            time.sleep(POLL_S)
        self._measure()
        span = self._spans.get(point, 0.0)
        give_up.wait(self._random.uniform(0, span) + self._random.uniform(0, 0.02))
        return seen

    def _observer(self, point: str) -> Callable[[], str | None]:
        match point:
            case "journal write":
                return _new_name(self._entries, lambda name: True)
            case "training":
                return _new_name(self._entries, lambda name: name.endswith(".train"))
            case "verify":
                return _new_name(self._weights, lambda name: name.isdigit() or name.startswith(".staging-"))
            case "CURRENT":
                return _replaced(self._weights / "CURRENT")
            case "reload":
                return _new_name(self._shared_memory, lambda name: name.startswith(self._prefix))
            case "checkpoint":
                return _new_name(self._checkpoints, lambda name: name.isdigit() or name.startswith(".staging-"))
            case "idle":
                since = time.time()
                return lambda: self._idle(since)
        raise ValueError(f"unknown kill point {point!r}; known: {', '.join(POINTS)}")

    def _idle(self, since: float) -> str | None:
        heartbeat = self._journal.heartbeat()
        fresh = heartbeat is not None and heartbeat.time > since and heartbeat.state == "idle"
        return "heartbeat: idle" if fresh else None

    def _measure(self) -> None:
        """Read the durations of the last update and the last reload from the sidecar's metrics."""
        for line in self._metrics.read_new():
            if "train/step_time" in line:
                self._spans["training"] = float(line["train/step_time"])
            elif line.get("reason") == "save":
                self._spans["reload"] = float(line["reload_ms"]) / 1e3


def _new_name(folder: Path, counts: Callable[[str], bool]) -> Callable[[], str | None]:
    before = _names(folder)

    def look() -> str | None:
        fresh = sorted(name for name in _names(folder) - before if counts(name))
        return f"new: {fresh[0]}" if fresh else None

    return look


def _replaced(path: Path) -> Callable[[], str | None]:
    before = path.stat().st_ino, path.stat().st_mtime_ns

    def look() -> str | None:
        now = path.stat()
        return f"replaced: {path.name}" if (now.st_ino, now.st_mtime_ns) != before else None

    return look


def _names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()  # noqa: PTH208 - names, a thousand times a second


def ways_of(num_kills: int, *, hung: bool) -> list[str]:
    """Return how each victim is hit: one in four is stopped for a while and, with `hung`, one in four permanently."""
    return ["stopped" if i % 4 == 3 else "hung" if hung and i % 4 == 1 else "killed" for i in range(num_kills)]


def stop_for(process: psutil.Process, seconds: float, give_up: threading.Event) -> bool:
    """Stop the process for `seconds`; return False if it has ended."""
    try:
        process.send_signal(signal.SIGSTOP)
        give_up.wait(seconds)
        process.send_signal(signal.SIGCONT)
    except psutil.NoSuchProcess:
        return False
    return True


def stop_for_good(process: psutil.Process, give_up: threading.Event) -> bool:
    """Stop the process and wait until it has been replaced; return False if that takes longer than HUNG_S.

    In that case the process continues, so that the run can end.
    """
    deadline = time.monotonic() + HUNG_S
    _signal([process], signal.SIGSTOP)
    while is_alive(process):
        if time.monotonic() > deadline or give_up.wait(GONE_POLL_S):
            _signal([process], signal.SIGCONT)
            return give_up.is_set()
    return True


def freeze_models(system: ChaosSystem, num_freezes: int, generator: random.Random, give_up: threading.Event) -> None:
    """Stop processes of models for a few seconds while no request waits for them; a replacement is a trouble."""
    for _ in range(num_freezes):
        model, seconds = generator.choice(MODELS), generator.uniform(1.0, LONGEST_FREEZE_S)
        for process in system.processes_of(model)[-1:]:
            stop_for(process, seconds, give_up)
            if process not in system.processes_of(model):
                system.troubles.append(f"the process of {model} was replaced as it was stopped for {seconds:.1f} s")


def stop_accepting(system: ChaosSystem) -> Callable[[], None]:
    """Stop critic_train during a journal write, if one comes within CATCH_S; return a function that continues it."""
    folder = system.config.run.journal_dir / system.config.run.identity / "entries"
    stubs = system.processes_of("critic_train")
    deadline = time.monotonic() + CATCH_S
    while time.monotonic() < deadline:
        # The journal writes an entry to a hidden file and renames it.
        if any(name.startswith(".") for name in os.listdir(folder)):  # noqa: PTH208 - names, thousands of times
            _signal(stubs, signal.SIGSTOP)
            break
        time.sleep(CATCH_POLL_S)

    def resume() -> None:
        timer.cancel()
        _signal(stubs, signal.SIGCONT)

    timer = threading.Timer(CAUGHT_S, resume)  # a stopped process may hold the journal's lock
    timer.start()
    return resume


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


class GaveUp(Exception):
    """Raised if the run ends before the plan is complete; not an error."""


class Killer:
    """Kills processes in its `thread`, and records each kill in `kills`."""

    def __init__(
        self,
        system: ChaosSystem,
        traffic: Traffic,
        plan: Sequence[tuple[str, str]],
        generator: random.Random,
        *,
        hung: bool = False,
    ) -> None:
        self.kills: list[dict[str, Any]] = []
        self.done: list[tuple[str, str]] = []
        """(victim, kill point) of each kill that was carried out or given up after its last attempt."""
        self._system, self._traffic, self._plan = system, traffic, plan
        self._ways = ways_of(len(plan), hung=hung)
        self._random = generator
        self._points = Points(system.config, SHARED_MEMORY, system.region_prefix, generator)
        self.thread = Background("killer", self._run)
        self._give_up = self.thread.given_up

    def _run(self) -> None:
        try:
            self._until(lambda: self._traffic.last_step >= 3, "step 3 was not trained")
            for (victim, point), way in zip(self._plan, self._ways, strict=True):
                if len(self.done) % REWIND_EVERY == REWIND_EVERY - 1:
                    self._traffic.rewind_now.set()
                for _ in range(ATTEMPTS):
                    if self._one(victim, point, way):
                        break
                self.done.append((victim, point))
            self._until(self._system.is_whole, "the system did not recover after the last kill")
        except GaveUp:
            return
        finally:
            self._traffic.hold.clear()

    def _one(self, victim: str, point: str, way: str) -> bool:
        trained = self._traffic.last_step
        self._until(self._system.is_whole, f"the system did not recover before killing the {victim}")
        if self._random.random() > HASTE:
            self._until(lambda: self._traffic.last_step > trained, f"no step after {trained} was trained")
        self._give_up.wait(self._random.uniform(0, BREATH_S))
        if point == "idle":
            self._traffic.hold.set()
        if point in ("reload", "checkpoint"):
            self._traffic.save_now.set()
        processes = self._processes(victim)
        seen = self._points.wait(point, MOMENT_S, self._give_up)
        if self._give_up.is_set():
            raise GaveUp
        if point == "reload":  # the reloaded model may have two processes by now
            processes = self._processes(victim)
        kill = {
            "number": len(self.done) + 1,
            "time_s": round(self._traffic.record.now(), 3),
            "victim": victim,
            "point": point,
            "way": way,
            "seen": seen,
            "step": self._traffic.last_step,
        }
        ranks = self._system.ranks()
        is_there = seen != NOTHING and bool(processes)  # it may have ended between two looks
        kill["hit"] = hit = is_there and self._hit(victim, self._random.choice(processes), way)
        if hit and way == "killed" and _trains(victim):
            kill["ranks_gone_s"] = self._system.await_end(ranks)
        self._traffic.hold.clear()
        self.kills.append(kill)
        say(
            f"{kill['number']:>3}/{len(self._plan)}  {kill['time_s']:>6.1f} s  step {kill['step']:>3}  "
            f"{victim:<12} {way:<7} at {point:<13} {seen}{'' if hit else '  (missed)'}"
        )
        return hit

    def _hit(self, victim: str, process: psutil.Process, way: str) -> bool:
        if way == "stopped":
            return stop_for(process, self._random.uniform(0, STOP_S), self._give_up)
        if way == "hung" and not _trains(victim):  # a hung sidecar has no supervisor to replace it
            if not stop_for_good(process, self._give_up):
                self._system.troubles.append(f"the {victim} hung for {HUNG_S:g} s, and nothing replaced it")
            return True
        return self._system.kill(process)

    def _processes(self, victim: str) -> list[psutil.Process]:
        self._until(lambda: bool(self._system.processes_of(victim)), f"there is no {victim} to kill")
        return self._system.processes_of(victim)

    def _until(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + RECOVERY_S
        while not condition():
            if self._give_up.is_set() or not self._traffic.thread.is_alive():
                raise GaveUp
            if time.monotonic() > deadline:
                raise TimeoutError(f"{otherwise} within {RECOVERY_S:g} s")
            self._give_up.wait(LOOK_EVERY_S)


def _trains(victim: str) -> bool:
    return victim == "sidecar" or victim.startswith(RANK)
