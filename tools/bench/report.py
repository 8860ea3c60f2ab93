"""What the samples say: medians, ratios of matched rounds, bars passed or missed.
Given: a result, as in result.json. Returns: the table and the bars as text; writes both, and the pictures, to a folder.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from python_backend.durable import write_json
from tools.bench.samples import (
    HEADLINE_CONCURRENCY,
    HEADLINE_ROWS,
    Point,
    Rounds,
    Sample,
    cpu_ms_per_token,
    mean_batch,
    median_of,
    padding_share,
    throughput,
)

OURS, IDEAL, LATE = "ours", "ideal", "late_answers"
LEAST_RATIO = (
    ("7m", "pytriton_padded", 3.3),
    ("7m", "pytriton_stripped", 2.2),
    ("7m", "one_forward", 1.1),
    ("1m", "one_forward", 2.0),
    ("7m", IDEAL, 0.9),
)
MIN_ROUNDS = 3
NEVER_SLOWER_FROM = 8
LATENCY_MARGIN_MS = 2.0
MOST_P99_RATIO = 1.3
FLATNESS = 0.9
EXPONENT = (0.9, 1.1)
MOST_MEMORY_GROWTH = 1.1


@dataclass(frozen=True)
class Bar:
    """A promise, and what was measured."""

    name: str
    value: float | None
    """None: not measured."""
    low: float | None
    high: float | None
    detail: str

    @property
    def verdict(self) -> str:
        """`pass`, `miss` or `not measured`."""
        if self.value is None:
            return "not measured"
        above = self.low is None or self.value >= self.low
        return "pass" if above and (self.high is None or self.value <= self.high) else "miss"


def bars(result: dict[str, Any]) -> list[Bar]:
    """Every bar, measured or not."""
    rounds = Rounds(result["samples"])
    delay_ms = result["settings"]["queue_delay_us"] / 1000
    return [
        *(_ratio_bar(rounds, model, other, least) for model, other, least in LEAST_RATIO),
        _never_slower(rounds),
        _latency(rounds, delay_ms),
        _p99(rounds),
        _flat(rounds),
        *_growth([sample for sample in result["samples"] if sample["purpose"] == "scaling"]),
    ]


def _ratio_bar(rounds: Rounds, model: str, other: str, least: float) -> Bar:
    point = (model, HEADLINE_ROWS, HEADLINE_CONCURRENCY)
    count = len(rounds.matched(point, OURS, other, lambda a, b: 0.0))
    few = f", fewer than {MIN_ROUNDS}" if count < MIN_ROUNDS else ""
    detail = f"median of {count} matched rounds{few}"
    return Bar(f"{model}: ours / {other}, times as fast", rounds.speed_ratio(point, OURS, other), least, None, detail)


def _never_slower(rounds: Rounds) -> Bar:
    found = [
        (ratio, f"worst at {_where(point)} against {other}")
        for point in rounds.points
        if point[2] >= NEVER_SLOWER_FROM
        for other in _other_servers(rounds, point)
        if (ratio := rounds.speed_ratio(point, OURS, other)) is not None
    ]
    worst, detail = min(found, default=(None, ""))
    name = f"ours / any other server from concurrency {NEVER_SLOWER_FROM} on, times as fast"
    return Bar(name, worst, 1.0, None, detail)


def _latency(rounds: Rounds, delay_ms: float) -> Bar:
    found = [
        (excess, f"worst at {_where(point)} against {other}")
        for point in rounds.points
        if point[2] == 1
        for other in _other_servers(rounds, point)
        if (excess := median_of(rounds.matched(point, OURS, other, lambda a, b: a["p50_ms"] - b["p50_ms"]))) is not None
    ]
    worst, detail = max(found, default=(None, ""))
    return Bar("concurrency 1: ours - other, ms of median latency", worst, None, delay_ms + LATENCY_MARGIN_MS, detail)


def _p99(rounds: Rounds) -> Bar:
    point = ("7m", HEADLINE_ROWS, HEADLINE_CONCURRENCY)
    ratio = median_of(rounds.matched(point, OURS, LATE, lambda a, b: a["p99_ms"] / b["p99_ms"]))
    return Bar("7m: p99 of ours / p99 without early answers", ratio, None, MOST_P99_RATIO, _where(point))


def _flat(rounds: Rounds) -> Bar:
    found = []
    for model, rows in sorted({point[:2] for point in rounds.points}):
        curve = [rounds.median(point, OURS, throughput) for point in rounds.points if point[:2] == (model, rows)]
        known = [value for value in curve if value is not None]
        if len(known) > 2:
            found.append((flatness(known), f"worst for {model}, {rows} rows a request"))
    worst, detail = min(found, default=(None, ""))
    return Bar("ours: throughput at the last concurrency levels / the best", worst, FLATNESS, None, detail)


def flatness(curve: Sequence[float]) -> float:
    """Smallest throughput from the saturating concurrency on, over the largest.

    Saturating is the first level that comes within ten per cent of the largest.
    """
    saturating = next(i for i, value in enumerate(curve) if value >= FLATNESS * max(curve))
    return min(curve[saturating:]) / max(curve)


def _growth(samples: Sequence[Sample]) -> list[Bar]:
    totals = sorted({sample["scaling_tokens"] for sample in samples})
    by_total = [[sample for sample in samples if sample["scaling_tokens"] == total] for total in totals]
    exponent = growth = None
    if len(totals) > 1:
        tokens = [statistics.median(s["tokens"] for s in group) for group in by_total]
        exponent = power_law(tokens, [statistics.median(s["seconds"] for s in group) for group in by_total])
        first = statistics.median(s["pss_mb"] for s in by_total[0])
        growth = max(s["pss_mb"] for s in samples) / first
    what = f"{totals[0]:,} to {totals[-1]:,} tokens" if totals else ""
    return [
        Bar("ours: exponent of seconds over tokens", exponent, *EXPONENT, what),
        Bar("ours: largest memory / first", growth, None, MOST_MEMORY_GROWTH, what),
    ]


def power_law(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent e of the least-squares fit y = c x^e, in logarithms."""
    return statistics.linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope


