"""Summary, targets and picture of the scoring benchmark."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scoring.cells import HEADLINE_CONCURRENCY, HEADLINE_ROWS
from benchmarks.support.benchmark import Result, Target
from benchmarks.support.samples import Sample, grouped, median_of, pairs, ratio, select
from benchmarks.support.workload import model_size, model_title
from tools.report.curves import figure_of

OURS, IDEAL = "ours", "ideal"
LEAST_RATIO = (
    ("7m", "pytriton_padded", 3.3),
    ("7m", "pytriton_stripped", 2.2),
    ("7m", "one_forward", 1.1),
    ("1m", "one_forward", 2.0),
    ("7m", IDEAL, 0.9),
)
MIN_ROUNDS = 3
NEVER_SLOWER_FROM = 8
MOST_LATENCY_MS = 4.0  # our latency minus another server's: the queue delay of 2 ms, plus 2 ms
FLATNESS = 0.9
EXPONENT = (0.9, 1.1)
MOST_MEMORY_GROWTH = 1.1
LOOKS: dict[str, tuple[str, Any, str]] = {
    "ideal": ("#3C4043", (0, (5, 2)), "in process, no server"),
    "ours": ("#0072B2", "-", "ours"),
    "one_forward": ("#E69F00", "-", "one forward per request"),
    "pytriton_stripped": ("#CC79A7", "-", "PyTriton, stripped"),
    "pytriton_padded": ("#D55E00", "-", "PyTriton, padded"),
}
Point = tuple[str, int, int]  # model, rows per request, concurrency


def points_of(samples: Iterable[Sample]) -> dict[Point, list[Sample]]:
    """Group the sweep's samples by point, with small models first."""
    found = grouped(select(samples, purpose="sweep"), "model", "rows", "concurrency")
    return dict(sorted(found.items(), key=lambda item: (model_size(item[0][0]), *item[0][1:])))


def throughput(sample: Sample) -> float:
    """Return the tokens of the trace scored per second; padding does not count."""
    return float(sample["tokens"] / sample["seconds"])


def padding_share(sample: Sample) -> float | None:
    """Return the share of the computed positions that were padding."""
    return 1 - sample["forward_tokens"] / sample["computed_tokens"] if sample.get("computed_tokens") else None


def cpu_ms_per_token(sample: Sample) -> float:
    """Return milliseconds of CPU, server and client together, per token of the trace."""
    return float((sample["server_cpu_s"] + sample["client_cpu_s"]) * 1e3 / sample["tokens"])


def summarise(result: Result) -> list[dict[str, Any]]:
    """Return medians for every contender at every point; within a point, the fastest contender comes first."""
    rows = [
        {
            "model": point[0],
            "rows": point[1],
            "concurrency": point[2],
            "contender": name,
            "split": own[-1]["split"],
            "rounds": len(own),
            "sequences_per_s": median_of(s["sequences"] / s["seconds"] for s in own),
            "tokens_per_s": statistics.median(map(throughput, own)),
            "ours_over_this": ratio(samples, name, OURS, "seconds"),
            "p50_ms": median_of(s["p50_ms"] for s in own),
            "p99_ms": median_of(s["p99_ms"] for s in own),
            "padding_share": median_of(map(padding_share, own)),
            "cpu_ms_per_token": median_of(map(cpu_ms_per_token, own)),
        }
        for point, samples in points_of(result["samples"]).items()
        for (name,), own in grouped(samples, "contender").items()
    ]
    return sorted(rows, key=lambda r: (model_size(r["model"]), r["rows"], r["concurrency"], -r["tokens_per_s"]))


def targets(result: Result) -> list[Target]:
    """Return all targets, including those without a measurement."""
    points = points_of(result["samples"])
    return [
        *(_least_ratio(points, model, other, least) for model, other, least in LEAST_RATIO),
        _never_slower(points),
        _latency(points, MOST_LATENCY_MS),
        _flat(points),
        *_growth(select(result["samples"], purpose="scaling")),
    ]


def _least_ratio(points: dict[Point, list[Sample]], model: str, other: str, least: float) -> Target:
    samples = points.get((model, HEADLINE_ROWS, HEADLINE_CONCURRENCY), [])
    count = len(pairs(samples, OURS, other))
    detail = f"median of {count} matched rounds" + (f", fewer than {MIN_ROUNDS}" if count < MIN_ROUNDS else "")
    return Target(
        f"{model}: ours / {other}, times as fast", ratio(samples, other, OURS, "seconds"), least, None, detail
    )


def _never_slower(points: dict[Point, list[Sample]]) -> Target:
    busy = {point: samples for point, samples in points.items() if point[2] >= NEVER_SLOWER_FROM}
    worst, detail = _worst(busy, lambda samples, other: ratio(samples, other, OURS, "seconds"), min)
    name = f"ours / any other server from concurrency {NEVER_SLOWER_FROM} on, times as fast"
    return Target(name, worst, 1.0, None, detail)


