"""`python -m benchmarks WHAT`: run a benchmark, write result.json and report.md, print the report."""

import argparse
import importlib
import signal
import sys
from pathlib import Path

from benchmarks.measuring import Record
from rlhf_triton.config.command_line import reporting

BENCHMARKS = {
    "scoring": "speed of scoring, compared with PyTriton and vLLM",
    "reload": "what reloads cost clients, and the time until a version is served",
    "trl": "GRPO and PPO training steps, compared with TRL",
    "staleness": "what a tiny policy learns from responses of older policies, with each correction",
    "gpu": "whether everything works on this machine's GPU, and how fast it is there",
}
"""Modules of this package, each with `add_options` and `measure`."""


@reporting
def main() -> int:
    """Measure and report; return 1 if the benchmark says that it failed, 2 on errors."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run a benchmark.")
    kinds = parser.add_subparsers(dest="benchmark", required=True, metavar="what")
    for name, what in BENCHMARKS.items():
        options = kinds.add_parser(name, help=what, description=what)
        options.add_argument("--out", type=Path, required=True, help="folder of result.json, report.md and pictures")
        if name in sys.argv[1:2]:  # the others need not be imported
            importlib.import_module(f"benchmarks.{name}").add_options(options)
    settings = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    record = Record(settings)
    print(record.report(importlib.import_module(f"benchmarks.{settings.benchmark}").measure(settings, record)))
    return int(record.has_failed)


if __name__ == "__main__":
    sys.exit(main())
