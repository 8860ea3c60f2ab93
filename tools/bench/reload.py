"""`python -m tools bench reload --out DIR`: what reloads cost those who are being served, and those who wait for them.
Given: parts, models, counts. Returns: DIR/result.json with raw samples, a table of the bars, DIR/reload.png.
The server has a core of its own, the clients another; each part is kept when it is done, a later run adds to it.
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

from actor.client import RequestFailed
from tools.bench.children import BenchError
from tools.bench.machine import describe_machine, describe_versions, now_utc
from tools.bench.reload_clients import Clients
from tools.bench.reload_report import PARTS, write_report
from tools.bench.reload_stage import Cores, Settings, Stage, on_core
from tools.bench.trace import SIZES
from tools.child import ChildDied
from tools.triton_home import ServerStartError
from trainer.control_plane import ControlPlaneError

LETTERS = "".join(dict.fromkeys(part.letter for part in PARTS.values()))
HELP = {
    "swaps": "part a",
    "triton_reloads": "part a",
    "clients": "parts a and c: value requests under way at once while the critic is reloaded",
    "cycles": "part a: quiet, swaps, quiet, Triton reloads, so many times",
    "quiet_s": "part a: seconds of each quiet block",
    "swap_every_s": "part a",
    "publishes": "part b, for each model up to 7 million parameters",
    "loads": "part b: Triton reloads beside fresh processes, and publishes of larger models",
    "update_clients": "part c: value requests under way at once while the critic trains",
    "update_rows": "part c: rows of the smallest update; the others have twice and four times as many",
    "updates": "part c, of each size and server",
    "gap_reloads": "part c, of each way",
    "leak_swaps": "part d",
    "leak_triton_reloads": "part d",
    "leak_clients": "part d",
    "journal_repeats": "part e",
    "journal_rows": "part e",
    "journal_tokens": "part e: tokens of each row",
}
DEFAULTS = {
    "swaps": 200, "triton_reloads": 50, "clients": 32, "cycles": 25, "quiet_s": 3.0, "swap_every_s": 0.5,
    "publishes": 20, "loads": 7, "update_clients": 8, "update_rows": 32, "updates": 3, "gap_reloads": 10,
    "leak_swaps": 1000, "leak_triton_reloads": 100, "leak_clients": 4, "journal_repeats": 15, "journal_rows": 512,
    "journal_tokens": 1024,
}  # fmt: skip
QUICK = {
    "models": "tiny", "swaps": 4, "triton_reloads": 1, "clients": 4, "cycles": 1, "quiet_s": 0.5, "publishes": 2,
    "loads": 1, "update_clients": 2, "update_rows": 4, "updates": 1, "gap_reloads": 1, "leak_swaps": 20,
    "leak_triton_reloads": 2, "leak_clients": 2, "journal_repeats": 2, "journal_rows": 16, "journal_tokens": 64,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report, or only report; 0 when done, whatever the bars say; 1 if it cannot be measured."""
    arguments = parse_arguments(argv)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    out = arguments.report_only or arguments.out
    try:
        if arguments.report_only is None:
            measure(arguments, out)
        print(write_report(json.loads((out / "result.json").read_text()), out))
    except (BenchError, ChildDied, ControlPlaneError, RequestFailed, ServerStartError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"stopped; {out}/result.json holds the parts that were done: --parts adds the others", file=sys.stderr)
        return 130
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `--quick` changes defaults only."""
    parser = argparse.ArgumentParser(prog="python -m tools bench reload", description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="folder for result.json, the table and the picture")
    where.add_argument("--report-only", type=Path, metavar="DIR", help="draw again from DIR/result.json")
    parser.add_argument("--parts", default=",".join(LETTERS), help="measure these, keep what DIR has of the others")
    parser.add_argument("--models", default="1m,7m,110m", help=f"of {', '.join(SIZES)}; above 7m: part b alone")
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=HELP[name])
    parser.add_argument("--quick", action="store_true", help="a minute or two: shows that all works, measures nothing")
    if "--quick" in (argv if argv is not None else sys.argv):
        parser.set_defaults(**QUICK)
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace, out: Path) -> None:
    """Measure the parts in turn into `out`/result.json, each written when it is done.

    Raises:
        BenchError: an unknown part or model, or a process of the measurement failed.
    """
    settings = _settings(arguments)
    letters = arguments.parts.split(",")
    unknown = [*(set(letters) - set(LETTERS)), *(set(settings.models) - set(SIZES))]
    if unknown:
        raise BenchError(f"unknown: {', '.join(unknown)}; parts: {', '.join(LETTERS)}; models: {', '.join(SIZES)}")
    out.mkdir(parents=True, exist_ok=True)
    result = _begin(out, settings)
    begin = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begin:6.0f} s  {line}", flush=True)

    cores = Cores.of_machine()
    say(_describe(cores))
    servers = out / "servers"
    with on_core(cores.clients):
        clients = Clients(servers / "clients.log")
    try:
        with on_core(*cores.trainer):
            stage = Stage(settings, servers, cores, clients, say)
            for name, part in PARTS.items():
                if part.letter in letters:
                    say(f"{part.letter}: {name}")
                    result["parts"][name] = part.measure(stage)
                    result["measured"][name] = _facts(settings)
                    write_report(result, out)
    finally:
        clients.close()
    shutil.rmtree(servers)


def _begin(out: Path, settings: Settings) -> dict[str, Any]:
    """What an earlier run has left, or the first facts."""
    path = out / "result.json"
    if path.is_file():
        return dict(json.loads(path.read_text()))
    return {"machine": describe_machine(), "parts": {}, "measured": {}}


def _facts(settings: Settings) -> dict[str, Any]:
    return {
        "date": now_utc(), "versions": describe_versions(), "settings": dataclasses.asdict(settings),
        "load_after": os.getloadavg()[0],
    }  # fmt: skip


def _settings(arguments: argparse.Namespace) -> Settings:
    counts = {name: getattr(arguments, name) for name in DEFAULTS}
    return Settings(models=arguments.models.split(","), **counts)


def _describe(cores: Cores) -> str:
    if cores.server == cores.clients:
        return "one core for all: server, clients and trainer disturb each other, and the bars are not meant for this"
    others = " and ".join(map(str, cores.trainer))
    trainer = "the clients' core, at the lowest priority" if cores.clients in cores.trainer else f"core {others}"
    return f"the server has core {cores.server}, the clients core {cores.clients}, the trainer {trainer}"


def _interrupt(number: int, frame: object) -> None:
    for again in (signal.SIGINT, signal.SIGTERM):
        signal.signal(again, signal.SIG_IGN)  # stopping is under way
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
