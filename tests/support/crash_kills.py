"""The kills of the crash test: which process, at which moment, and how."""

import contextlib
import os
import random
import signal
import threading
import time

import psutil
from crash_system import RANK, Background

from rlhf_triton.client.model_servers import ModelServers
from rlhf_triton.monitoring.log_lines import say
from rlhf_triton.store.control_key import control_key
from rlhf_triton.store.journal import Journal
from rlhf_triton.tools.server.shared_memory import SHARED_MEMORY

VICTIMS = ("tritonserver", "critic", "critic_train", "critic_save", "reward_model", "sidecar")
POINTS = ("journal write", "training", "verify", "CURRENT", "reload", "checkpoint", "idle")
LASTS_S = {"training": 0.1, "reload": 4.0}  # about, of the kill points that are not over at once
STOP_S = 3.0  # longest temporary stop: too short for the supervisor to replace the process
CATCH_S = 5.0  # longest wait for critic_train to write
RECOVERY_S = 300.0  # time limit for the system to recover
ATTEMPTS = 3  # per kill: a kill point may not come in time, or a victim may end just before it is hit
REWIND_EVERY = 3  # kills
HASTE = 0.3  # share of the kills that do not wait for a step to be trained after the last kill


def plan_kills(num_kills, seed, *, ranks=1):
    """Return (victim, kill point) of each kill; for every seed, 42 kills cover each pair once.

    Args:
        ranks: number of ranks that train the critic; above 1, each is a victim, too.
    """
    generator = random.Random(seed)
    victims = [*VICTIMS, *(f"{RANK}{rank}" for rank in range(ranks) if ranks > 1)]
    points = list(POINTS)
    generator.shuffle(victims)
    generator.shuffle(points)
    # 6 victims (8 with two ranks) and 7 points have no common divisor, so stepping through both covers all pairs.
    return [(victims[i % len(victims)], points[i % len(points)]) for i in range(num_kills)]


class Points:
    """Waits for the kill points of one run: for a name, a file or a heartbeat that was not there before."""

    def __init__(self, config, shared_memory, region_prefix):
        journal = Journal(config.run.journal_dir, config.run.identity)
        entries = config.run.journal_dir / config.run.identity / "entries"
        versions = config.run.weights_dir
        checkpoints = config.run.dir / "checkpoints" / "critic"

        def current():
            file = (versions / "CURRENT").stat()
            return {("CURRENT", file.st_ino, file.st_mtime_ns)}

        def idle():
            beat = journal.heartbeat()
            return {("heartbeat", beat.time)} if beat is not None and beat.state == "idle" else set()

        self.looks = {
            "journal write": lambda: _names(entries),
            "training": lambda: _names(entries, lambda name: name.endswith(".train")),
            "verify": lambda: _names(versions, _is_new_folder),
            "CURRENT": current,
            "reload": lambda: _names(shared_memory, lambda name: name.startswith(region_prefix)),
            "checkpoint": lambda: _names(checkpoints, _is_new_folder),
            "idle": idle,
        }

    def wait(self, point, timeout_s, give_up):
        """Return what was seen when the kill point came; None if it does not within `timeout_s`, or after `give_up`."""
        look = self.looks[point]
        before = look()
        deadline = time.monotonic() + timeout_s
        while not (seen := look() - before):
            if time.monotonic() > deadline or give_up.is_set():
                return None
            time.sleep(0.001)
        return str(min(seen, key=str))


def _names(folder, counts=bool):
    names = os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208 - names, a thousand times a second
    return {name for name in names if counts(name)}


def _is_new_folder(name):
    return name.isdigit() or name.startswith(".staging-")


def stop_for(process, seconds, give_up):
    """Stop the process for `seconds`; return False if it has ended."""
    try:
        process.send_signal(signal.SIGSTOP)
        give_up.wait(seconds)
        process.send_signal(signal.SIGCONT)
    except psutil.NoSuchProcess:
        return False
    return True