def _latency(points: dict[Point, list[Sample]], most_ms: float) -> Target:
    def excess(samples: list[Sample], other: str) -> float | None:
        return median_of(a["p50_ms"] - b["p50_ms"] for a, b in pairs(samples, OURS, other))

    worst, detail = _worst({point: samples for point, samples in points.items() if point[2] == 1}, excess, max)
    return Target("concurrency 1: ours - other, ms of median latency", worst, None, most_ms, detail)


def _worst(
    points: dict[Point, list[Sample]], value: Callable[[list[Sample], str], float | None], pick: Callable[..., Any]
) -> tuple[float | None, str]:
    """Return our worst value against any other server at any point, and a description of that point and server."""
    found = [
        (number, f"worst at {_where(point)} against {other}")
        for point, samples in points.items()
        for (other,) in grouped(samples, "contender")
        if other not in (OURS, IDEAL) and (number := value(samples, other)) is not None
    ]
    return pick(found, default=(None, ""))


def _flat(points: dict[Point, list[Sample]]) -> Target:
    curves: dict[tuple[str, int], list[float]] = {}
    for (model, rows, _), samples in points.items():
        own = select(samples, contender=OURS)
        if own:
            curves.setdefault((model, rows), []).append(statistics.median(map(throughput, own)))
    found = [
        (flatness(curve), f"worst for {model}, {rows} rows a request")
        for (model, rows), curve in curves.items()
        if len(curve) > 2
    ]
    worst, detail = min(found, default=(None, ""))
    return Target("ours: lowest throughput at or above saturation / highest throughput", worst, FLATNESS, None, detail)


def flatness(curve: Sequence[float]) -> float:
    """Return the smallest throughput at or above the saturating concurrency, divided by the largest throughput.

    The saturating concurrency is the first level within ten per cent of the largest throughput.
    """
    saturating = next(i for i, value in enumerate(curve) if value >= FLATNESS * max(curve))
    return min(curve[saturating:]) / max(curve)


def _growth(samples: Sequence[Sample]) -> list[Target]:
    by_total = [own for _, own in sorted(grouped(samples, "scaling_tokens").items())]
    exponent = growth = None
    if len(by_total) > 1:
        tokens = [statistics.median(s["tokens"] for s in own) for own in by_total]
        exponent = power_law(tokens, [statistics.median(s["seconds"] for s in own) for own in by_total])
        first = statistics.median(s["pss_mb"] for s in by_total[0])
        growth = max(s["pss_mb"] for s in samples) / first
    what = f"{by_total[0][0]['scaling_tokens']:,} to {by_total[-1][0]['scaling_tokens']:,} tokens" if by_total else ""
    return [
        Target("ours: exponent of the growth of seconds with tokens", exponent, *EXPONENT, what),
        Target("ours: largest memory / memory of the smallest run", growth, None, MOST_MEMORY_GROWTH, what),
    ]


def power_law(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the exponent e of the least-squares fit y = c x^e, in logarithms."""
    return statistics.linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope


def _where(point: Point) -> str:
    model, rows, concurrency = point
    return f"{model}, {rows} row{'s' if rows > 1 else ''} a request, concurrency {concurrency}"


def draw(result: Result, out: Path) -> None:
    """Draw tokens per second over concurrency, with a panel for each model and number of rows per request."""
    from matplotlib.lines import Line2D

    panels = [
        (key, rows)
        for key, rows in grouped(result["summary"], "model", "rows").items()
        if len(grouped(rows, "concurrency")) > 1
    ]
    if not panels:
        return
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    with figure_of(out / "throughput.png", (5.2 * columns, 3.4 * lines + 1.6 / columns)) as figure:
        every = figure.subplots(lines, columns, squeeze=False).flat
        for axes, ((model, num_rows), rows) in zip(every, panels, strict=False):
            _draw_throughput(axes, rows)
            axes.set_title(f"{model_title(model)}, {num_rows} row{'s' if num_rows > 1 else ''} a request")
        for axes in figure.axes[len(panels) :]:
            axes.set_visible(False)
        shown = [name for name in LOOKS if any(row["contender"] == name for _, rows in panels for row in rows)]
        handles = [Line2D([], [], color=LOOKS[n][0], ls=LOOKS[n][1], lw=2, marker="o", ms=4) for n in shown]
        figure.legend(handles, [LOOKS[n][2] for n in shown], loc="outside lower center", ncols=2 * columns)


def _draw_throughput(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    for name, (colour, dashes, _) in LOOKS.items():
        curve = sorted((row["concurrency"], row["tokens_per_s"]) for row in rows if row["contender"] == name)
        width, order = (2.6, 4) if name == OURS else (1.6, 3)
        x, y = [level for level, _ in curve], [rate for _, rate in curve]
        axes.plot(x, y, color=colour, ls=dashes, lw=width, marker="o", ms=4, zorder=order)
    axes.set(xlabel="concurrency (requests in flight)", ylabel="tokens per second")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    levels = sorted({row["concurrency"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, [str(level) for level in levels])
    axes.minorticks_off()
