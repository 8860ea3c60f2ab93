"""`python -m tools chaos --minutes N --out DIR`: the soak test of the whole loop, actor included.

A PPO run without an end; in its first 60 % a random process is killed from time to time, in the rest what it uses is
measured. Verdicts: no update lost, every response scored, every kill survived, and no growth, which is from the median
of the calm part's first quarter to the median of its last quarter, within the life of one process. The results are in
DIR/result.json and DIR/soak.png.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
import yaml

from actor.policy.checkpoint import saved_steps
from benchmarks.learning import configuration, make_checkpoints
from benchmarks.measurement import Record
from benchmarks.processes import free_ports
from chaos.system import ChaosSystem, Verdict, verdict
from python_backend.monitoring.log_lines import say
from python_backend.store.jsonl import NewLines, read_jsonl
from python_backend.store.sealed_folder import read_state
from tools.report.curves import figure_of
from tools.server.shared_memory import SHARED_MEMORY

KILLS_UNTIL = 0.6  # of the duration
SETTLED_AFTER = 0.7  # of the duration: from here on growth is measured
LEAST_CALM = 0.25  # of the duration: growth is measured for at least this long
NUM_KILLS = 20
LEAST_PAUSE_S = 10.0  # between the step after a kill and the next kill
NUM_SAMPLES = 600
LOOK_EVERY_S = 0.1
LONGEST_UNTIL_S = 600.0  # until the next step after a kill
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#3C4043", "#9AA0A6", "#F0E442")
ROWS = 16  # responses per step
MOST_REQUESTS = 32  # in flight
LONG_S = 900.0  # of calm, after which allocators and caches have settled
MEMORY_SHARE, SHORT_MEMORY_SHARE = 0.05, 0.5  # allowed growth after a long and a short calm
MEMORY_MB = 16.0  # in addition
FILES, THREADS = 4, 4  # a sample may include short-lived ones
SOCKETS = 2 * MOST_REQUESTS + 32  # connections of scoring, probes and metrics, open and closing
FLAT_MB = 2.0
FLAT_FILES = 8  # versions, entries or checkpoints that are being replaced
RESULTS = 1100  # python_backend.store.journal.KEPT_RESULTS, and those of the last steps
QUARTER = 4


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
        self._started, self._new_lines, self._step = time.monotonic(), NewLines(self._metrics), 0
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
            for line in self._new_lines.read_objects():
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


def take_sample(system: ChaosSystem, time_s: float, step: int) -> UsageSample:
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


def draw(path: Path, samples: Sequence[UsageSample], kills: Sequence[Mapping[str, Any]], calm_from_s: float) -> None:
    """Write the picture, a timeline of the run, to `path`."""
    minutes = [sample.time_s / 60 for sample in samples]
    names = list(dict.fromkeys(name for sample in samples for name in sample.processes))

    def of_each(usage: str) -> dict[str, list[float]]:
        none = float("nan")
        return {name: [getattr(s.processes.get(name), usage, none) for s in samples] for name in names}

    panels: dict[tuple[str, str], Mapping[str, Sequence[float]]] = {
        ("steps completed by the actor", "step"): {"": [sample.step for sample in samples]},
        ("resident memory of each process", "MB"): of_each("rss_mb"),
        ("open files of each process, without sockets", "files"): of_each("files"),
        ("disk and shared memory", "MB"): {
            "versions, journal, checkpoints": [sample.disk_mb for sample in samples],
            "/dev/shm": [sample.shared_memory_mb for sample in samples],
        },
    }
    with figure_of(path, (12, 12)) as figure:
        killed, *axes = figure.subplots(5, 1, sharex=True)
        for kill in kills:
            at, start = names.index(kill["victim"]), kill["time_s"] / 60
            killed.plot([start, start + (kill["until_s"] or 0) / 60], [at, at], color="#D55E00", lw=4)
            killed.plot([start], [at], marker="|", ms=12, color="#3C4043")
        killed.set_yticks(range(len(names)), names)
        title = "processes killed (SIGKILL), and how long until the next step; growth is measured where blue"
        killed.set(ylim=(len(names) - 0.5, -0.5), title=f"{len(kills)} {title}")
        for ax, ((title, unit), lines) in zip(axes, panels.items(), strict=True):
            for (label, values), colour in zip(lines.items(), COLOURS, strict=False):
                ax.plot(minutes, values, color=colour, lw=1.2, label=label)
            ax.set(title=title, ylabel=unit, ylim=(0, None))
            if len(lines) > 1:
                ax.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0))
        for ax in (killed, *axes):
            ax.axvspan(calm_from_s / 60, minutes[-1] if minutes else 0, color="#E8F0FE", lw=0, zorder=0)
        axes[-1].set_xlabel("minutes")


@dataclass(frozen=True)
class Ended:
    """The state in which the run ended."""

    actor: Mapping[str, Any]
    """state.json of the actor's last checkpoint."""
    critic: Mapping[str, Any]
    """state.json of the critic's checkpoint of that step."""
    served_step: int
    """Number of updates in the critic version that CURRENT names."""


