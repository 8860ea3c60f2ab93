"""The soak test of the whole loop, actor included: a PPO run in which processes are killed, and then left alone.

In the first 60 % of SOAK_MINUTES (2) a random process is killed from time to time; in the rest, what the processes use
may not grow, from the median of its first quarter to that of its last one, within the life of one process.
"""

import contextlib
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
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
SOCKETS = 2 * MOST_REQUESTS + 32  # connections of scoring, probes and metrics, open and closing
FLAT_MB = 2.0
FLAT_FILES = 8  # versions, entries or checkpoints that are being replaced
RESULTS = 1100  # rlhf_triton.store.journal.KEPT_RESULTS, and those of the last steps
QUARTER = 4


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
            "stop_grace_s": 60,
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
                self.samples.append(take_sample(self._system, now, self._step))
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
class ProcessUsage:
    """What one process uses."""

    pid: int
    rss_mb: float
    files: int
    """Open file descriptors other than sockets."""
    sockets: int
    """These follow the number of requests in flight."""
    threads: int


@dataclass(frozen=True)
class UsageSample:
    """What the system uses at one moment."""

    time_s: float
    step: int
    processes: dict[str, ProcessUsage]
    """By name; a model of several processes or none is left out."""
    shared_memory_mb: float
    versions: int
    journal_entries: int
    journal_results: int
    checkpoints: int
    disk_mb: float
    """Of versions, journal entries and checkpoints; metrics and logs grow with the number of steps."""


def take_sample(system: DisturbedSystem, time_s: float, step: int) -> UsageSample:
    """Return what the system uses now; a process that ends meanwhile is left out."""
    run, journal = system.config.run, system.config.run.journal_dir / system.config.run.identity
    folders = [run.weights_dir, journal / "entries", run.dir / "checkpoints"]
    return UsageSample(
        time_s=round(time_s, 2),
        step=step,
        processes={
            name: usage for name in system.victims if (usage := _usage_of(system.processes_of(name))) is not None
        },
        shared_memory_mb=_megabytes(SHARED_MEMORY, system.region_prefix),
        versions=len(system.store.versions()),
        journal_entries=_num_files(journal / "entries"),
        journal_results=_num_files(journal / "results"),
        checkpoints=sum(_num_files(run.dir / "checkpoints" / role) for role in ("actor", "critic")),
        disk_mb=sum(map(_megabytes, folders)),
    )


def _usage_of(processes: list[psutil.Process]) -> ProcessUsage | None:
    if len(processes) != 1:
        return None
    process = processes[0]
    try:
        links = []
        for path in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                links.append(os.readlink(path))  # noqa: PTH115 - Path.readlink would parse the text as a path
        sockets = sum(link.startswith("socket:") for link in links)
        rss_mb = process.memory_info().rss / 1e6
        return ProcessUsage(process.pid, rss_mb, len(links) - sockets, sockets, process.num_threads())
    except (psutil.Error, OSError):
        return None


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


def growth_of_processes(calm: Sequence[UsageSample]) -> list[str]:
    """Return which process has grown: its memory, open files, sockets or threads."""
    share = MEMORY_SHARE if calm[-1].time_s - calm[0].time_s >= LONG_S else SHORT_MEMORY_SHARE
    found = []
    for name in sorted({name for sample in calm for name in sample.processes}):
        last = [sample.processes[name] for sample in calm if name in sample.processes]
        last = [usage for usage in last if usage.pid == last[-1].pid]
        before, after = _ends(last, attrgetter("rss_mb"))
        if after > before * (1 + share) + MEMORY_MB:
            found.append(f"{name} had {before:.0f} MB, and {after:.0f} MB later")
        for what, slack in (("files", FILES), ("threads", THREADS)):
            before, after = _ends(last, attrgetter(what))
            if after > before + slack:
                found.append(f"{name} had {before:g} {what}, and {after:g} later")
        if (most := max(usage.sockets for usage in last)) > SOCKETS:
            found.append(f"{name} had {most} sockets, expected at most {SOCKETS}")
    return found


