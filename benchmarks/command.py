"""`rlhf-triton bench <what>`: run a benchmark, write result.json, report.md and pictures, print the report."""

import argparse
import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measurement import Benchmark, Record, Result, Target
from rlhf_triton.config import command_line
from rlhf_triton.store.durable import write_json
from rlhf_triton.tools.arguments import SHELL_ASKS, command_to_complete, parse_or_complete

BENCHMARKS = {
    "scoring": ("benchmarks.scoring", "speed of scoring and of the gateway, compared with other servers"),
    "reload": (
        "benchmarks.reload",
        "what reloads cost clients, and the time until a version is served",
    ),
    "trl": ("benchmarks.trl", "GRPO, RLOO and PPO training steps, compared with TRL"),
    "gpu": ("benchmarks.gpu", "whether everything works on this machine's GPU, and how fast it is there"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that `argv[0]` names; return its exit code, or 2 if the name is missing or unknown."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if SHELL_ASKS in os.environ:
        arguments = [command_to_complete(BENCHMARKS)]
    name = arguments[0] if arguments else "--help"
    if name in BENCHMARKS:
        return run(name, importlib.import_module(BENCHMARKS[name][0]), arguments[1:])
    if name in ("-h", "--help"):
        print(f"usage: {sys.argv[0]} <what> --out DIR [--help]\n\nbenchmarks:")
        print("\n".join(f"  {key:<11}{what}" for key, (_, what) in BENCHMARKS.items()))
        return 0 if arguments else 2
    print(f"error: unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}", file=sys.stderr)
    return 2


@command_line.reporting
def run(name: str, benchmark: Benchmark, argv: Sequence[str]) -> int:
    """Measure and report, or only report with `--report-only`.

    Return 0 even if targets are missed, unless the benchmark itself says that it failed; 2 on errors, 130 after SIGINT
    or SIGTERM.
    """
    settings = parse_arguments(name, benchmark, argv)
    out = settings.report_only or settings.out
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if settings.report_only is None:
            values = {key: getattr(settings, key) for key in benchmark.OPTIONS}
            record = Record(out, settings=json.loads(json.dumps(values, default=str)))
            benchmark.measure(settings, record)
            record.save()
        result = json.loads((out / "result.json").read_text())
        print(report(benchmark, result, out))
    except KeyboardInterrupt:
        print(f"stopped; `--report-only {out}` reports on the samples in {out}/result.json so far", file=sys.stderr)
        return 130
    return int(getattr(benchmark, "has_failed", lambda _: False)(result))


def parse_arguments(name: str, benchmark: Benchmark, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the benchmark's options, `--out` or `--report-only`, and `--quick`, which only changes defaults."""
    parser = argparse.ArgumentParser(prog=f"{sys.argv[0]} {name}", description=BENCHMARKS[name][1])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="folder of result.json, report.md and pictures")
    where.add_argument("--report-only", type=Path, metavar="DIR", help="report on DIR/result.json without measuring")
    parser.add_argument("--quick", action="store_true", help="small sizes: only shows that everything works")
    for key, option in benchmark.OPTIONS.items():
        option.add_to(parser, key, quick="--quick" in argv)
    return parse_or_complete(parser, argv)


def report(benchmark: Benchmark, result: Result, out: Path) -> str:
    """Add summary and targets to result.json, write report.md and pictures; return the text of report.md."""
    result["summary"] = benchmark.summarise(result)
    judged = benchmark.targets(result)
    result["targets"] = [{**vars(target), "verdict": target.verdict} for target in judged]
    write_json(out / "result.json", result, durable=False)
    lines = []
    for key in ("date", "settings", "machine", "versions", "note"):
        if value := result.get(key):
            items = [f"{name} {item}" for name, item in value.items()] if isinstance(value, dict) else [str(value)]
            lines.append(f"* {key}: {', '.join(items)}")
    tables = [result["summary"]] if isinstance(result["summary"], list) else []
    text = "\n\n".join(["\n".join(lines), *map(markdown, [*tables, targets_table(judged)])])
    (out / "report.md").write_text(text + "\n")
    getattr(benchmark, "draw", lambda *_: None)(result, out)
    return text


def targets_table(targets: Sequence[Target]) -> list[dict[str, Any]]:
    """Return a table row for each target: verdict, name, limits, detail and value."""
    return [
        {
            "": target.verdict,
            "target": target.name,
            "must be": target.limits,
            "where": target.detail,
            "measured": target.value,
        }
        for target in targets
    ]


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table that is readable in a terminal: one column per key, text aligned left, numbers right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.MARKDOWN)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    for key in keys:
        table.add_column(key, justify="left" if any(isinstance(row.get(key), str) for row in rows) else "right")
    for row in rows:
        table.add_row(*(_shown(row.get(key)) for key in keys))
    console = Console(file=io.StringIO(), width=10_000, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get().strip()


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
