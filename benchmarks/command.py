"""`rlhf-triton bench <what>`: run a benchmark, write result.json and report.md, print the report."""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_triton.config.command_line import reporting
from rlhf_triton.tools.arguments import parse

BENCHMARKS = {
    "scoring": ("benchmarks.scoring", "speed of scoring, compared with PyTriton and vLLM"),
    "reload": ("benchmarks.reload", "what reloads cost clients, and the time until a version is served"),
    "trl": ("benchmarks.trl", "GRPO and PPO training steps, compared with TRL"),
    "gpu": ("benchmarks.gpu", "whether everything works on this machine's GPU, and how fast it is there"),
}


def main() -> int:
    """Run the benchmark that the first argument names; return its exit code, or 2 if the name is missing or unknown."""
    arguments = sys.argv[1:]
    name = arguments[0] if arguments else "--help"
    if name in BENCHMARKS:
        return run(name, arguments[1:])
    if name in ("-h", "--help"):
        print(f"usage: {sys.argv[0]} <what> --out DIR [--help]\n\nbenchmarks:")
        print("\n".join(f"  {key:<11}{what}" for key, (_, what) in BENCHMARKS.items()))
        return 0 if arguments else 2
    print(f"error: unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}", file=sys.stderr)
    return 2


@reporting
def run(name: str, argv: Sequence[str]) -> int:
    """Measure and report; return 1 if the benchmark says that it failed, 2 on errors."""
    from benchmarks.measuring import Record

    module, what = BENCHMARKS[name]
    benchmark = importlib.import_module(module)
    parser = argparse.ArgumentParser(prog=f"{sys.argv[0]} {name}", description=what)
    parser.add_argument("--out", type=Path, required=True, help="folder of result.json, report.md and pictures")
    benchmark.add_options(parser)
    settings = parse(parser, argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    record = Record(settings)
    print(record.report(benchmark.measure(settings, record)))
    return int(record.has_failed)
