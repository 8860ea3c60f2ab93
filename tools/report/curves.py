"""Draws the report's pictures of a run: as SVG for the page, and the four most informative ones as a PNG."""

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO

from rlhf_triton.tools.report.data import (
    COMPONENT,
    MEDIANS,
    PHASES,
    SHOWN_S,
    RunRecord,
    components,
    formatted,
    number,
    phase_seconds,
    series,
)

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
REWARD, KL = "train_rollouts/rewards", "train_rollouts/init_policy_kl_per_sequence"
EXPLAINED, STEP_TIME = "train_rollouts/explained_variance", "timers/step_time"
RELOADS: dict[str, dict[str, Any]] = {
    "swap": {"color": BLUE, "marker": "o", "s": 14},
    "triton": {"color": RED, "marker": "D", "s": 46},
}
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
COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, "#5F6368", "#7A3E9D")  # of lines in one picture


def pictures(run: RunRecord) -> dict[Draw, str]:
    """Return {draw: caption} of the pictures that this run has data for, those of its own sections in second place."""
    known = {draw: caption for draw, (caption, is_recorded) in PICTURES.items() if is_recorded(run)}
    own = {draw: caption for section in run.sections for caption, draw in section.pictures.items()}
    first = dict(list(known.items())[:1])
    return {**first, **own, **known}


@contextlib.contextmanager
def figure_of(out: Path | TextIO, size: tuple[float, float], **metadata: None) -> Iterator[Any]:
    """Yield a styled figure of `size` inches; save it at the end of the block, with 150 pixels an inch or as SVG.

    Args:
        out: a picture's file, or what receives SVG text.
        metadata: entries that the picture must not have, so that the same data give the same bytes.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
        yield figure
        figure.savefig(out, format=None if isinstance(out, Path) else "svg", metadata=metadata or {"Software": None})


def as_svg(draw: Draw, run: RunRecord) -> str:
    """Return a picture of the run as SVG text."""
    out = StringIO()
    with figure_of(out, (6.2, 3.5), Date=None, Creator=None) as figure:
        draw(figure.subplots(), run)
    return out.getvalue()


def write_curves(run: RunRecord, out_png: Path) -> None:
    """Write one PNG with the first four pictures that this run has data for; its own replace that of the KL."""
    known = pictures(run)
    has_own = any(draw not in PICTURES for draw in known)
    chosen = [draw for draw in known if draw is not draw_kl or not has_own][:4]
    with figure_of(out_png, (10, 6.8)) as figure:
        for axes, draw in zip_longest(figure.subplots(2, 2).flat, chosen):
            if draw is None:
                axes.remove()
            else:
                draw(axes, run)


def draw_reward(axes: Axes, run: RunRecord) -> None:
    x, y = series(run.steps, REWARD)
    window = max(1, len(y) // 10)
    axes.plot(x, y, color=BLUE, alpha=0.35 if window > 1 else 1.0, lw=1, label="per step", **markers(x))
    if window > 1:
        means = [statistics.fmean(y[max(0, i + 1 - window) : i + 1]) for i in range(len(y))]
        axes.plot(x, means, color=BLUE, lw=2.2, label=f"mean of {window} plotted steps")
    held_out = series(run.validations, "reward")
    if held_out[0]:
        axes.plot(*held_out, color=ORANGE, lw=1.2, marker="D", ms=5, label="held-out prompts")
    steps, versions = series(run.steps, "train_rollouts/reward_version")
    new = [step for step, version, before in zip(steps[1:], versions[1:], versions, strict=False) if version != before]
    _mark(axes, new, RED, "new version of the reward model")
    _mark_changes(axes, run)
    kl = run.summary.get("kl_final")
    finish(axes, "Reward" + (f", at {formatted(kl, '.1f')} nats of KL" if kl is not None else ""), "step")


def _mark(axes: Axes, steps: Sequence[float], colour: str, label: str) -> None:
    for i, step in enumerate(steps):
        axes.axvline(step, color=colour, lw=1.2, ls=(0, (1, 1)), label=None if i else label)


def _mark_changes(axes: Axes, run: RunRecord) -> None:
    """Mark each step after which the run resumed with other settings."""
    _mark(axes, [change["step"] + 0.5 for change in run.changes], GREY, "resumed with other settings")


def draw_kl(axes: Axes, run: RunRecord) -> None:
    y = _plot(axes, run, KL, color=PURPLE, lw=1.8, label="training batch")
    _level(axes, run.summary.get("kl_final"), PURPLE, "held-out, at the end")
    axes.set_ylim(bottom=min(0.0, *y))
    finish(axes, "KL to the initial policy (nats per sequence)", "step")


def draw_explained_variance(axes: Axes, run: RunRecord) -> None:
    lowest = min(series(run.steps, EXPLAINED)[1], default=0.0)
    label = "training batch, served version" + (f", lowest {formatted(lowest, ',.0f')}" if lowest < -1 else "")
    style = {"color": GREEN, "lw": 1.4, "alpha": 0.8, "label": label}
    y = _plot(axes, run, EXPLAINED, **style)
    _level(axes, run.summary.get("ev_v0"), RED, "version 0, held-out")
    _level(axes, run.summary.get("ev_last"), BLUE, f"version {run.summary.get('weights_version')}, held-out")
    finite = [v for v in (*y, run.summary.get("ev_v0"), run.summary.get("ev_last")) if v is not None]
    # A fresh critic can be arbitrarily bad; below -1 the curve would flatten everything else.
    axes.set_ylim(max(-1.0, min((0.0, *finite)) - 0.08), 1.0)
    finish(axes, "Critic: explained variance of the returns", "step")


def draw_step_time(axes: Axes, run: RunRecord) -> None:
    rows = [row for row in run.steps if number(row.get(STEP_TIME)) is not None]
    phases = [phase_seconds(row) for row in rows]
    x = [row["step"] for row in rows]
    layers = {name: [phase[name] for phase in phases] for name in PHASE_COLOURS}
    layers = {name: layer for name, layer in layers.items() if max(layer) >= SHOWN_S}
    axes.stackplot(x, layers.values(), labels=list(layers), colors=[PHASE_COLOURS[name] for name in layers], lw=0)
    totals = sorted(row[STEP_TIME] for row in rows)
    axes.set_ylim(0, 1.75 * totals[int(0.95 * (len(totals) - 1))])
    finish(axes, "Seconds per step, by phase", "step", columns=2)


def draw_versions(axes: Axes, run: RunRecord) -> None:
    start = min((row["time"] for row in [*run.steps, *run.critic]), default=0.0)

    def points(rows: Sequence[dict[str, Any]]) -> tuple[list[float], list[int]]:
        return [(row["time"] - start) / 60 for row in rows], [row["weights_version"] for row in rows]

    axes.step(*points(run.critic), where="post", color=BLUE, lw=1.4)
    for kind, style in RELOADS.items():
        rows = [row for row in run.critic if row.get("reload") == kind]
        if rows:
            count, p50 = run.summary[f"reloads_{kind}"], run.summary.get(MEDIANS[kind])
            label = f"{count} {kind} reload{'s' if count > 1 else ''}" + (f", median {p50:,.0f} ms" if p50 else "")
            axes.scatter(*points(rows), label=label, zorder=3, **style)
    axes.yaxis.get_major_locator().set_params(integer=True)
    finish(axes, "Served version of the critic weights", "minutes since the first step")


def draw_components(axes: Axes, run: RunRecord) -> None:
    for name, colour in zip(components(run.steps), itertools.cycle(COLOURS), strict=False):
        _plot(axes, run, COMPONENT + name, color=colour, lw=1.6, label=name)
    finish(axes, "Each reward, without its weight", "step")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Draws one metric over the steps; `high` bounds the axis, which begins at 0."""

    title: str
    caption: str
    key: str
    high: float | None = None

    def __call__(self, axes: Axes, run: RunRecord) -> None:
        """Draw it."""
        _plot(axes, run, self.key, color=BLUE, lw=1.8)
        axes.set_ylim(min(0.0, axes.get_ylim()[0]), self.high or 1.05 * axes.get_ylim()[1])
        finish(axes, self.title, "step")


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


