"""Benchmark of scoring: the project's server against the servers that users have today, on the same cores.

Every round measures all contenders in turn with the same requests. Each contender divides the cores among instances
and threads in the way that is fastest for it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import shutil
from collections import deque
from pathlib import Path
from typing import Any

from benchmarks.scoring.cells import Cell, Pace, plan_cells
from benchmarks.scoring.contenders import CONTENDERS, Contender, Setup, Split, run_plan
from benchmarks.scoring.report import draw, summarise, targets
from benchmarks.support.benchmark import BenchError, Option, Record
from benchmarks.support.children import BenchChild, running_child
from benchmarks.support.usage import memory_mb
from benchmarks.support.workload import SIZES, ModelSize, make_checkpoint, rows_for_tokens, trace_lengths
from tools.calibrate.calibration import forward_overhead

__all__ = ["OPTIONS", "draw", "measure", "summarise", "targets"]
CORES = len(os.sched_getaffinity(0))
OPTIONS = {
    "models": Option(["1m", "7m", "110m"], f"any of {', '.join(SIZES)}", quick=["tiny"], known=SIZES),
    "rows": Option([1, 8], "rows per request"),
    "concurrency": Option([1, 2, 4, 8, 16, 32, 64, 128, 256], "requests in flight", quick=[1, 8]),
    "repeats": Option(3, "rounds; each measures every contender (110m: one round)", quick=1),
    "seconds": Option(1.0, "seconds that the fastest contender spends in one cell", quick=0.2),
    "contenders": Option(list(CONTENDERS), f"any of {', '.join(CONTENDERS)}", known=CONTENDERS),
    "splits": Option([f"1x{CORES}", f"{CORES}x1"], "instances x threads that each contender may choose", quick=["2x1"]),
    "token_budget": Option([256, 512, 1024], "token budgets to try with `ideal`; ours uses the fastest", quick=[256]),
    "scaling_tokens": Option(
        [1000, 10_000, 100_000, 1_000_000], "tokens of the runs that measure growth", quick=[1000, 10_000]
    ),
}
NUM_CHECKED = 4  # rewards that every contender must agree on
TOLERANCE = 2e-3
CALIBRATION_S = 2.0
CALIBRATION_ROWS = (32, 128)  # at least two PyTriton batches, so that a second instance has work
MEAN_TOKENS = float(trace_lengths(4096).mean())
SCALING_CONCURRENCY = 64


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Measure the sweep with every model, and the growth of time and memory with the first model."""
    servers = record.out / "servers"
    shutil.rmtree(servers, ignore_errors=True)
    with running_child("load generator", "scoring.processes:serve_load", {}, servers / "load.log") as load:
        for name in settings.models:
            checkpoint = servers / f"{name}-checkpoint"
            parameters = make_checkpoint(SIZES[name], checkpoint)
            record.say(f"{name}: {parameters / 1e6:.2f} M parameters; starting the contenders one by one")
            ModelBench(settings, record, load, SIZES[name]).run(checkpoint, scaling=name == settings.models[0])
            shutil.rmtree(checkpoint)  # the largest has half a gigabyte