def _other_servers(rounds: Rounds, point: Point) -> list[str]:
    return [name for name in rounds.contenders(point) if name not in (OURS, IDEAL, LATE)]


def _where(point: Point) -> str:
    model, rows, concurrency = point
    return f"{model}, {rows} row{'s' if rows > 1 else ''} a request, concurrency {concurrency}"


def summarise(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Medians of every contender at every point, and how many times as fast ours is there."""
    rounds = Rounds(result["samples"])
    return [
        {
            "model": point[0], "rows": point[1], "concurrency": point[2], "contender": name,
            "split": rounds.samples(point, name)[-1]["split"], "rounds": len(rounds.samples(point, name)),
            "sequences_per_s": rounds.median(point, name, lambda s: s["sequences"] / s["seconds"]),
            "tokens_per_s": rounds.median(point, name, throughput),
            "ours_over_this": rounds.speed_ratio(point, OURS, name),
            "p50_ms": rounds.median(point, name, lambda s: s["p50_ms"]),
            "p99_ms": rounds.median(point, name, lambda s: s["p99_ms"]),
            "padding_share": rounds.median(point, name, padding_share),
            "mean_batch": rounds.median(point, name, mean_batch),
            "cpu_ms_per_token": rounds.median(point, name, cpu_ms_per_token),
        }
        for point in rounds.points
        for name in rounds.contenders(point)
    ]  # fmt: skip


def write_report(result: dict[str, Any], out: Path) -> str:
    """Add medians and bars to `out`/result.json, write report.md and the pictures; returns the text to print."""
    from tools.bench.pictures import draw_pictures
    from tools.bench.table import bars_table, full_table, headline_table

    result["summary"] = summarise(result)
    judged = bars(result)
    result["bars"] = [{**asdict(bar), "verdict": bar.verdict} for bar in judged]
    write_json(out / "result.json", result, durable=False)
    text = f"{headline_table(result['summary'])}\n\n{bars_table(judged)}\n"
    (out / "report.md").write_text(f"{text}\n{full_table(result['summary'])}\n")
    pictures = draw_pictures(result, out)
    return f"{text}\nwritten: {', '.join(str(path) for path in (out / 'result.json', out / 'report.md', *pictures))}"