def stop_accepting(system):
    """Stop critic_train during a journal write, if one comes within CATCH_S; return a function that continues it."""
    entries = system.config.run.journal_dir / system.config.run.identity / "entries"
    stubs = system.processes_of("critic_train")
    deadline = time.monotonic() + CATCH_S
    # The journal writes an entry to a hidden file and renames it.
    while not (caught := _names(entries, lambda name: name.startswith("."))) and time.monotonic() < deadline:
        time.sleep(0.0005)
    if caught:
        _signal(stubs, signal.SIGSTOP)
    timer = threading.Timer(6.0, _signal, (stubs, signal.SIGCONT))  # a stopped process may hold the journal's lock
    timer.start()

    def resume():
        timer.cancel()
        _signal(stubs, signal.SIGCONT)

    return resume


def _signal(processes, number):
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


class GaveUp(Exception):
    """Raised if the run ends before the plan is complete; not an error."""


class Killer:
    """Kills processes in its `thread`, and records each kill in `kills`."""

    def __init__(
        self,
        system,
        traffic,
        plan,
        generator,
    ):
        self.kills = []
        self.done = []
        """(victim, kill point) of each kill that was carried out or given up after its last attempt."""
        self._system = system
        self._traffic = traffic
        self._plan = plan
        self._random = generator
        self._points = Points(system.config, SHARED_MEMORY, system.region_prefix)
        self.thread = Background("killer", self._run)
        self._give_up = self.thread.given_up

    def _run(self):
        try:
            self._until(lambda: self._traffic.last_step >= 3, "step 3 was not trained")
            for number, (victim, point) in enumerate(self._plan):
                way = "stopped" if number % 4 == 3 else "killed"
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

    def _one(self, victim, point, way):
        trained = self._traffic.last_step
        self._until(self._system.is_whole, f"the system did not recover before killing the {victim}")
        if self._random.random() > HASTE:
            self._until(lambda: self._traffic.last_step > trained, f"no step after {trained} was trained")
        self._give_up.wait(self._random.uniform(0, 1.0))
        if point == "idle":
            self._traffic.hold.set()
        if point == "checkpoint":
            self._traffic.save_now.set()
        if point == "reload":
            threading.Timer(0.5, self._reload_critic).start()
        processes = self._processes(victim)
        seen = self._points.wait(point, 60.0, self._give_up)
        self._give_up.wait(self._random.uniform(0, LASTS_S.get(point, 0.0)) + self._random.uniform(0, 0.02))
        if self._give_up.is_set():
            raise GaveUp
        if point == "reload":  # the reloaded model may have two processes by now
            processes = self._processes(victim)
        ranks = self._system.ranks()
        trains = victim == "sidecar" or victim.startswith(RANK)
        kill = {"number": len(self.done) + 1, "time_s": round(self._traffic.record.now(), 3), "victim": victim}
        kill |= {"point": point, "way": way, "seen": seen, "step": self._traffic.last_step}
        is_there = seen is not None and bool(processes)  # it may have ended between two looks
        kill["hit"] = hit = is_there and self._hit(self._random.choice(processes), way)
        if hit and way == "killed" and trains:
            kill["ranks_gone_s"] = self._system.await_end(ranks)
        self._traffic.hold.clear()
        self.kills.append(kill)
        say(
            f"{kill['number']:>3}/{len(self._plan)}  {kill['time_s']:>6.1f} s  step {kill['step']:>3}  "
            f"{victim:<12} {way:<7} at {point:<13} {seen}{'' if hit else '  (missed)'}"
        )
        return hit

    def _reload_critic(self):
        """Load the critic through Triton, as the supervisor and `critic.reload: triton` do."""
        config = self._system.config
        ModelServers([config.server.grpc_url], control_key(config.run.weights_dir)).load(0, timeout_s=60.0)

    def _hit(self, process, way):
        if way == "stopped":
            return stop_for(process, self._random.uniform(0, STOP_S), self._give_up)
        return self._system.kill(process)

    def _processes(self, victim):
        self._until(lambda: bool(self._system.processes_of(victim)), f"there is no {victim} to kill")
        return self._system.processes_of(victim)

    def _until(self, condition, otherwise):
        deadline = time.monotonic() + RECOVERY_S
        while not condition():
            if self._give_up.is_set() or not self._traffic.thread.is_alive():
                raise GaveUp
            if time.monotonic() > deadline:
                raise TimeoutError(f"{otherwise} within {RECOVERY_S:g} s")
            self._give_up.wait(0.2)
