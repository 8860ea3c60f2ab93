"""`python -m tools chaos --kills N --out DIR`: the crash test of the live critic, on real processes.

`--minutes N` instead of `--kills`: the soak test of the whole loop, see `chaos.soak`.

Exit code 0: every guarantee was kept; 1: one was broken; 2: an error, such as a server that does not start again. The
results are in DIR/result.json.
"""

import argparse
import contextlib
import math
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.measurement import Record
from chaos.reference import Reference, run_reference
from chaos.system import RANK, Background, ChaosSystem, Verdict, run_test, verdict, write_config
from chaos.traffic import RequestRecord, Traffic
from python_backend.config import RunConfig
from python_backend.config.command_line import reporting
from python_backend.digests import brief
from python_backend.monitoring.log_lines import say
from python_backend.store.durable import numbers_in
from python_backend.store.journal import Entry, Journal, Result
from python_backend.store.weights import Manifest, WeightsError, WeightsStore
from tools.arguments import parse_or_complete
from tools.server.health import is_alive
from tools.server.shared_memory import SHARED_MEMORY

VICTIMS = ("tritonserver", "critic", "critic_train", "critic_save", "reward_model", "sidecar")
MODELS = VICTIMS[1:5]
POINTS = ("journal write", "training", "verify", "CURRENT", "reload", "checkpoint", "idle")
LASTS_S = {"training": 0.1, "reload": 4.0}  # about, of the kill points that are not over at once
STOP_S = 3.0  # longest temporary stop: too short for the supervisor to replace the process
HUNG_S = 120.0  # time limit for a hung process to be replaced
CATCH_S = 5.0  # longest wait for critic_train to write
RECOVERY_S = 300.0  # time limit for the system to recover
ATTEMPTS = 3  # per kill: a kill point may not come in time, or a victim may end just before it is hit
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


def ways_of(num_kills: int, *, hung: bool) -> list[str]:
    """Return how each victim is hit: one in four is stopped for a while and, with `hung`, one in four permanently."""
    return ["stopped" if i % 4 == 3 else "hung" if hung and i % 4 == 1 else "killed" for i in range(num_kills)]


class Points:
    """Waits for the kill points of one run: for a name, a file or a heartbeat that was not there before."""

    def __init__(self, config: RunConfig, shared_memory: Path, region_prefix: str) -> None:
        journal = Journal(config.run.journal_dir, config.run.identity)
        entries = config.run.journal_dir / config.run.identity / "entries"
        versions, checkpoints = config.run.weights_dir, config.run.dir / "checkpoints" / "critic"

        def current() -> set[Hashable]:
            file = (versions / "CURRENT").stat()
            return {("CURRENT", file.st_ino, file.st_mtime_ns)}

        def idle() -> set[Hashable]:
            beat = journal.heartbeat()
            return {("heartbeat", beat.time)} if beat is not None and beat.state == "idle" else set()

        self.looks: dict[str, Callable[[], set[Hashable]]] = {
            "journal write": lambda: _names(entries),
            "training": lambda: _names(entries, lambda name: name.endswith(".train")),
            "verify": lambda: _names(versions, _is_new_folder),
            "CURRENT": current,
            "reload": lambda: _names(shared_memory, lambda name: name.startswith(region_prefix)),
            "checkpoint": lambda: _names(checkpoints, _is_new_folder),
            "idle": idle,
        }

    def wait(self, point: str, timeout_s: float, give_up: threading.Event) -> str | None:
        """Return what was seen when the kill point came; None if it does not within `timeout_s`, or after `give_up`."""
        look = self.looks[point]
        before, deadline = look(), time.monotonic() + timeout_s
        while not (seen := look() - before):
            if time.monotonic() > deadline or give_up.is_set():
                return None
            time.sleep(0.001)
        return str(min(seen, key=str))


def _names(folder: Path, counts: Callable[[str], bool] = bool) -> set[Hashable]:
    names = os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208 - names, a thousand times a second
    return {name for name in names if counts(name)}


def _is_new_folder(name: str) -> bool:
    return name.isdigit() or name.startswith(".staging-")


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
        if time.monotonic() > deadline or give_up.wait(0.2):
            _signal([process], signal.SIGCONT)
            return give_up.is_set()
    return True