def check_updates(ended: Ended, metrics: Path, critic_metrics: Path) -> Verdict:
    """Check that each step of the actor trained the critic exactly once.

    A step has `ROWS` rows and is one optimizer step, so the critic's checkpoint counts its updates.
    """
    last = ended.actor["step"]
    found = [
        f"{what} {value}, but the actor ended after step {last}"
        for what, value in (
            ("the critic's checkpoint is of step", ended.critic["step"]),
            ("the number of the critic's optimizer steps is", ended.critic["optimizer_step"]),
            ("the served version contains updates up to step", ended.served_step),
        )
        if value != last
    ]
    steps = [line["step"] for line in read_jsonl(metrics)]
    if steps != list(range(1, last + 1)):
        found.append(f"metrics.jsonl has {len(steps)} steps from {steps[:1]} to {steps[-1:]}, expected 1 to {last}")
    found += [f"step {line['step']}: {line['error']}" for line in read_jsonl(critic_metrics) if "error" in line]
    return verdict("no update is lost: each step trained the critic exactly once", last, found)


def check_responses(ended: Ended) -> Verdict:
    """Check that every response was scored."""
    masked = ended.actor["masked_samples"]
    found = [f"{masked} responses were not scored"] if masked else []
    return verdict("every response was scored, by reward model and critic", ended.actor["step"] * ROWS, found)


def check_survival(kills: Sequence[Mapping[str, Any]], troubles: Sequence[str], leftovers: Sequence[str]) -> Verdict:
    """Check that the run went on after each kill, and that no process ended that was not killed."""
    found = [f"no step within the time limit after the {k['victim']} was killed" for k in kills if k["until_s"] is None]
    return verdict(
        "after each kill the run goes on; no other process ends, and none is left behind",
        len(kills),
        [*found, *troubles, *leftovers],
    )


def check_processes(calm: Sequence[UsageSample]) -> list[Verdict]:
    """Check that memory, open files, threads and sockets of each process stay flat."""
    seconds = calm[-1].time_s - calm[0].time_s if calm else 0.0
    share = MEMORY_SHARE if seconds >= LONG_S else SHORT_MEMORY_SHARE
    names = sorted({name for sample in calm for name in sample.processes})
    memory, files = [], []
    for name in names:
        last = [sample.processes[name] for sample in calm if name in sample.processes]
        last = [usage for usage in last if usage.pid == last[-1].pid]
        before, after = _ends(last, attrgetter("rss_mb"))
        if after > before * (1 + share) + MEMORY_MB:
            memory.append(f"{name} had {before:.0f} MB, and {after:.0f} MB later")
        for what, slack in (("files", FILES), ("threads", THREADS)):
            before, after = _ends(last, attrgetter(what))
            if after > before + slack:
                files.append(f"{name} had {before:g} {what}, and {after:g} later")
        if (most := max(usage.sockets for usage in last)) > SOCKETS:
            files.append(f"{name} had {most} sockets, expected at most {SOCKETS}")
    return [
        verdict(
            f"the memory of each process is flat (growth up to {share:.0%} + {MEMORY_MB:g} MB)", len(names), memory
        ),
        verdict("open files, sockets and threads of each process are flat", len(names), files),
    ]


def check_disk(calm: Sequence[UsageSample]) -> Verdict:
    """Check that shared memory, versions, journal and checkpoints stay flat."""
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
    if calm and (most := max(sample.journal_results for sample in calm)) > RESULTS:
        found.append(f"the journal held {most} results, expected at most {RESULTS}")
    return verdict("shared memory and disk are flat: versions, journal, checkpoints", len(calm), found)


def _ends(samples: Sequence[Any], value: Callable[[Any], float]) -> tuple[float, float]:
    """Return the medians of the first and of the last quarter; zeros if there are no samples."""
    if not samples:
        return 0.0, 0.0
    size = max(1, len(samples) // QUARTER)
    return statistics.median(map(value, samples[:size])), statistics.median(map(value, samples[-size:]))
