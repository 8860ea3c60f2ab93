"""The measurement's pictures: throughput and latency over concurrency, padding, batch sizes, growth.
Given: a result with its summary. Returns: the PNG files written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.bench.samples import HEADLINE_CONCURRENCY, HEADLINE_ROWS

Axes = Any  # matplotlib is imported late, and only where it draws
Rows = Sequence[dict[str, Any]]
LOOKS = {
    "ideal": ("#3C4043", (0, (5, 2)), "in process, no server"),
    "ours": ("#0072B2", "-", "ours"),
    "late_answers": ("#56B4E9", (0, (2, 1.5)), "ours, late answers"),
    "ragged_off": ("#009E73", "-", "ours, ragged flag off"),
    "one_forward": ("#E69F00", "-", "one forward per request"),
    "pytriton_stripped": ("#CC79A7", "-", "PyTriton, stripped"),
    "pytriton_padded": ("#D55E00", "-", "PyTriton, padded"),
}
STYLE = {
    "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#E8EAED",
    "axes.edgecolor": "#9AA0A6", "axes.axisbelow": True, "legend.frameon": False,
}  # fmt: skip


def draw_pictures(result: dict[str, Any], out: Path) -> list[Path]:
    """Every picture that the result has data for."""
    import matplotlib as mpl

    summary = result["summary"]
    panels = _panels(summary)
    scaling = [sample for sample in result["samples"] if sample["purpose"] == "scaling"]
    with mpl.rc_context(STYLE):
        drawn = [
            _grid(out / "throughput.png", panels, _draw_throughput, "tokens_per_s"),
            _grid(out / "latency.png", panels, _draw_latency, "p50_ms", note="with dots: median; thin: p99"),
            _grid(out / "batches.png", panels, _draw_batches, "mean_batch"),
            _padding(out / "padding.png", summary),
            _growth(out / "growth.png", scaling) if scaling else None,
        ]
    return [path for path in drawn if path is not None]


def _panels(summary: Rows) -> list[tuple[str, Rows]]:
    """(title, rows of the summary) for each model and request size that has more than one concurrency level."""
    found: list[tuple[str, Rows]] = []
    for model, rows in dict.fromkeys((row["model"], row["rows"]) for row in summary):
        part = [row for row in summary if (row["model"], row["rows"]) == (model, rows)]
        if len({row["concurrency"] for row in part}) > 1:
            found.append((f"{_title(model)}, {rows} row{'s' if rows > 1 else ''} a request", part))
    return found


def _grid(
    path: Path,
    panels: Sequence[tuple[str, Rows]],
    draw: Callable[[Axes, Rows], None],
    key: str,
    note: str = "",
) -> Path | None:
    """A panel for each model and request size; the legend names who has a value of `key`."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    if not panels:
        return None
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.4 * lines + 1.6 / columns), dpi=150, layout=_layout())
    every = figure.subplots(lines, columns, squeeze=False).flat
    for axes, (title, rows) in zip(every, panels, strict=False):
        draw(axes, rows)
        axes.set_title(title)
        _concurrency_axis(axes, rows)
    for axes in figure.axes[len(panels) :]:
        axes.set_visible(False)
    shown = [n for n in LOOKS if any(r["contender"] == n and r[key] is not None for _, rows in panels for r in rows)]
    handles = [Line2D([], [], color=LOOKS[n][0], ls=LOOKS[n][1], lw=2, marker="o", ms=4) for n in shown]
    figure.legend(
        handles, [LOOKS[n][2] for n in shown], loc="outside lower center", ncols=2 * columns, title=note or None
    )
    figure.savefig(path)
    return path


def _layout() -> Any:
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)


def _title(model: str) -> str:
    return f"{model.upper().replace('M', ' M')} parameters" if model[:1].isdigit() else f"{model} model"


