"""How one model is measured: each contender's best split first, then matched rounds in changing order, then scaling.
Given: a `Bench` (settings, load generator, result.json), a model. Returns: samples, written after each cell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_backend.durable import write_json
from tools.bench.children import BenchChild, BenchError
from tools.bench.contenders import CONTENDERS, Instances, Running, Setup
from tools.bench.load import Job
from tools.bench.plan import Cell, Pace, Settings, cell_seconds, plan_cells
from tools.bench.snapshot import memory_mb
from tools.bench.trace import ModelSize, rows_for_tokens, trace_lengths
from tools.calibration import forward_overhead

NUM_CHECKED = 4  # rewards that every contender must agree on
TOLERANCE = 2e-3
CALIBRATION_S = 2.0
CALIBRATION_ROWS = (32, 128)  # least: two PyTriton batches, or a second instance could not show its worth
MEAN_TOKENS = float(trace_lengths(4096).mean())
SCALING_CONCURRENCY = 64


@dataclass
class Bench:
    """A measurement under way."""

    settings: Settings
    out: Path
    load: BenchChild
    result: dict[str, Any]
    start: float
    rewards: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def save(self) -> None:
        """Write result.json: a stop loses no more than the cell under way."""
        write_json(self.out / "result.json", self.result, durable=False)

    def say(self, line: str) -> None:
        """Progress, with the time since the start."""
        seconds = int(time.monotonic() - self.start)
        print(f"[{seconds // 60:3d}:{seconds % 60:02d}] {line}", flush=True)

    def measure(self, size: ModelSize, running: Running, cell: Cell, *, warmup: int, **labels: Any) -> dict[str, Any]:
        """Send the cell's requests to a contender; returns its sample, with `labels`."""
        if isinstance(running, Instances) and running.name == "ideal":
            answer = running.run_plan(cell.num_rows, NUM_CHECKED)
        else:
            job = Job(
                urls=running.urls, plain=running.plain, num_rows=cell.num_rows, rows=cell.rows,
                concurrency=cell.concurrency, width=running.width, num_warmup=warmup, num_checked=NUM_CHECKED,
                watched=dataclasses.asdict(running.watched),
            )  # fmt: skip
            answer = self.load.ask("/measure", dataclasses.asdict(job))
        self._check_rewards(size, running, answer.pop("rewards"))
        return {
            "contender": running.name, "model": size.name, "rows": cell.rows, "concurrency": cell.concurrency,
            **labels, "split": str(running.split), "token_budget": running.setup.token_budget,
            "sequences": cell.num_rows, "tokens": int(trace_lengths(cell.num_rows).sum()), **answer,
        }  # fmt: skip

    def _check_rewards(self, size: ModelSize, running: Running, rewards: list[float]) -> None:
        known = self.rewards.setdefault(size.name, rewards)
        if any(abs(a - b) > TOLERANCE * (1 + abs(b)) for a, b in zip(rewards, known, strict=False)):
            raise BenchError(f"{running.name} scores {rewards} where others score {known}")


def measure_model(bench: Bench, size: ModelSize, checkpoint: Path, *, scaling: bool) -> None:
    """All rounds of one model; its servers are stopped in any case."""
    with contextlib.ExitStack() as stack:
        paces: dict[str, Pace] = {}
        runnings: dict[str, Running] = {}
        setup = Setup(
            checkpoint=checkpoint,
            folder=bench.out / "servers" / size.name,
            token_budget=bench.settings.token_budgets[0],
            overhead_tokens=forward_overhead(checkpoint),
            queue_delay_us=bench.settings.queue_delay_us,
            tuned_allocator=bench.settings.tuned_allocator,
        )
        for name in sorted(bench.settings.contenders, key=list(CONTENDERS).index):  # `ideal` first: it picks the budget
            running, paces[name] = start_best(bench, size, name, setup)
            stack.callback(running.stop)
            runnings[name] = running
            if name == "ideal":
                setup = running.setup
        sweep(bench, size, runnings, paces)
        note_memory(bench, size, runnings.values())
        if scaling and "ours" in runnings:
            measure_scaling(bench, size, runnings["ours"])


