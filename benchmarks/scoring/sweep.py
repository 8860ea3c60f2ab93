"""Benchmark of scoring: the project's server against the servers that users have today, on the same cores.

Every round measures all contenders in turn with the same requests. Each contender divides the cores among instances
and threads in the way that is fastest for it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.scoring.contenders import CONTENDERS, Contender, Setup, run_plan
from benchmarks.support.benchmark import BenchError, Option, Record, Result, Target
from benchmarks.support.children import BenchChild, running_child
from benchmarks.support.samples import grouped, in_turn, median_of, pairs, ratio, select
from benchmarks.support.workload import SIZES, ModelSize, make_checkpoint, model_size, model_title, trace_lengths
from tools.calibrate.calibration import forward_overhead
from tools.report.curves import figure_of

CORES = len(os.sched_getaffinity(0))
OPTIONS = {
    "models": Option(["1m", "7m", "110m"], f"any of {', '.join(SIZES)}", quick=["tiny"], known=SIZES),
    "rows": Option([1, 8], "rows per request"),
    "concurrency": Option([1, 2, 4, 8, 16, 32, 64, 128, 256], "requests in flight", quick=[1, 8]),
    "repeats": Option(3, "rounds; each measures every contender (110m: one round)", quick=1),
    "seconds": Option(1.0, "seconds that the fastest contender spends in one cell", quick=0.2),
    "contenders": Option(list(CONTENDERS)[:5], f"any of {', '.join(CONTENDERS)}", known=CONTENDERS),
    "splits": Option([f"1x{CORES}", f"{CORES}x1"], "instances x threads that each contender may choose", quick=["2x1"]),
    "token_budget": Option([256, 512, 1024], "token budgets to try with `ideal`; ours uses the fastest", quick=[256]),
}
HEADLINE_FACTOR = 3  # the headline cell is measured longer, since most targets are about it
MOST_ROWS_IN_FLIGHT = 256
CELL_LIMIT = 20  # all contenders together take at most this many times `seconds`, or one request per worker
NUM_CHECKED = 4  # rewards that every contender must agree on
TOLERANCE = 2e-3
CALIBRATION_ROWS = 64
OURS, IDEAL = "ours", "ideal"
HEADLINE = (1, 64)  # rows per request, requests in flight
LEAST_RATIO = (
    ("7m", "pytriton_padded", 3.3),
    ("7m", "pytriton_stripped", 2.2),
    ("7m", "one_forward", 1.1),
    ("1m", "one_forward", 2.0),
    ("7m", IDEAL, 0.9),
    ("7m", "serve_rm", 2.5),
)
MOST_RATIO_OVER_GATEWAY = 1 / 0.85
MIN_ROUNDS = 3
NEVER_SLOWER_FROM = 8
MOST_LATENCY_MS = 4.0  # our latency minus another server's: the queue delay of 2 ms, plus 2 ms
LOOKS: dict[str, tuple[str, Any, str]] = {
    "ideal": ("#3C4043", (0, (5, 2)), "in process, no server"),
    "ours": ("#0072B2", "-", "ours"),
    "one_forward": ("#E69F00", "-", "one forward per request"),
    "gateway_tokens": ("#009E73", "-", "through the gateway, tokens"),
    "gateway_texts": ("#56B4E9", "-", "through the gateway, texts"),
    "serve_rm": ("#8A8F98", "-", "OpenRLHF's serve_rm"),
    "pytriton_stripped": ("#CC79A7", "-", "PyTriton, stripped"),
    "pytriton_padded": ("#D55E00", "-", "PyTriton, padded"),
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One point of the sweep, and the number of requests that it sends."""

    rows: int
    """Rows per request."""
    concurrency: int
    num_requests: int


