"""`python -m tools bench scoring --out DIR`: our server beside what users have today, on the same cores in one run.
Given: models, rows per request, concurrency levels. Returns: DIR/result.json, a table, the bars, pictures.
Every round measures all contenders with the same requests in turn; ratios are of samples of one round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.children import BenchChild, BenchError
from tools.bench.contenders import CONTENDERS
from tools.bench.machine import describe_machine, describe_versions, now_utc
from tools.bench.plan import Settings
from tools.bench.report import write_report
from tools.bench.rounds import Bench, measure_model
from tools.bench.running import Split
from tools.bench.trace import LOG_MEAN, LOG_SD, LONGEST, SHORTEST, SIZES, make_checkpoint
from tools.child import ChildDied
from tools.triton_home import ServerStartError
from trainer.control_plane import ControlPlaneError

QUICK = {
    "models": "tiny", "concurrency": "1,8", "repeats": 1, "seconds": 0.2, "splits": "2x1", "token_budget": "256",
    "scaling_tokens": "1000,10000",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report, or only report; 0 when done, whatever the bars say; 1 if it cannot be measured."""
    arguments = parse_arguments(argv)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    try:
        out = arguments.report_only or arguments.out
        if arguments.report_only is None:
            measure(arguments, out)
        result = json.loads((out / "result.json").read_text())
        print(write_report(result, out))
    except (BenchError, ChildDied, ControlPlaneError, ServerStartError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"stopped; {out}/result.json holds the rounds so far: --report-only {out} draws them", file=sys.stderr)
        return 130
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `--quick` changes defaults only."""
    parser = argparse.ArgumentParser(prog="python -m tools bench scoring", description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="folder for result.json, table and pictures")
    where.add_argument("--report-only", type=Path, metavar="DIR", help="draw again from DIR/result.json")
    parser.add_argument("--models", default="1m,7m,110m", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--rows", default="1,8", help="rows per request")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,64,128,256", help="requests under way at once")
    parser.add_argument("--repeats", type=int, default=3, help="matched rounds (110m: one)")
    parser.add_argument("--max-rows-under-way", type=int, default=256, help="concurrency x rows: leave out the rest")
    parser.add_argument("--seconds", type=float, default=1.0, help="of the fastest contender in one cell")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--splits", help="instances x threads to try; default: one instance, or one thread each")
    parser.add_argument("--token-budget", default="256,512,1024", help="of ours; several: `ideal` picks the fastest")
    parser.add_argument("--queue-delay-us", type=int, default=2000, help="of ours")
    parser.add_argument("--allocator", choices=("tuned", "default"), default="tuned", help="malloc, for all alike")
    parser.add_argument("--scaling-tokens", default="1000,10000,100000,1000000", help="sizes of the growth run")
    parser.add_argument("--quick", action="store_true", help="minutes shorter: shows that all works, measures nothing")
    if "--quick" in (argv if argv is not None else sys.argv):
        parser.set_defaults(**QUICK)
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace, out: Path) -> None:
    """Measure into `out`/result.json. Raises BenchError, ServerStartError."""
    settings = _settings(arguments)
    names = arguments.models.split(",")
    unknown = [*(set(names) - set(SIZES)), *(set(settings.contenders) - set(CONTENDERS))]
    if unknown:
        raise BenchError(f"unknown: {', '.join(unknown)}; models: {', '.join(SIZES)}; contenders: {list(CONTENDERS)}")
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "servers", ignore_errors=True)
    load = BenchChild("load generator", "tools.bench.load", [], out / "servers" / "load.log")
    try:
        load.wait_ready()
        bench = Bench(settings, out, load, _first_facts(settings), time.monotonic())
        for name in names:
            checkpoint = out / "servers" / f"{name}-checkpoint"
            parameters = make_checkpoint(SIZES[name], checkpoint)
            bench.result["models"][name] = {**dataclasses.asdict(SIZES[name]), "parameters": parameters}
            bench.say(f"{name}: {parameters / 1e6:.2f} M parameters; starting the contenders one by one")
            measure_model(bench, SIZES[name], checkpoint, scaling=name == names[0])
            shutil.rmtree(checkpoint)  # the largest has half a gigabyte
        bench.result["seconds"] = time.monotonic() - bench.start
        bench.save()
    finally:
        load.stop()


def _settings(arguments: argparse.Namespace) -> Settings:
    cores = len(os.sched_getaffinity(0))
    splits = arguments.splits or f"1x{cores},{cores}x1"
    return Settings(
        contenders=arguments.contenders.split(","),
        rows=_numbers(arguments.rows),
        concurrency=_numbers(arguments.concurrency),
        repeats=arguments.repeats,
        seconds=arguments.seconds,
        splits=[Split(*map(int, split.split("x"))) for split in dict.fromkeys(splits.split(","))],
        token_budgets=_numbers(arguments.token_budget),
        queue_delay_us=arguments.queue_delay_us,
        tuned_allocator=arguments.allocator == "tuned",
        max_rows_under_way=arguments.max_rows_under_way,
        scaling_tokens=_numbers(arguments.scaling_tokens),
    )


def _first_facts(settings: Settings) -> dict[str, Any]:
    trace = {"log_mean": LOG_MEAN, "log_sd": LOG_SD, "shortest": SHORTEST, "longest": LONGEST}
    return {
        "date": now_utc(), "machine": describe_machine(), "versions": describe_versions(), "trace": trace,
        "settings": {**dataclasses.asdict(settings), "splits": [str(split) for split in settings.splits]},
        "models": {}, "samples": [], "memory": [],
    }  # fmt: skip


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _interrupt(number: int, frame: object) -> None:
    for again in (signal.SIGINT, signal.SIGTERM):
        signal.signal(again, signal.SIG_IGN)  # stopping is under way
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
