"""Draws the report's pictures: all of them as SVG for the page, and the four most informative ones as a PNG."""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tools.report.data import PHASES, SHOWN_S, RunRecord, formatted, load_run, number, phase_seconds, series

Axes = Any  # matplotlib is imported only by the functions that draw
Draw = Callable[[Axes, RunRecord], None]
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#8A8F98",
)
PHASE_COLOURS = dict(zip(PHASES.values(), (BLUE, SKY, GREEN, PURPLE, RED, ORANGE, "#C9CDD3"), strict=True))
DISTINCT, ENDED = "train_rollouts/distinct2", "train_rollouts/fraction_of_samples_properly_ended"
RELOADS = (("swap", BLUE, "o", 14), ("triton", RED, "D", 46))
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E8EAED",
    "axes.edgecolor": "#9AA0A6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "path",
    "svg.hashsalt": "report",
}


def panels(run: RunRecord) -> list[tuple[str, str]]:
    """Return (caption, SVG text) for every picture that this run has data for."""
    return [(CAPTIONS[draw], svg(draw, run)) for draw in drawn(run)]


def drawn(run: RunRecord) -> list[Draw]:
    """Return the pictures that this run has data for, in the report's order."""
    levels = "ev_v0" in run.summary
    recorded: dict[Draw, bool] = {
        draw_reward: _has(run.steps, "train_rollouts/rewards"),
        draw_gold: run.gold,
        draw_kl: _has(run.steps, "train_rollouts/init_policy_kl_per_sequence", least=2),
        draw_explained_variance: _has(run.steps, "train_rollouts/explained_variance", least=1 if levels else 2),
        draw_step_time: _has(run.steps, "timers/step_time", least=2),
        draw_versions: bool(run.critic),
        draw_reload_ms: _has(run.critic, "reload_ms"),
        draw_distinct: _has(run.steps, DISTINCT, least=2),
        draw_ended: _has(run.steps, ENDED, least=2),
    }
    return [draw for draw, is_there in recorded.items() if is_there]