def plan_cells(settings: argparse.Namespace, size: ModelSize, row_s: Sequence[float]) -> Iterator[Cell]:
    """Yield the cells of one model; `row_s`: seconds that each contender takes for a row.

    A cell sends two requests per worker, or as many as take the fastest contender `seconds`, whichever is more, unless
    all contenders together would then take longer than `CELL_LIMIT` allows.
    """
    for rows, level in itertools.product(settings.rows, settings.concurrency):
        left_out = (size.rows and rows not in size.rows) or (size.concurrency and level not in size.concurrency)
        if left_out or rows * level > MOST_ROWS_IN_FLIGHT:
            continue
        seconds = settings.seconds * size.effort * (HEADLINE_FACTOR if (rows, level) == HEADLINE else 1)
        wanted = max(2 * level, seconds / min(row_s) / rows)
        affordable = CELL_LIMIT * seconds / sum(row_s) / rows
        yield Cell(rows, level, max(level, 4, math.ceil(min(wanted, affordable))))


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Measure the sweep with every model."""
    servers = record.out / "servers"
    shutil.rmtree(servers, ignore_errors=True)
    with running_child("load generator", "scoring.processes:serve_load", {}, servers / "load.log") as load:
        for name in settings.models:
            checkpoint = servers / f"{name}-checkpoint"
            parameters = make_checkpoint(SIZES[name], checkpoint)
            record.say(f"{name}: {parameters / 1e6:.2f} M parameters; starting the contenders one by one")
            ModelBench(settings, record, load, SIZES[name]).run(checkpoint)
            shutil.rmtree(checkpoint)  # the largest has half a gigabyte


@dataclass
class ModelBench:
    """The measurement of one model."""

    settings: argparse.Namespace
    record: Record
    load: BenchChild
    size: ModelSize
    rewards: list[float] = field(default_factory=list)
    """First rewards of the first contender, which all other contenders must match."""

    def run(self, checkpoint: Path) -> None:
        """Start every contender with its best split, measure all of them in turn in each cell, and stop them."""
        budgets, overhead = self.settings.token_budget, forward_overhead(checkpoint)
        folder = checkpoint.parent / self.size.name
        started: dict[str, Contender] = {}
        row_s = []
        with contextlib.ExitStack() as stack:
            for name in (name for name in CONTENDERS if name in self.settings.contenders):
                # `ideal` starts first and determines the token budget of the others.
                tried = itertools.product(self.settings.splits, budgets if name == "ideal" else budgets[:1])
                setups = [Setup(checkpoint, folder, split, budget, overhead) for split, budget in tried]
                started[name], pace = self.start_best(name, setups, stack)
                row_s.append(pace)
                budgets = [started[name].setup.token_budget]
            for cell in plan_cells(self.settings, self.size, row_s):
                for number, name in in_turn(list(started), min(self.settings.repeats, self.size.max_repeats)):
                    sample = self.send(started[name], cell, purpose="sweep", round=number)
                    what = f"{cell.num_requests} requests of {cell.rows}, concurrency {cell.concurrency}"
                    rate = sample["sequences"] / sample["seconds"]
                    self.record.say(f"{self.size.name} {what}, round {number + 1}: {name} {rate:.0f} rows/s")

    def start_best(self, name: str, setups: Sequence[Setup], stack: contextlib.ExitStack) -> tuple[Contender, float]:
        """Try each setup; keep the fastest running until `stack` closes; return it and its seconds per row."""
        cell = Cell(1, CALIBRATION_ROWS, CALIBRATION_ROWS)
        best: tuple[Contender, float] | None = None
        kept = contextlib.ExitStack()
        for setup in setups:
            with contextlib.ExitStack() as trial:
                contender = trial.enter_context(CONTENDERS[name](name, setup))
                row_s = self.send(contender, cell, purpose="split", round=0)["seconds"] / CALIBRATION_ROWS
                if best is None or row_s < best[1]:
                    kept.close()
                    best, kept = (contender, row_s), trial.pop_all()
        stack.push(kept)
        assert best is not None
        setup = best[0].setup
        self.record.say(
            f"{self.size.name} {name}: {setup.split}, budget {setup.token_budget}, {1 / best[1]:.1f} rows/s"
        )
        return best

    def send(self, contender: Contender, cell: Cell, **labels: Any) -> dict[str, Any]:
        """Send the cell's requests to a contender; record and return the sample."""
        num_rows = cell.rows * cell.num_requests
        if contender.name == "ideal":
            answer = run_plan(contender, num_rows, NUM_CHECKED)
        else:
            job = {
                "urls": contender.urls,
                "form": contender.form,
                "width": contender.width,
                "pids": contender.pids,
                "num_rows": num_rows,
                "rows": cell.rows,
                "concurrency": cell.concurrency,
                "num_warmup": min(cell.concurrency, max(1, 16 // cell.rows)),
                "num_checked": NUM_CHECKED,
            }
            answer = self.load.ask("/measure", job)
        self.check_rewards(contender.name, answer.pop("rewards"))
        sample = {
            "contender": contender.name,
            "model": self.size.name,
            "rows": cell.rows,
            "concurrency": cell.concurrency,
            **labels,
            "split": contender.setup.split,
            "token_budget": contender.setup.token_budget,
            "sequences": num_rows,
            "tokens": int(trace_lengths(num_rows).sum()),
            **answer,
        }
        self.record.add(sample)
        return sample

    def check_rewards(self, name: str, rewards: list[float]) -> None:
        """Raise BenchError if the rewards differ from those of the first contender."""
        self.rewards = self.rewards or rewards
        if any(abs(a - b) > TOLERANCE * (1 + abs(b)) for a, b in zip(rewards, self.rewards, strict=False)):
            raise BenchError(f"{name} scores {rewards}, but the first contender scores {self.rewards}")


def summarise(result: Result) -> list[Row]:
    """Return medians for every contender at every point; small models first, and within a point the fastest one."""
    rows = []
    for point, samples in grouped(select(result["samples"], purpose="sweep"), "model", "rows", "concurrency").items():
        for (name,), own in grouped(samples, "contender").items():
            rows.append(
                {
                    **dict(zip(("model", "rows", "concurrency"), point, strict=True)),
                    "contender": name,
                    "split": own[-1]["split"],
                    "rounds": len(own),
                    "sequences_per_s": median_of(s["sequences"] / s["seconds"] for s in own),
                    "tokens_per_s": median_of(s["tokens"] / s["seconds"] for s in own),
                    "ours_over_this": ratio(samples, name, OURS, "seconds"),
                    "p50_ms": median_of(s["p50_ms"] for s in own),
                    "p99_ms": median_of(s["p99_ms"] for s in own),
                    "ours_later_ms": median_of(
                        a["p50_ms"] - b["p50_ms"] for a, b in pairs(samples, OURS, name) if b["p50_ms"] is not None
                    ),
                    "cpu_ms_per_token": median_of(s["cpu_s"] * 1e3 / s["tokens"] for s in own),
                }
            )
    return sorted(rows, key=lambda r: (model_size(r["model"]), r["rows"], r["concurrency"], -r["tokens_per_s"]))


def targets(result: Result) -> list[Target]:
    """Return all targets, including those without a measurement."""
    rows = result["summary"]
    headline = {(r["model"], r["contender"]): r for r in rows if (r["rows"], r["concurrency"]) == HEADLINE}
    found = []
    for model, other, least in LEAST_RATIO:
        row = headline.get((model, other), {"ours_over_this": None, "rounds": 0})
        detail = f"median of {row['rounds']} matched rounds"
        detail += f", fewer than {MIN_ROUNDS}" if row["rounds"] < MIN_ROUNDS else ""
        found.append(Target(f"{model}: ours / {other}, times as fast", row["ours_over_this"], least, None, detail))
    through, where = _worst([row for row in rows if row["contender"].startswith("gateway")], "ours_over_this", max)
    name = "ours / through the gateway, times as fast"
    found.append(Target(name, through, None, MOST_RATIO_OVER_GATEWAY, where))
    servers = [row for row in rows if row["contender"] not in (OURS, IDEAL)]
    busy = [row for row in servers if row["concurrency"] >= NEVER_SLOWER_FROM]
    slowest, where = _worst(busy, "ours_over_this", min)
    name = f"ours / any other server from concurrency {NEVER_SLOWER_FROM} on, times as fast"
    found.append(Target(name, slowest, 1.0, None, where))
    latest, where = _worst(select(servers, concurrency=1), "ours_later_ms", max)
    found.append(Target("concurrency 1: ours - other, ms of median latency", latest, None, MOST_LATENCY_MS, where))
    return found


def _worst(rows: Sequence[Row], key: str, pick: Callable[..., Any]) -> tuple[float | None, str]:
    """Return the worst value of `key` at any point against any other server, and where it was."""
    found = [
        (row[key], f"worst at {row['model']}, {row['rows']} x {row['concurrency']} against {row['contender']}")
        for row in rows
        if row[key] is not None
    ]
    return pick(found, default=(None, ""))


def draw(result: Result, out: Path) -> None:
    """Draw tokens per second over concurrency, with a panel for each model and number of rows per request."""
    every = grouped(result["summary"], "model", "rows").items()
    panels = [(key, rows) for key, rows in every if len(grouped(rows, "concurrency")) > 1]
    if not panels:
        return
    with figure_of(out / "throughput.png", (5.2 * len(panels), 4.2)) as figure:
        for axes, ((model, num_rows), rows) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            for name, (colour, dashes, label) in LOOKS.items():
                curve = sorted((row["concurrency"], row["tokens_per_s"]) for row in select(rows, contender=name))
                width = 2.6 if name == OURS else 1.6
                if curve:
                    axes.plot(
                        *zip(*curve, strict=True), color=colour, ls=dashes, lw=width, marker="o", ms=4, label=label
                    )
            title = f"{model_title(model)}, {num_rows} row{'s' if num_rows > 1 else ''} a request"
            axes.set(title=title, xlabel="concurrency (requests in flight)", ylabel="tokens per second")
            axes.set_ylim(bottom=0)
            axes.set_xscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