@dataclasses.dataclass
class ModelBench:
    """The measurement of one model."""

    settings: argparse.Namespace
    record: Record
    load: BenchChild
    size: ModelSize
    rewards: list[float] = dataclasses.field(default_factory=list)
    """First rewards of the first contender, which all other contenders must match."""

    def run(self, checkpoint: Path, *, scaling: bool) -> None:
        """Start every contender with its best split, measure all of them, and stop them."""
        setup = Setup(
            checkpoint=checkpoint,
            folder=checkpoint.parent / self.size.name,
            token_budget=self.settings.token_budget[0],
            overhead_tokens=forward_overhead(checkpoint),
        )
        paces: dict[str, Pace] = {}
        started: dict[str, Contender] = {}
        with contextlib.ExitStack() as stack:
            for name in (name for name in CONTENDERS if name in self.settings.contenders):
                started[name], paces[name] = self.start_best(name, setup)
                stack.callback(started[name].stop)
                if name == "ideal":  # starts first and determines the token budget of the others
                    setup = started[name].setup
            self.sweep(started, paces)
            if scaling and "ours" in started:
                self.measure_scaling(started["ours"])

    def start_best(self, name: str, setup: Setup) -> tuple[Contender, Pace]:
        """Calibrate each split (and each token budget of `ideal`); keep the fastest running, return it and its pace."""
        budgets = self.settings.token_budget if name == "ideal" else [setup.token_budget]
        best: tuple[Contender, Pace] | None = None
        with contextlib.ExitStack() as started:
            for split in map(Split.of, dict.fromkeys(self.settings.splits)):
                contender = CONTENDERS[name](name, setup, split)
                started.callback(contender.stop)
                tried = [(asked, self._calibrate(asked)) for asked in map(contender.with_budget, budgets)]
                candidates = [*([best] if best else []), min(tried, key=lambda pair: pair[1].row_s)]
                best, *losers = sorted(candidates, key=lambda pair: pair[1].row_s)
                for loser, _ in losers:
                    loser.stop()
            started.pop_all()
        assert best is not None
        self.record.say(
            f"{self.size.name} {name}: {best[0].split}, budget {best[0].setup.token_budget}, "
            f"{1 / best[1].row_s:.1f} rows/s"
        )
        return best

    def _calibrate(self, contender: Contender) -> Pace:
        """Return the pace: time eight rows sent one by one, then as many concurrent rows as may take two seconds."""
        serial = self.send(contender, Cell(1, 1, 8), warmup=2, purpose="serial", round=0)
        least, most = CALIBRATION_ROWS
        rows = max(least, min(most, round(8 / serial["seconds"] * CALIBRATION_S)))
        sample = self.send(contender, Cell(1, min(64, rows), rows), warmup=2, purpose="split", round=0)
        # Normalised by tokens: splits may be calibrated with different numbers of rows.
        row_s, serial_row_s = (MEAN_TOKENS * s["seconds"] / s["tokens"] for s in (sample, serial))
        return Pace(row_s, serial_row_s)

    def sweep(self, started: dict[str, Contender], paces: dict[str, Pace]) -> None:
        """Measure all contenders in turn in each cell of each round, each time starting with a different contender."""
        cells = plan_cells(self.settings, self.size, paces)
        repeats = min(self.settings.repeats, self.size.max_repeats)
        names = deque(started)
        for number, cell in itertools.product(range(repeats), cells):
            names.rotate(-1)
            warmup = min(cell.concurrency, max(1, 16 // cell.rows))
            round_ = [self.send(started[n], cell, warmup=warmup, purpose="sweep", round=number) for n in names]
            rates = ", ".join(f"{s['contender']} {s['sequences'] / s['seconds']:.0f}" for s in round_)
            what = f"{cell.num_requests} requests of {cell.rows}, concurrency {cell.concurrency}"
            self.record.say(f"{self.size.name} {what}, round {number + 1}/{repeats}: {rates} rows/s")

    def measure_scaling(self, contender: Contender) -> None:
        """Measure seconds and memory as the number of tokens grows; all sizes but the largest are repeated."""
        totals = self.settings.scaling_tokens
        for total in totals:
            cell = Cell(1, SCALING_CONCURRENCY, rows_for_tokens(total))
            for number in range(3 if total < max(totals) else 1):
                labels = {"purpose": "scaling", "round": number, "scaling_tokens": total}
                sample = self.send(contender, cell, warmup=16, has_memory=True, **labels)
            self.record.say(f"{self.size.name} scaling: {total} tokens in {sample['seconds']:.2f} s")

    def send(
        self, contender: Contender, cell: Cell, *, warmup: int, has_memory: bool = False, **labels: Any
    ) -> dict[str, Any]:
        """Send the cell's requests to a contender; record and return the sample, with its memory if asked for."""
        if contender.name == "ideal":
            answer = run_plan(contender, cell.num_rows, NUM_CHECKED)
        else:
            answer = self.load.ask(
                "/measure",
                {
                    "urls": contender.urls,
                    "plain": bool(contender.children),
                    "width": contender.width,
                    "pids": contender.pids,
                    "counters": str(contender.counters),
                    "num_rows": cell.num_rows,
                    "rows": cell.rows,
                    "concurrency": cell.concurrency,
                    "num_warmup": warmup,
                    "num_checked": NUM_CHECKED,
                },
            )
        self.check_rewards(contender.name, answer.pop("rewards"))
        sample = {
            "contender": contender.name,
            "model": self.size.name,
            "rows": cell.rows,
            "concurrency": cell.concurrency,
            **labels,
            "split": str(contender.split),
            "token_budget": contender.setup.token_budget,
            "sequences": cell.num_rows,
            "tokens": int(trace_lengths(cell.num_rows).sum()),
            **answer,
        }
        if has_memory:
            sample["pss_mb"] = memory_mb(contender.pids)
        self.record.add(sample)
        return sample

    def check_rewards(self, name: str, rewards: list[float]) -> None:
        """Raise BenchError if the rewards differ from those of the first contender."""
        self.rewards = self.rewards or rewards
        if any(abs(a - b) > TOLERANCE * (1 + abs(b)) for a, b in zip(rewards, self.rewards, strict=False)):
            raise BenchError(f"{name} scores {rewards}, but the first contender scores {self.rewards}")
