"""The measurement's tables, as Markdown that a terminal shows too.
Given: medians, bars. Returns: texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.bench.report import OURS, Bar
from tools.bench.samples import HEADLINE_CONCURRENCY, HEADLINE_ROWS, model_size

COLUMNS = (
    ("split", "split", "{}"),
    ("sequences/s", "sequences_per_s", "{:,.1f}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("ours is x as fast", "ours_over_this", "{:.2f}"),
    ("p50 ms", "p50_ms", "{:,.0f}"),
    ("p99 ms", "p99_ms", "{:,.0f}"),
    ("padding", "padding_share", "{:.0%}"),
    ("rows a batch", "mean_batch", "{:.1f}"),
    ("CPU ms/token", "cpu_ms_per_token", "{:.3f}"),
)


def headline_table(summary: Sequence[dict[str, Any]]) -> str:
    """One-row requests at the headline concurrency, or the highest that was measured."""
    chosen = []
    for model in dict.fromkeys(row["model"] for row in summary):
        rows = [row for row in summary if row["model"] == model and row["rows"] == HEADLINE_ROWS]
        levels = [row["concurrency"] for row in rows]
        level = HEADLINE_CONCURRENCY if HEADLINE_CONCURRENCY in levels else max(levels, default=0)
        chosen += [row for row in rows if row["concurrency"] == level]
    return full_table(chosen)


def full_table(summary: Sequence[dict[str, Any]]) -> str:
    """A line per contender and point, the fastest of a point first."""
    header = ["model", "rows", "concurrency", "contender", *(title for title, _, _ in COLUMNS)]
    ordered = sorted(summary, key=lambda r: (model_size(r["model"]), r["rows"], r["concurrency"], -r["tokens_per_s"]))
    lines = [
        [row["model"], str(row["rows"]), str(row["concurrency"]), _name(row["contender"])]
        + ["–" if row[key] is None else form.format(row[key]) for _, key, form in COLUMNS]
        for row in ordered
    ]
    return _markdown(header, lines, left=4)


def bars_table(bars: Sequence[Bar]) -> str:
    """A line per bar."""
    lines = [
        [bar.verdict, bar.name, "–" if bar.value is None else f"{bar.value:.2f}", _limits(bar), bar.detail]
        for bar in bars
    ]
    return _markdown(["", "bar", "measured", "must be", "where"], lines, left=2)


def _name(contender: str) -> str:
    return f"**{contender}**" if contender == OURS else contender


def _limits(bar: Bar) -> str:
    if bar.low is not None and bar.high is not None:
        return f"{bar.low:g} to {bar.high:g}"
    return f">= {bar.low:g}" if bar.low is not None else f"<= {bar.high:g}"


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]], *, left: int) -> str:
    """Columns padded to their widest entry; the first `left` ones flush left."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * width if i < left else "-" * (width - 1) + ":") for i, width in enumerate(widths)]
    return "\n".join([line(header), f"| {' | '.join(rule)} |", *(line(cells) for cells in lines)])