def _concurrency_axis(axes: Axes, rows: Rows) -> None:
    levels = sorted({row["concurrency"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, [str(level) for level in levels])
    axes.minorticks_off()
    axes.set_xlabel("concurrency (requests under way)")


def _curve(rows: Rows, name: str, key: str) -> tuple[list[int], list[float]]:
    known = sorted((r["concurrency"], r[key]) for r in rows if r["contender"] == name and r[key] is not None)
    return [level for level, _ in known], [value for _, value in known]


def _plot(axes: Axes, rows: Rows, key: str, **changes: Any) -> None:
    for name, (colour, dashes, _) in LOOKS.items():
        x, y = _curve(rows, name, key)
        if x:
            look = {"color": colour, "ls": dashes, "lw": 2.6 if name == "ours" else 1.6, "marker": "o", "ms": 4}
            axes.plot(x, y, zorder=4 if name == "ours" else 3, **{**look, **changes})


def _draw_throughput(axes: Axes, rows: Rows) -> None:
    _plot(axes, rows, "tokens_per_s")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens per second")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _draw_latency(axes: Axes, rows: Rows) -> None:
    _plot(axes, rows, "p50_ms")
    _plot(axes, rows, "p99_ms", ls=":", lw=1.2, marker="")
    axes.set_yscale("log")
    axes.set_ylabel("latency (ms)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")


def _draw_batches(axes: Axes, rows: Rows) -> None:
    _plot(axes, rows, "mean_batch")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel("rows per execution")


def _padding(path: Path, summary: Rows) -> Path | None:
    """Bars: what share of the computed positions is padding."""
    from matplotlib.figure import Figure

    levels = {row["concurrency"] for row in summary}
    level = HEADLINE_CONCURRENCY if HEADLINE_CONCURRENCY in levels else max(levels, default=0)
    chosen = [row for row in summary if (row["rows"], row["concurrency"]) == (HEADLINE_ROWS, level)]
    models = list(dict.fromkeys(row["model"] for row in chosen))
    if not models:
        return None
    figure = Figure(figsize=(3.6 * len(models) + 1.8, 3.4), dpi=150, layout=_layout())
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False, sharey=True).flat, models, strict=True):
        rows = {row["contender"]: row for row in chosen if row["model"] == model}
        names = [name for name in reversed(LOOKS) if name in rows]
        shares = [100 * (rows[name]["padding_share"] or 0) for name in names]
        drawn = axes.barh([LOOKS[name][2] for name in names], shares, color=[LOOKS[name][0] for name in names])
        axes.bar_label(drawn, [f"{share:.0f} %" for share in shares], padding=3)
        axes.set_xlim(0, 100)
        axes.set_title(_title(model))
        axes.set_xlabel(f"padding, % of computed (concurrency {level})")
        axes.grid(axis="y", visible=False)
    figure.savefig(path)
    return path


def _growth(path: Path, scaling: Rows) -> Path:
    """Seconds and memory of ours over the tokens scored."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.4, 3.4), dpi=150, layout=_layout())
    left, right = figure.subplots(1, 2)
    colour = LOOKS["ours"][0]
    x = [sample["tokens"] for sample in scaling]
    left.loglog(x, [sample["seconds"] for sample in scaling], "o", color=colour, label="measured")
    largest = max(scaling, key=lambda sample: sample["tokens"])
    per_token = largest["seconds"] / largest["tokens"]
    left.loglog(sorted(x), [per_token * v for v in sorted(x)], color="#9AA0A6", lw=1.2, label="linear", zorder=1)
    left.set_ylabel("seconds")
    left.legend()
    right.semilogx(x, [sample["pss_mb"] for sample in scaling], "o", color=colour)
    right.set_ylim(0, 1.25 * max(sample["pss_mb"] for sample in scaling))
    right.set_ylabel("server's memory (PSS, MB)")
    for axes, title in ((left, "Time"), (right, "Memory")):
        axes.set_title(f"{title}, {_title(scaling[0]['model'])}")
        axes.set_xlabel("tokens scored in one run at concurrency 64")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    figure.savefig(path)
    return path
