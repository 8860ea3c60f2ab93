"""Picture of the reload benchmark: latency over time with reloads marked, and p99 while training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reload.windows import Samples
from benchmarks.support.workload import model_title
from tools.report.curves import figure_of

Axes = Any  # matplotlib is imported only by functions that draw
OURS, LOCKED, INK = "#0072B2", "#D55E00", "#3C4043"
SWAP, TRITON = "#009E73", "#E69F00"
KINDS = {"quiet": ("no reload", INK), "swap": ("swaps", SWAP), "triton": ("Triton reloads", TRITON)}
SHOWN_CYCLES = 2
BLOCKS_OF_CYCLE = 4
MOST_POINTS = 20_000
LABEL_FROM = 0.06  # share of the width that a block needs for its label


def draw_parts(parts: dict[str, Any], summary: dict[str, Any], path: Path) -> None:
    """Draw a panel each for the load and the training part, if measured; write no file if neither was."""
    drawn: list[Callable[[Axes], None]] = []
    if "load" in parts:
        model = next(iter(parts["load"]))
        drawn.append(lambda axes: _draw_load(axes, model, parts["load"][model], summary["load"][model]))
    if "training" in parts:
        drawn.append(lambda axes: _draw_training(axes, parts["training"][0]["model"], summary["training"]))
    if drawn:
        with figure_of(path, (11, 4.1 * len(drawn))) as figure:
            for axes, draw in zip(figure.subplots(len(drawn), 1, squeeze=False).flat, drawn, strict=True):
                draw(axes)


def _draw_load(axes: Axes, model: str, part: dict[str, Any], summary: dict[str, Any]) -> None:
    """Draw every request of the first cycles as a dot, each swap as a line, each Triton reload as a band."""
    from matplotlib.ticker import LogLocator, NullLocator

    blocks = part["blocks"][: SHOWN_CYCLES * BLOCKS_OF_CYCLE]
    begin, end = blocks[0]["begin_s"], blocks[-1]["end_s"]
    samples = Samples.of(part["samples"])
    inside = np.flatnonzero((samples.end >= begin) & (samples.end <= end))
    inside = inside[:: max(1, inside.size // MOST_POINTS)]
    latency = samples.latency_ms[inside]
    axes.scatter(samples.end[inside] - begin, latency, s=3, lw=0, color=OURS, alpha=0.5, zorder=3, rasterized=True)
    axes.set(yscale="log", xlim=(0, end - begin), xlabel="seconds", ylabel="latency of a value request (ms)")
    for block in blocks:
        _mark_block(axes, block, begin, end)
    for reload in part["reloads"]:
        if begin <= reload["begin_s"] <= end:
            left, right = reload["begin_s"] - begin, reload["end_s"] - begin
            axes.axvline(right, color=KINDS[reload["reload"]][1], lw=1.0, zorder=2)
            if reload["reload"] == "triton":
                axes.axvspan(left, right, color=TRITON, alpha=0.14, lw=0, zorder=1)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    failed = summary["failed_by_clients"] + summary["failed_by_server"]
    axes.set_title(
        f"{model_title(model)}, {part['clients']} clients: the first of {summary['swap']['reloads']} swaps and "
        f"{summary['triton']['reloads']} Triton reloads; {failed} of {summary['requests']:,} requests failed",
        pad=22,
    )
    _legend(axes, summary)


def _mark_block(axes: Axes, block: dict[str, Any], begin: float, end: float) -> None:
    label, colour = KINDS[block["kind"]]
    left, right = block["begin_s"] - begin, block["end_s"] - begin
    if block["kind"] != "quiet":
        axes.axvspan(left, right, color=colour, alpha=0.08, lw=0, zorder=0)
    if (right - left) / (end - begin) >= LABEL_FROM:
        place = {"xy": ((left + right) / 2, 1), "xycoords": ("data", "axes fraction")}
        axes.annotate(label, **place, xytext=(0, 4), textcoords="offset points", ha="center", color=colour, fontsize=9)


def _legend(axes: Axes, summary: dict[str, Any]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    swap, triton = summary["swap"], summary["triton"]
    names = [
        "one request",
        f"swap served; p99 {_number(swap['p99_ms'])} ms, {_number(swap['quiet_p99_ms'])} without",
        f"Triton loads; p99 {_number(triton['p99_ms'])} ms, {_number(triton['quiet_p99_ms'])} without",
    ]
    handles = [
        Line2D([], [], color=OURS, marker="o", ms=4, lw=0),
        Line2D([], [], color=SWAP, lw=1.6),
        Patch(color=TRITON, alpha=0.3),
    ]
    axes.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)


def _draw_training(axes: Axes, model: str, summary: dict[str, Any]) -> None:
    """Draw the p99 for each size of the update as bars, and the duration of the update as a line."""
    sizes = list(summary["ours"])
    for i, (server, colour, label) in enumerate((("ours", OURS, "ours"), ("one lock", LOCKED, "one lock over both"))):
        values = [summary[server][size]["p99_ms"] or 0.0 for size in sizes]
        places = np.arange(len(sizes)) + (i - 0.5) * 0.36
        drawn = axes.bar(places, values, 0.34, color=colour, label=label, zorder=3)
        axes.bar_label(drawn, [_number(value) for value in values], padding=2, fontsize=9)
        for place, size in zip(places, sizes, strict=True):
            length_ms = summary[server][size]["update_s"] * 1e3
            axes.hlines(length_ms, place - 0.17, place + 0.17, color=INK, lw=1.6, zorder=4)
    axes.hlines([], 0, 0, color=INK, lw=1.6, label="duration of the update")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    title = f"While the critic trains, {model_title(model)}"
    axes.set(ylim=(low / 1.5, high * 6), ylabel="p99 of value requests (ms)", title=title)
    axes.set_xticks(range(len(sizes)), [f"update {size}" for size in sizes])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper left", ncols=3, fontsize=9, columnspacing=1.0, handlelength=1.4)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
