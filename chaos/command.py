"""`python -m tools chaos --kills N --out DIR`: the crash test of the live critic, on real processes.

`--minutes N` instead of `--kills`: the soak test of the whole loop, see `chaos.soak.command`.

Exit code 0: every guarantee was kept; 1: one was broken; 2: an error, such as a server that does not start again. The
results are in DIR/result.json.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from benchmarks.support.benchmark import Record
from chaos import verdict
from chaos.killer import Killer, freeze_models, plan_kills, stop_accepting
from chaos.reference import Reference, run_reference
from chaos.system import ChaosSystem, write_config
from chaos.traffic import RequestRecord, Traffic
from chaos.verdict import Verdict
from python_backend.config.command_line import reporting
from python_backend.monitoring.log_lines import say
from python_backend.store.journal import Entry, Journal
from python_backend.store.weights import Manifest
from tools.arguments import parse_or_complete

LOOK_EVERY_S = 0.05
STEPS_AFTER = 6  # steps trained after the last kill
OUTAGE_S = 1.0
Test = Callable[[threading.Event, Record], list[Verdict]]
"""Runs a test until it is done, or the event is set; its result goes into the record."""


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
        "--freezes", type=_count, default=0, metavar="N", help="also stop models N times for 1 to 5 s, after the kills"
    )
    parser.add_argument("--ranks", type=_count, default=1, metavar="N", help="ranks that train the critic; default: 1")
    args = parse_or_complete(parser, argv)
    if args.minutes is not None and (args.hung or args.freezes or args.ranks > 1):
        parser.error("--minutes takes no other arguments than --out and --seed")
    if args.out.exists() and any(args.out.iterdir()):
        print(f"error: --out {args.out} is not empty; name a new or empty folder", file=sys.stderr)
        return 2
    if args.minutes is None:
        return run_test(args.out, args.seed, functools.partial(run_chaos, args))
    from chaos.soak.command import run_soak  # torch: slow to import

    return run_test(args.out, args.seed, functools.partial(run_soak, args.minutes, args.seed))


def run_test(out: Path, seed: int, test: Test) -> int:
    """Run a test in `out`, print its verdicts, and return the exit code, which is 130 after a second signal."""
    enough = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, functools.partial(_enough, enough))
    record = Record(out.resolve(), seed=seed)
    say(f"seed {seed}, in {record.out}")
    try:
        verdicts = test(enough, record)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    record.result["verdicts"] = [vars(item) for item in verdicts]
    record.save()
    for item in verdicts:
        say(item.sentence())
    return 0 if all(item.kept for item in verdicts) else 1


def _enough(event: threading.Event, number: int, frame: FrameType | None) -> None:
    """Handle a signal: stop killing processes at the first one, stop the test at the second."""
    if event.is_set():
        signal.default_int_handler(number, frame)
    event.set()


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
    traffic = Traffic(config.server.http_url, config.run.identity, seed, functools.partial(stop_accepting, system))
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
        verdict.check_coverage(killer.kills, killer.done),
        verdict.check_steps(record, trained, reference),
        verdict.check_repeats(record),
        verdict.check_versions(manifests, store.current(), reference, {step for step, _, _ in record.rewound}),
        verdict.check_whole(store),
        verdict.check_scores(record, {manifest.version: manifest.step for manifest in manifests}, reference),
        verdict.check_freshness(record),
        verdict.check_checkpoint(last, reference),
        verdict.check_order(system.leftovers(), system.troubles),
    ]


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


if __name__ == "__main__":
    sys.exit(main())