def finish(axes: Axes, title: str, xlabel: str, *, columns: int = 1) -> None:
    """Write the title, the label of the x axis and, unless no line has a label, the legend."""
    axes.set_title(title)
    axes.set_xlabel(xlabel)
    if xlabel == "step":
        axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", ncols=columns)


def _recorded(key: str, *, least: int = 2) -> Callable[[RunRecord], bool]:
    """Return whether at least that many steps of a run have a number: one point is no curve."""
    return lambda run: len(series(run.steps, key)[0]) >= least


CURVES = (  # TensorBoard has all other metrics
    Curve(
        title="Turns of the policy per conversation",
        caption="How often the policy speaks before a conversation ends.",
        key="train_rollouts/turns",
    ),
    Curve(
        title="Conversations that a limit ended (share)",
        caption="Those whose environment failed are not among them.",
        key="train_rollouts/truncated",
        high=1.03,
    ),
    Curve(
        title="Tokens per response",
        caption="Tokens that the policy generated: mean of each batch.",
        key="train_rollouts/generation_length",
    ),
    Curve(
        title="Responses that ended on their own (share)",
        caption="The others reached their length limit.",
        key="train_rollouts/fraction_of_samples_properly_ended",
        high=1.03,
    ),
    Curve(
        title="Prompts whose responses differ in reward (share)",
        caption="The others teach nothing where responses to a prompt are compared.",
        key="train_rollouts/useful_prompts",
        high=1.03,
    ),
    Curve(
        title="Entropy of the policy (nats per token)",
        caption="Whether the policy still explores: near 0 it samples the same responses again and again.",
        key="train_optim/entropy",
    ),
)
PICTURES: dict[Draw, tuple[str, Callable[[RunRecord], bool]]] = {  # {draw: (caption, whether the run has its data)}
    draw_reward: ("The mean reward per batch.", _recorded(REWARD, least=1)),
    draw_kl: (
        "How far the policy has moved from the initial policy, estimated on the sampled tokens: while it is near 0, "
        "the estimate of a batch can be negative.",
        _recorded(KL),
    ),
    draw_components: (
        "What each reward function, model or environment gave: their weighted sum is the reward.",
        lambda run: bool(components(run.steps)),
    ),
    draw_explained_variance: (
        "How much of the returns' variance the critic explains: 1 is all; below 0 its values are further off than "
        "their mean would be, as those of a new critic are. The axis ends at -1.",
        lambda run: _recorded(EXPLAINED, least=1 if "ev_v0" in run.summary else 2)(run),
    ),
    draw_versions: ("Which critic version is served, and when it was replaced.", lambda run: bool(run.critic)),
    draw_step_time: (
        "Where a step's time goes; the axis is cut off above the usual step, so rare long steps exceed it.",
        _recorded(STEP_TIME),
    ),
    **{curve: (curve.caption, _recorded(curve.key)) for curve in CURVES},
}