def freeze_models(system: ChaosSystem, num_freezes: int, generator: random.Random, give_up: threading.Event) -> None:
    """Stop processes of models for a few seconds while no request waits for them; a replacement is a trouble."""
    for _ in range(num_freezes):
        model, seconds = generator.choice(MODELS), generator.uniform(1.0, 5.0)
        for process in system.processes_of(model)[-1:]:
            stop_for(process, seconds, give_up)
            if process not in system.processes_of(model):
                system.troubles.append(f"the process of {model} was replaced as it was stopped for {seconds:.1f} s")


def stop_accepting(system: ChaosSystem) -> Callable[[], None]:
    """Stop critic_train during a journal write, if one comes within CATCH_S; return a function that continues it."""
    entries = system.config.run.journal_dir / system.config.run.identity / "entries"
    stubs, deadline = system.processes_of("critic_train"), time.monotonic() + CATCH_S
    # The journal writes an entry to a hidden file and renames it.
    while not (caught := _names(entries, lambda name: name.startswith("."))) and time.monotonic() < deadline:
        time.sleep(0.0005)
    if caught:
        _signal(stubs, signal.SIGSTOP)
    timer = threading.Timer(6.0, _signal, (stubs, signal.SIGCONT))  # a stopped process may hold the journal's lock
    timer.start()

    def resume() -> None:
        timer.cancel()
        _signal(stubs, signal.SIGCONT)

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
        self._system, self._traffic, self._plan, self._random = system, traffic, plan, generator
        self._ways = ways_of(len(plan), hung=hung)
        self._points = Points(system.config, SHARED_MEMORY, system.region_prefix)
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
        self._give_up.wait(self._random.uniform(0, 1.0))
        if point == "idle":
            self._traffic.hold.set()
        if point in ("reload", "checkpoint"):
            self._traffic.save_now.set()
        processes = self._processes(victim)
        seen = self._points.wait(point, 60.0, self._give_up)
        self._give_up.wait(self._random.uniform(0, LASTS_S.get(point, 0.0)) + self._random.uniform(0, 0.02))
        if self._give_up.is_set():
            raise GaveUp
        if point == "reload":  # the reloaded model may have two processes by now
            processes = self._processes(victim)
        ranks, trains = self._system.ranks(), victim == "sidecar" or victim.startswith(RANK)
        kill = {"number": len(self.done) + 1, "time_s": round(self._traffic.record.now(), 3), "victim": victim}
        kill |= {"point": point, "way": way, "seen": seen, "step": self._traffic.last_step}
        is_there = seen is not None and bool(processes)  # it may have ended between two looks
        kill["hit"] = hit = is_there and self._hit(victim, self._random.choice(processes), way, trains=trains)
        if hit and way == "killed" and trains:
            kill["ranks_gone_s"] = self._system.await_end(ranks)
        self._traffic.hold.clear()
        self.kills.append(kill)
        say(
            f"{kill['number']:>3}/{len(self._plan)}  {kill['time_s']:>6.1f} s  step {kill['step']:>3}  "
            f"{victim:<12} {way:<7} at {point:<13} {seen}{'' if hit else '  (missed)'}"
        )
        return hit

    def _hit(self, victim: str, process: psutil.Process, way: str, *, trains: bool) -> bool:
        if way == "stopped":
            return stop_for(process, self._random.uniform(0, STOP_S), self._give_up)
        if way == "killed" or trains:  # a hung sidecar has no supervisor to replace it
            return self._system.kill(process)
        if not stop_for_good(process, self._give_up):
            self._system.troubles.append(f"the {victim} hung for {HUNG_S:g} s, and nothing replaced it")
        return True

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
            self._give_up.wait(0.2)