@contextlib.contextmanager
def figure_of(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Yield a styled figure of `size` inches; save it to `path` at the end of the block, with 150 pixels an inch."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
        yield figure
        figure.savefig(path, metadata={"Software": None})


def write_curves(run_dir: Path, out_png: Path) -> None:
    """Write one PNG with the four most informative pictures that this run has data for."""
    run = load_run(run_dir)
    distance = draw_gold if run.gold else draw_kl
    ranked = (draw_reward, distance, draw_explained_variance, draw_versions, draw_step_time, draw_distinct)
    chosen = [draw for draw in ranked if draw in drawn(run)][:4]
    with figure_of(out_png, (10, 6.8)) as figure:
        for axes, draw in zip_longest(figure.subplots(2, 2).flat, chosen):
            if draw is None:
                axes.remove()
            else:
                draw(axes, run)


def draw_reward(axes: Axes, run: RunRecord) -> None:
    x, y = series(run.steps, "train_rollouts/rewards")
    window = max(1, len(y) // 10)
    axes.plot(x, y, color=BLUE, alpha=0.35 if window > 1 else 1.0, lw=1, label="per step", **markers(x))
    if window > 1:
        axes.plot(x, smoothed(y), color=BLUE, lw=2.2, label=f"mean of {window} steps" + _thinned(x))
    with_kl = series(run.steps, "train_rollouts/rewards_with_kl")
    if with_kl[0] and with_kl != (x, y):
        axes.plot(*with_kl, color=GREY, lw=1.2, ls="--", label="minus KL penalty")
    held_out = series(run.validations, "reward")
    if held_out[0]:
        axes.plot(*held_out, color=ORANGE, lw=1.2, marker="D", ms=5, label="held-out prompts")
    _mark_versions(axes, run)
    _mark_changes(axes, run)
    kl = run.summary.get("kl_final")
    finish(axes, "Reward" + (f", at {formatted(kl, '.1f')} nats of KL" if kl is not None else ""), "step")


def _mark_versions(axes: Axes, run: RunRecord) -> None:
    """Mark each step that is the first one scored by another version of a live reward model."""
    x, y = series(run.steps, "train_rollouts/reward_version")
    changes = [(step, version) for step, version, before in zip(x[1:], y[1:], y, strict=False) if version != before]
    for i, (step, version) in enumerate(changes):
        label = "new version of the reward model" if i == 0 else None
        axes.axvline(step, color=RED, lw=1.2, ls=(0, (2, 2)), label=label)
        axes.annotate(
            f"v{version:.0f}",
            (step, 1),
            (3, -10),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            color=RED,
            fontsize=9,
        )


def _mark_changes(axes: Axes, run: RunRecord) -> None:
    """Mark each step after which the run resumed with other settings."""
    for i, change in enumerate(run.changes):
        label = "resumed with other settings" if i == 0 else None
        axes.axvline(change["step"] + 0.5, color=GREY, lw=1.2, ls=(0, (1, 1)), label=label)


def draw_gold(axes: Axes, run: RunRecord) -> None:
    """Draw each gain with its interval, and a line at zero; the title has the scores before and after."""
    rows = run.gains[::-1]
    for y, gain in enumerate(rows):
        colour = BLUE if gain.low > 0 else RED if gain.high < 0 else GREY
        error = [[gain.mean - gain.low], [gain.high - gain.mean]]
        axes.errorbar([gain.mean], [y], xerr=error, fmt="o", color=colour, ms=8, lw=2.5, capsize=6)
        text = f"{gain.mean:+.3f}  [{gain.low:.3f}, {gain.high:.3f}]"
        over_the_line = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.annotate(
            text, (gain.mean, y), (0, 12), textcoords="offset points", ha="center", color=colour, bbox=over_the_line
        )
    axes.axvline(0, color="#3C4043", lw=1)
    axes.set_yticks(range(len(rows)), [gain.label for gain in rows])
    axes.set_ylim(-0.6, len(rows) - 0.3)
    axes.margins(x=0.3)
    axes.grid(axis="y", visible=False)
    levels = f"{run.summary['gold_before']:.3f} → {run.summary['gold_after']:.3f}"
    axes.set_title(f"Gold score {levels}")
    axes.set_xlabel(f"gain per text, 95 % interval, {len(run.pairs)} held-out prompts")


def draw_kl(axes: Axes, run: RunRecord) -> None:
    y = _plot(axes, run, "train_rollouts/init_policy_kl_per_sequence", color=PURPLE, lw=1.8, label="training batch")
    _level(axes, run.summary.get("kl_final"), PURPLE, "held-out, at the end")
    axes.set_ylim(bottom=min(0.0, *y))
    finish(axes, "KL to the initial policy (nats per sequence)", "step")


def draw_explained_variance(axes: Axes, run: RunRecord) -> None:
    lowest = min(series(run.steps, "train_rollouts/explained_variance")[1], default=0.0)
    label = "training batch, served version" + (f", lowest {formatted(lowest, ',.0f')}" if lowest < -1 else "")
    style = {"color": GREEN, "lw": 1.4, "alpha": 0.8, "label": label}
    y = _plot(axes, run, "train_rollouts/explained_variance", **style)
    _level(axes, run.summary.get("ev_v0"), RED, "version 0, held-out")
    _level(axes, run.summary.get("ev_last"), BLUE, f"version {run.summary.get('weights_version')}, held-out")
    finite = [v for v in (*y, run.summary.get("ev_v0"), run.summary.get("ev_last")) if v is not None]
    # A fresh critic can be arbitrarily bad; below -1 the curve would flatten everything else.
    axes.set_ylim(max(-1.0, min((0.0, *finite)) - 0.08), 1.0)
    finish(axes, "Critic: explained variance of the returns", "step")


def draw_step_time(axes: Axes, run: RunRecord) -> None:
    rows = [row for row in run.steps if number(row.get("timers/step_time")) is not None]
    phases = [phase_seconds(row) for row in rows]
    x = [row["step"] for row in rows]
    layers = {name: [phase[name] for phase in phases] for name in PHASE_COLOURS}
    layers = {name: layer for name, layer in layers.items() if max(layer) >= SHOWN_S}
    axes.stackplot(x, layers.values(), labels=list(layers), colors=[PHASE_COLOURS[name] for name in layers], lw=0)
    totals = sorted(row["timers/step_time"] for row in rows)
    axes.set_ylim(0, 1.75 * totals[int(0.95 * (len(totals) - 1))])
    finish(axes, "Seconds per step, by phase", "step", columns=2)


def draw_versions(axes: Axes, run: RunRecord) -> None:
    start = _start(run)
    served = [(*_reload_point(row, start), row["weights_version"]) for row in run.critic]
    axes.step([s[0] for s in served], [s[2] for s in served], where="post", color=BLUE, lw=1.4)
    for kind, colour, marker, size in RELOADS:
        points = [(s[0], s[2]) for s, row in zip(served, run.critic, strict=True) if row.get("reload") == kind]
        if points:
            count = run.summary[f"reloads_{kind}"]
            label = f"{count} {kind} reload{'s' if count > 1 else ''}{_median(run, kind, ', ')}"
            axes.scatter(*zip(*points, strict=True), s=size, color=colour, marker=marker, label=label, zorder=3)
    x, y = series(run.steps, "train_rollouts/weights_version")
    minutes = {row["step"]: (row["time"] - start) / 60 for row in run.steps}
    axes.plot(
        [minutes[step] for step in x],
        y,
        color=GREY,
        lw=1.2,
        ls=":",
        drawstyle="steps-post",
        label="version that scored the step",
    )
    axes.yaxis.get_major_locator().set_params(integer=True)
    finish(axes, "Served version of the critic weights", "minutes since the first step")


def draw_reload_ms(axes: Axes, run: RunRecord) -> None:
    start = _start(run)
    slowest = []
    for kind, colour, marker, size in RELOADS:
        points = [_reload_point(row, start) for row in run.critic if row.get("reload") == kind]
        known = [(minute, ms) for minute, ms in points if ms is not None and ms > 0]
        if known:
            label = kind + _median(run, kind, ": ")
            axes.scatter(*zip(*known, strict=True), s=size, color=colour, marker=marker, label=label)
            slowest.append(max(ms for _, ms in known))
    axes.set_yscale("log")
    axes.set_ylim(top=6 * max(slowest))
    finish(axes, "Milliseconds per reload", "minutes since the first step")


def draw_distinct(axes: Axes, run: RunRecord) -> None:
    """Draw the share of distinct bigrams, scaled to its maximum, which is a few per cent for long or many responses."""
    axes.set_ylim(0, 1.1 * max(_plot(axes, run, DISTINCT, color=GREEN, lw=1.6)) or 1.0)
    finish(axes, "Distinct bigrams (share of all)", "step")


def draw_ended(axes: Axes, run: RunRecord) -> None:
    _plot(axes, run, ENDED, color=ORANGE, lw=1.6)
    axes.set_ylim(-0.03, 1.03)
    finish(axes, "Responses that ended on their own (share)", "step")


def _start(run: RunRecord) -> float:
    return min((row["time"] for row in [*run.steps, *run.critic]), default=0.0)


def _reload_point(row: dict[str, Any], start: float) -> tuple[float, float | None]:
    return (row["time"] - start) / 60, number(row.get("reload_ms"))


def _median(run: RunRecord, kind: str, separator: str) -> str:
    p50 = run.summary.get("swap_ms_p50" if kind == "swap" else "triton_reload_ms_p50")
    return f"{separator}median {p50:,.0f} ms" if p50 else ""


def _thinned(x: Sequence[int]) -> str:
    every = x[1] - x[0] if len(x) > 1 else 1
    return f", 1 in {every} plotted" if every > 1 else ""


def _plot(axes: Axes, run: RunRecord, key: str, **style: Any) -> list[float]:
    """Draw a metric over the steps; return its values."""
    x, y = series(run.steps, key)
    axes.plot(x, y, **style, **markers(x))
    _mark_changes(axes, run)
    return y


def markers(x: Sequence[float]) -> dict[str, Any]:
    """Return the style of the points of a line; only few points are marked."""
    return {"marker": "o", "ms": 3} if len(x) <= 40 else {}


def _level(axes: Axes, value: float | None, colour: str, label: str) -> None:
    if value is not None:
        axes.axhline(value, color=colour, lw=1.4, ls=(0, (5, 3)), label=f"{label}: {formatted(value, '.2f')}")


def _has(rows: Sequence[dict[str, Any]], key: str, *, least: int = 1) -> bool:
    """Return whether at least that many rows have a number: one point is no curve."""
    return sum(number(row.get(key)) is not None for row in rows) >= least


def finish(axes: Axes, title: str, xlabel: str, *, columns: int = 1, legend: bool = True) -> None:
    """Write the title, the label of the x axis and, unless no line has a label, the legend."""
    axes.set_title(title)
    axes.set_xlabel(xlabel)
    if xlabel == "step":
        axes.xaxis.get_major_locator().set_params(integer=True)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", ncols=columns)


def smoothed(values: Sequence[float]) -> list[float]:
    """Return running means over a tenth of the values."""
    window = max(1, len(values) // 10)
    return [statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def svg(draw: Draw, run: RunRecord) -> str:
    """Return one picture of a run as SVG text; the same run gives the same bytes."""
    return as_svg(lambda axes: draw(axes, run))


def as_svg(draw: Callable[[Axes], None]) -> str:
    """Return what `draw` draws as SVG text."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.2, 3.5), layout="constrained")
        draw(figure.subplots())
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


CAPTIONS: dict[Draw, str] = {
    draw_reward: "The mean reward per batch.",
    draw_gold: "The gold score, which PPO never saw, on held-out prompts, with 95 % intervals.",
    draw_kl: (
        "How far the policy has moved from the initial policy, estimated on the sampled tokens: while it is near 0, "
        "the estimate of a batch can be negative."
    ),
    draw_explained_variance: (
        "How much of the returns' variance the critic explains: 1 is all; below 0 its values are further off than "
        "their mean would be, as those of a new critic are. The axis ends at -1."
    ),
    draw_step_time: "Where a step's time goes; the axis is cut off above the usual step, so rare long steps exceed it.",
    draw_versions: "Which critic version is served, and when it was replaced.",
    draw_reload_ms: "How long a reload takes, from publishing to serving; the old weights serve meanwhile.",
    draw_distinct: "Whether texts stay diverse: repetition shows here first.",
    draw_ended: "Share of responses that ended before their length limit.",
}
