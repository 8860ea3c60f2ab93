"""Carries out a plan of kills (victim, kill point) one by one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from chaos.background import Background
from chaos.points import NOTHING, RANK, Points
from chaos.stopping import HUNG_S, STOP_S, stop_for, stop_for_good, ways_of
from chaos.system import ChaosSystem
from chaos.traffic import Traffic
from python_backend.monitoring.log_lines import say
from tools.server.shared_memory import SHARED_MEMORY

RECOVERY_S = 300.0  # time limit for the system to recover
MOMENT_S = 60.0  # time limit for a kill point to come
ATTEMPTS = 3  # per kill: a kill point may not come in time, or a victim may end just before it is hit
LOOK_EVERY_S = 0.2
BREATH_S = 1.0  # longest random pause before a kill
REWIND_EVERY = 3  # kills
HASTE = 0.3  # share of the kills that do not wait for a step to be trained after the last kill


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