LOOK_EVERY_S = 0.05
STEPS_AFTER = 6  # steps trained after the last kill
OUTAGE_S = 1.0
TOLERANCE = 1e-5  # of rewards and values: the server shares forward passes among rows, the reference does not


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Run the crash test, print its verdicts, and return the exit code, which is 130 after a second signal."""
    parser = argparse.ArgumentParser(description="Kill processes; check every guarantee.")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--kills", type=_count, default=50, metavar="N", help="default: 50, about ten minutes")
    length.add_argument(
        "--minutes",
        type=_minutes,
        metavar="N",
        help="instead: a soak test of the whole loop; takes --out and --seed only",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="a new or empty folder, which also holds the run"
    )
    parser.add_argument("--seed", type=_count, default=1, help="seed of batches, victims and kill points; default: 1")
    parser.add_argument("--hung", action="store_true", help="also suspend servers and models until they are replaced")
    parser.add_argument(
        "--freezes",
        type=_count,
        default=0,
        metavar="N",
        help="also stop models N times for 1 to 5 s, after the kills",
    )
    parser.add_argument(
        "--ranks",
        type=_count,
        default=1,
        metavar="N",
        help="ranks that train the critic; default: 1",
    )
    args = parse_or_complete(parser, argv)
    if args.minutes is not None and (args.hung or args.freezes or args.ranks > 1):
        parser.error("--minutes takes no other arguments than --out and --seed")
    if args.out.exists() and any(args.out.iterdir()):
        print(f"error: --out {args.out} is not empty; name a new or empty folder", file=sys.stderr)
        return 2
    if args.minutes is None:
        return run_test(args.out, args.seed, partial(run_chaos, args))
    from chaos.soak import run_soak  # torch: slow to import

    return run_test(args.out, args.seed, partial(run_soak, args.minutes, args.seed))


def _minutes(text: str) -> float:
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}, must be above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}, must be at least 1")
    return value


def run_chaos(args: argparse.Namespace, enough: threading.Event, record: Record) -> list[Verdict]:
    """Run the system in `record.out`, kill its processes, compare it with a reference run, and return the verdicts.

    Call it from the main thread.

    Args:
        args: the command's options.
        enough: once set, no more processes are killed, and the verdicts cover the run so far.

    Raises:
        ServerStartError: the server did not start at the beginning, or FAILED_STARTS restarts failed.
    """
    out, seed = record.out, args.seed
    started = time.monotonic()
    plan = plan_kills(args.kills, seed, ranks=args.ranks)
    path = write_config(out, args.ranks)
    system = ChaosSystem(path, random.Random(seed + 1))
    config = system.config
    traffic = Traffic(config.server.http_url, config.run.identity, seed, partial(stop_accepting, system))
    killer = Killer(system, traffic, plan, random.Random(seed + 2), hung=args.hung)
    try:
        say(f"{args.kills} kills")
        _drive(system, traffic, killer, enough)
        system.stop_program("sidecar")  # it may still reload a model, and a frozen process would then end the server
        freeze_models(system, args.freezes, random.Random(seed + 4), enough)
    finally:
        killer.thread.give_up()  # first, so that nothing is killed while the system stops
        traffic.thread.give_up()
        system.stop()
    requests = traffic.record
    say(f"{traffic.last_step} steps in {requests.now():.0f} s; running the same steps without faults …")
    # A run that ended early may have versions of steps that were never acknowledged.
    manifests = [system.store.manifest(version) for version in system.store.versions()]
    last_step = max([traffic.last_step, *(manifest.step for manifest in manifests)])
    reference = run_reference(config, path, seed, last_step, out / "reference")
    record.result |= {
        "summary": summary(requests, killer.kills) | {"seconds": time.monotonic() - started},
        "kills": killer.kills,
        "failures": [{"time_s": when, "who": who, "why": why} for when, who, why in requests.failures],
    }
    for name, value in record.result["summary"].items():
        say(f"  {name:<28}{value:.3g}" if isinstance(value, float) else f"  {name:<28}{value}")
    return _verdicts(system, requests, reference, killer, manifests)


def summary(record: RequestRecord, kills: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return counts, latencies and outages of a run.

    An outage is a gap between scoring answers that is longer than OUTAGE_S. Each kill receives `trained_after_s`, the
    seconds until the next acknowledged step, or None.
    """
    trained = [when for _, when, _ in record.trained]
    for kill in kills:
        kill["trained_after_s"] = min((t - kill["time_s"] for t in trained if t > kill["time_s"]), default=None)
    times = sorted(when for when, _ in record.latencies)
    gaps = [after - before for before, after in pairwise(times) if after - before > OUTAGE_S]
    ways = Counter(kill.get("way", "killed") for kill in kills if kill["hit"])
    failed = Counter(who for _, who, _ in record.failures)
    return {
        "kills": ways.pop("killed", 0),
        "stops": ways.total(),
        "steps": len(trained),
        "steps_repeated": len(record.repeated),
        "saves": len(record.saved),
        "rewinds": len(record.rewound),
        "scoring_requests": len(times),
        "scoring_requests_given_up": failed["scorer"],
        "training_attempts_given_up": failed["writer"],
        "scoring_p50_ms": float(np.median([1e3 * seconds for _, seconds in record.latencies])) if times else None,
        "outages": len(gaps),
        "longest_outage_s": max(gaps, default=0.0),
        "longest_until_trained_s": max((kill["trained_after_s"] or 0.0 for kill in kills), default=0.0),
    }