def start_best(bench: Bench, size: ModelSize, name: str, setup: Setup) -> tuple[Running, Pace]:
    """Measure each split (for `ideal` each token budget too), keep the fastest running; returns it and its pace."""
    budgets = bench.settings.token_budgets if name == "ideal" else [setup.token_budget]
    best: tuple[Running, Pace] | None = None
    with contextlib.ExitStack() as started:
        for split in bench.settings.splits:
            running = CONTENDERS[name](name, setup, split)
            started.callback(running.stop)
            tried = [(asked, _calibrate(bench, size, asked)) for asked in map(running.with_budget, budgets)]
            best, loser = _faster(best, min(tried, key=lambda pair: pair[1].row_s))
            if loser is not None:
                loser.stop()
        started.pop_all()
    assert best is not None
    running, pace = best
    bench.say(f"{size.name} {name}: {running.split}, budget {running.setup.token_budget}, {1 / pace.row_s:.1f} rows/s")
    return best


def _faster(
    best: tuple[Running, Pace] | None, new: tuple[Running, Pace]
) -> tuple[tuple[Running, Pace], Running | None]:
    """The faster pair, and the other one's contender."""
    if best is None:
        return new, None
    return (new, best[0]) if new[1].row_s < best[1].row_s else (best, new[0])


def _calibrate(bench: Bench, size: ModelSize, running: Running) -> Pace:
    """Eight rows one after the other tell how many fill two seconds; so many are sent together."""
    serial = bench.measure(size, running, Cell(1, 1, 8), warmup=2, purpose="serial", repeat=0)
    least, most = CALIBRATION_ROWS
    rows = max(least, min(most, round(8 / serial["seconds"] * CALIBRATION_S)))
    sample = bench.measure(size, running, Cell(1, min(64, rows), rows), warmup=2, purpose="split", repeat=0)
    bench.result["samples"] += [serial, sample]
    bench.save()
    # By tokens: another split may have been given another number of rows.
    row_s, serial_row_s = (MEAN_TOKENS * s["seconds"] / s["tokens"] for s in (sample, serial))
    return Pace(row_s, serial_row_s)


def sweep(bench: Bench, size: ModelSize, runnings: Mapping[str, Running], paces: Mapping[str, Pace]) -> None:
    """Matched rounds: in each cell of each repeat all contenders in turn, a different one first each time."""
    cells = plan_cells(bench.settings, size, paces)
    repeats = min(bench.settings.repeats, size.max_repeats)
    left_s = repeats * sum(cell_seconds(cell, paces) for cell in cells)
    order = [name for name in CONTENDERS if name in runnings]
    for repeat in range(1, repeats + 1):
        for cell in cells:
            order = [*order[1:], order[0]]
            round_ = [_in_round(bench, size, runnings[name], cell, repeat) for name in order]
            bench.result["samples"] += round_
            bench.save()
            left_s -= cell_seconds(cell, paces)
            bench.say(_round_line(size, cell, f"{repeat}/{repeats}", round_, left_s))


def _in_round(bench: Bench, size: ModelSize, running: Running, cell: Cell, repeat: int) -> dict[str, Any]:
    warmup = min(cell.concurrency, max(1, 16 // cell.rows))
    return bench.measure(size, running, cell, warmup=warmup, purpose="sweep", repeat=repeat)


def _round_line(size: ModelSize, cell: Cell, repeat: str, samples: Sequence[Mapping[str, Any]], left_s: float) -> str:
    rates = ", ".join(f"{s['contender']} {s['sequences'] / s['seconds']:.0f}" for s in samples)
    what = f"{size.name} {cell.num_requests} requests of {cell.rows}, concurrency {cell.concurrency}, round {repeat}"
    return f"{what}: {rates} rows/s; about {max(0.0, left_s) / 60:.0f} min left for this model"


def measure_scaling(bench: Bench, size: ModelSize, running: Running) -> None:
    """Seconds and memory of ours as the work grows; small sizes are repeated, since they are over at once."""
    totals = bench.settings.scaling_tokens
    for total in totals:
        num_rows = rows_for_tokens(total)
        cell = Cell(1, SCALING_CONCURRENCY, num_rows)
        for repeat in range(1, (3 if total < max(totals) else 1) + 1):
            sample = bench.measure(size, running, cell, warmup=16, purpose="scaling", repeat=repeat)
            sample["scaling_tokens"] = total
            bench.result["samples"].append({**sample, **memory_mb(running.pids)})
            bench.save()
        bench.say(f"{size.name} scaling: {total} tokens in {sample['seconds']:.2f} s")


def note_memory(bench: Bench, size: ModelSize, runnings: Iterable[Running]) -> None:
    """Memory of every contender's processes, into the result."""
    for running in runnings:
        row = {"contender": running.name, "model": size.name, "split": str(running.split)}
        bench.result["memory"].append({**row, **memory_mb(running.pids)})
    bench.save()