def growth_on_disk(calm: Sequence[UsageSample]) -> list[str]:
    """Return which of shared memory, versions, journal and checkpoints has grown."""
    limits = {
        "shared_memory_mb": FLAT_MB,
        "versions": FLAT_FILES,
        "journal_entries": 2 * FLAT_FILES,
        "checkpoints": FLAT_FILES,
        "disk_mb": None,
    }
    found = []
    for what, slack in limits.items():
        before, after = _ends(calm, attrgetter(what))
        if after > before + (slack if slack is not None else FLAT_MB + before / 4):
            found.append(f"{what} was {before:g}, and {after:g} later")
    if (most := max(sample.journal_results for sample in calm)) > RESULTS:
        found.append(f"the journal held {most} results, expected at most {RESULTS}")
    return found


def _ends(samples: Sequence[Any], value: Callable[[Any], float]) -> tuple[float, float]:
    """Return the medians of the first and of the last quarter."""
    size = max(1, len(samples) // QUARTER)
    return statistics.median(map(value, samples[:size])), statistics.median(map(value, samples[-size:]))


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
    assert growth_of_processes(calm) == []
    assert growth_on_disk(calm) == []


# ---- what grows is named ----

USAGE = ProcessUsage(pid=7, rss_mb=400.0, files=30, sockets=20, threads=9)
SAMPLE = UsageSample(0.0, 1, {"actor": USAGE}, 3.0, 4, 2, 900, 6, 40.0)


def calm_samples(seconds: float, **last: Any) -> list[UsageSample]:
    """A sample each minute, with other values in the last quarter: of the actor's process, or of the whole sample."""
    own = {name: value for name, value in last.items() if name in ProcessUsage.__annotations__}
    rest = {name: value for name, value in last.items() if name not in own}
    changed = replace(SAMPLE, processes={"actor": replace(USAGE, **own)}, **rest)
    times = range(0, int(seconds) + 1, 60)
    return [replace(changed if t > seconds * 3 / 4 else SAMPLE, time_s=float(t)) for t in times]


def test_what_is_flat_has_not_grown():
    assert growth_of_processes(calm_samples(1800)) == []
    assert (
        growth_of_processes(calm_samples(1800, rss_mb=900.0, pid=8)) == []
    )  # a process is not compared with its predecessor
    assert growth_of_processes(calm_samples(240, rss_mb=450.0)) == []  # caches may fill in a short test
    assert growth_of_processes(calm_samples(240, rss_mb=700.0)) == ["actor had 400 MB, and 700 MB later"]
    assert growth_on_disk(calm_samples(1800)) == []


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"rss_mb": 450.0}, "actor had 400 MB, and 450 MB later"),
        ({"files": 40}, "actor had 30 files, and 40 later"),
        ({"threads": 20}, "actor had 9 threads, and 20 later"),
        ({"sockets": 500}, "actor had 500 sockets, expected at most 96"),
    ],
)
def test_what_grows_in_a_process_is_named(last: dict[str, Any], words: str):
    assert growth_of_processes(calm_samples(1800, **last)) == [words]


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"shared_memory_mb": 9.0}, "shared_memory_mb was 3, and 9 later"),
        ({"versions": 30}, "versions was 4, and 30 later"),
        ({"journal_entries": 100}, "journal_entries was 2, and 100 later"),
        ({"checkpoints": 20}, "checkpoints was 6, and 20 later"),
        ({"disk_mb": 80.0}, "disk_mb was 40, and 80 later"),
        ({"journal_results": 2000}, "the journal held 2000 results, expected at most 1100"),
    ],
)
def test_what_grows_on_disk_is_named(last: dict[str, Any], words: str):
    assert growth_on_disk(calm_samples(1800, **last)) == [words]