def _drive(system: ChaosSystem, traffic: Traffic, killer: Killer, enough: threading.Event) -> None:
    """Restart killed processes until all kills and STEPS_AFTER more steps are done."""
    traffic.thread.start()
    killer.thread.start()
    ending = False
    while traffic.thread.is_alive():
        system.look()
        if enough.is_set():
            killer.thread.give_up()
        if not killer.thread.is_alive() and not ending:
            ending = True
            traffic.finish(STEPS_AFTER)
        time.sleep(LOOK_EVERY_S)
    if not ending and not enough.is_set():
        why = requests[-1] if (requests := traffic.record.refusals) else repr(traffic.thread.error)
        system.troubles.append(f"the writer ended after {len(killer.done)} kills: {why}")
        say(f"  {system.troubles[-1]}")
    for thread in (traffic.thread, killer.thread):
        if thread.error is not None:
            system.troubles.append(f"the {thread.name} failed: {thread.error!r}")


def _verdicts(
    system: ChaosSystem, record: RequestRecord, reference: Reference, killer: Killer, manifests: Sequence[Manifest]
) -> list[Verdict]:
    store, config = system.store, system.config
    results = Journal(config.run.journal_dir, config.run.identity).results()
    trained = {Entry.parse(result.entry).step: result for result in results if result.entry.endswith(".train")}
    last = config.run.dir / "checkpoints" / "critic" / str(len(reference.steps) - 1)
    return [
        check_coverage(killer.kills, killer.done),
        check_steps(record, trained, reference),
        check_repeats(record),
        check_versions(manifests, store.current(), reference, {step for step, _, _ in record.rewound}),
        check_whole(store),
        check_scores(record, {manifest.version: manifest.step for manifest in manifests}, reference),
        check_freshness(record),
        check_checkpoint(last, reference),
        check_order(system.leftovers(), system.troubles),
    ]


def check_steps(record: RequestRecord, results: Mapping[int, Result], reference: Reference) -> Verdict:
    """Check that steps 1 to n were acknowledged without a gap, each with its journal result and reference loss."""
    found = [f"rejected or not answered: {refusal}" for refusal in record.refusals]
    answered = [step for step, _, _ in record.trained]
    last = len(reference.steps) - 1
    if answered != list(range(1, last + 1)):
        found.append(f"steps {answered} were acknowledged, steps 1 to {last} were sent")
    if sorted(results) != list(range(1, last + 1)):
        found.append(f"the journal has results of steps {sorted(results)}, steps 1 to {last} were sent")
    for step, _, answer in record.trained:
        result, loss = results.get(step), reference.steps[step].loss if step <= last else None
        if result is None or loss is None:
            continue
        if result.error is not None:
            found.append(f"step {step} ended in an error: {result.error}")
        if result.loss_mean != loss:
            found.append(f"step {step} has loss {result.loss_mean!r}, without faults it is {loss!r}")
        told = (result.weights_version, float(np.float32(loss)))
        if (answer.weights_version, answer.loss_mean) != told:
            found.append(f"step {step} was answered with {answer}, but its result in the journal is {result}")
    return verdict("each accepted step was trained once, in order, with the loss of a run without faults", last, found)


def check_repeats(record: RequestRecord) -> Verdict:
    """Check that a step that was sent twice received the same answer twice."""
    first = {step: answer for step, _, answer in record.trained}
    found = [
        f"step {step} was answered with {first.get(step)} at first and with {answer} later"
        for step, answer in record.repeated
        if first.get(step) != answer
    ]
    return verdict("a step that was sent twice received the same answer twice", len(record.repeated), found)


def check_versions(
    manifests: Sequence[Manifest], current: int | None, reference: Reference, rewound: Collection[int] = ()
) -> Verdict:
    """Check for one version per step, in order and bit-identical to the reference; CURRENT must name the last version.

    Args:
        rewound: steps to which the run was rewound; it adds another version of its step, after those of later steps.
    """
    found = []
    steps = [manifest.step for manifest in manifests]
    last = len(reference.steps) - 1
    follow = all(step == before + 1 or (step in rewound and step <= before) for before, step in pairwise(steps))
    if not follow or steps[:1] != [0] or steps[-1] != last:
        found.append(f"the versions are of steps {steps}, expected 0 to {last}")
    for manifest in manifests:
        if manifest.step < len(reference.steps) and manifest.digest != reference.steps[manifest.step].digest:
            found.append(
                f"version {manifest.version} of step {manifest.step} has digest {brief(manifest.digest)}, without "
                f"faults it is {brief(reference.steps[manifest.step].digest)}"
            )
    if manifests and current != manifests[-1].version:
        found.append(f"CURRENT names {current}, the last version is {manifests[-1].version}")
    return verdict("the weights after each step are bit-identical to a run without faults", len(manifests), found)


def check_whole(store: WeightsStore) -> Verdict:
    """Check every version's files against its manifest."""
    found = []
    folders = numbers_in(store.root)
    for version in folders:
        try:
            store.verify_files(version)
        except WeightsError as error:
            found.append(str(error))
    return verdict("the files of every version match its manifest", len(folders), found)


def check_scores(record: RequestRecord, steps: Mapping[int, int], reference: Reference) -> Verdict:
    """Check that each answer names one version and has that version's values, and that rewards never change.

    Args:
        steps: for each version, the number of critic updates that led to it.
    """
    found = []
    for served in record.served:
        if len(set(served.versions)) != 1 or served.versions[0] not in steps:
            found.append(
                f"probe {served.probe} was scored by versions {served.versions}, expected a single existing version"
            )
            continue
        expected = reference.steps[steps[served.versions[0]]].values[served.probe]
        what = f"of probe {served.probe} by version {served.versions[0]}"
        found += _differences(f"values {what}", served.values, expected)
        found += _differences(f"rewards {what}", served.rewards, reference.rewards[served.probe])
    return verdict("no reward or value was wrong", record.served.total(), found)


def check_checkpoint(last: Path, reference: Reference) -> Verdict:
    """Check that weights and optimizer of the last checkpoint are bit-identical to the reference's."""
    import torch
    from safetensors.torch import load_file

    found, checked = [], 0
    for path in sorted(reference.checkpoint.glob("*.safetensors")):
        if not (last / path.name).is_file():
            found.append(f"{last.name}/{path.name} is missing")
            continue
        ours, theirs = load_file(last / path.name), load_file(path)
        checked += len(theirs)
        found += [f"{path.name}: {name} is in only one of the two" for name in sorted(set(ours) ^ set(theirs))]
        different = [name for name in sorted(set(ours) & set(theirs)) if not torch.equal(ours[name], theirs[name])]
        found += [f"{path.name}: {name} differs" for name in different]
    return verdict("the last checkpoint, optimizer included, is that of a run without faults", checked, found)


def check_freshness(record: RequestRecord) -> Verdict:
    """Check that no row was scored by a version older than one that the server had reported as served."""
    found = [
        f"at {when:.1f} s a row was scored by version {version}, after version {promised} had been reported as served"
        for when, version, promised in record.stale
    ]
    return verdict("once a step is acknowledged, no older version scores", record.served.total(), found)


def check_order(leftovers: Sequence[str], troubles: Sequence[str]) -> Verdict:
    """Check that no processes, shared memory or unfinished folders remain, and that only killed processes ended."""
    return verdict(
        "no processes, shared memory or unfinished folders remain, and only killed processes ended",
        1,
        [*leftovers, *troubles],
    )


def check_coverage(kills: Sequence[Mapping[str, object]], planned: Sequence[tuple[str, str]]) -> Verdict:
    """Check that every process and every kill point of the plan was hit; a kill counts if its point was observed."""
    hits = [kill for kill in kills if kill["hit"]]
    wanted = [("victim", {victim for victim, _ in planned}), ("point", {point for _, point in planned})]
    found = [
        f"no kill hit the {key} {name!r}"
        for key, names in wanted
        for name in sorted(names - {str(kill[key]) for kill in hits})
    ]
    return verdict("each victim and each kill point was hit", len(hits), found)


def _differences(what: str, got: bytes, expected: np.ndarray) -> list[str]:
    array = np.frombuffer(got, np.float32)
    if array.size != expected.size:
        return [f"{what}: {array.size} numbers, not {expected.size}"]
    largest = float(np.abs(array - expected.ravel()).max())
    return [] if largest <= TOLERANCE else [f"{what}: off by {largest:.2g}"]  # NaN counts as off, too
