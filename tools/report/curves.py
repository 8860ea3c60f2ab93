"""Draws the report's pictures: of one run or several as SVG for a page, and the four most informative ones as a PNG."""

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
Points = tuple[Sequence[float], Sequence[float]]
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
TURNS = "train_rollouts/turns"
ENDED = "train_rollouts/fraction_of_samples_properly_ended"
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
# Distinguishable on a screen and in print; more runs than colours get other dashes.
COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, "#5F6368", "#7A3E9D")
DASHES = ("solid", "dashed", "dotted")
FEW = 5  # more runs have no legend within the pictures, and no unsmoothed lines: they would hide the curves


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


def as_svg(draw: Callable[..., None], *arguments: Any) -> str:
    """Return what `draw` draws on the axes that it receives, before the arguments, as SVG text."""
    out = StringIO()
    with figure_of(out, (6.2, 3.5), Date=None, Creator=None) as figure:
        draw(figure.subplots(), *arguments)
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
        axes.plot(x, smoothed(y), color=BLUE, lw=2.2, label=f"mean of {window} plotted steps")
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
    axes.step(_minutes(run, run.critic), _versions(run.critic), where="post", color=BLUE, lw=1.4)
    for kind, style in RELOADS.items():
        rows = [row for row in run.critic if row.get("reload") == kind]
        if rows:
            count, p50 = run.summary[f"reloads_{kind}"], run.summary.get(MEDIANS[kind])
            label = f"{count} {kind} reload{'s' if count > 1 else ''}" + (f", median {p50:,.0f} ms" if p50 else "")
            axes.scatter(_minutes(run, rows), _versions(rows), label=label, zorder=3, **style)
    key = "train_rollouts/weights_version"
    scored = _minutes(run, [row for row in run.steps if number(row.get(key)) is not None])
    style = {"color": GREY, "lw": 1.2, "ls": ":", "drawstyle": "steps-post"}
    axes.plot(scored, series(run.steps, key)[1], label="version that scored the step", **style)
    axes.yaxis.get_major_locator().set_params(integer=True)
    finish(axes, "Served version of the critic weights", "minutes since the first step")


def draw_components(axes: Axes, run: RunRecord) -> None:
    for name, colour in zip(components(run.steps), itertools.cycle(COLOURS), strict=False):
        _plot(axes, run, COMPONENT + name, color=colour, lw=1.6, label=name)
    finish(axes, "Each reward, without its weight", "step")


def draw_turns(axes: Axes, run: RunRecord) -> None:
    """Draw the turns of a conversation, and at the right the shares of conversations that did not come to an end."""
    axes.set_ylim(0, 1.7 * max(_plot(axes, run, TURNS, color=BLUE, lw=1.8, label="turns of the policy")))
    shares = axes.twinx()
    for key, style in {"truncated": {"color": ORANGE}, "failed_environments": {"color": RED, "ls": "--"}}.items():
        label = f"{key.partition('_')[0]} (share, right axis)"
        axes.plot([], [], label=label, **style)
        _plot(shares, run, f"train_rollouts/{key}", lw=1.2, **style)
    shares.set_ylim(-0.03, 1.7)
    shares.set_yticks([0, 0.25, 0.5, 0.75, 1])
    shares.grid(visible=False)
    finish(axes, "Conversations", "step")


def _minutes(run: RunRecord, rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return the times of rows in minutes since the first step."""
    start = min((row["time"] for row in [*run.steps, *run.critic]), default=0.0)
    return [(row["time"] - start) / 60 for row in rows]


def _versions(rows: Sequence[dict[str, Any]]) -> list[int]:
    return [row["weights_version"] for row in rows]


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


def _recorded(key: str, *, least: int = 2) -> Callable[[RunRecord], bool]:
    """Return whether at least that many steps of a run have a number: one point is no curve."""
    return lambda run: len(series(run.steps, key)[0]) >= least


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """A picture with a line per run; `low` and `high` bound the axis."""

    title: str
    caption: str
    points: Callable[[RunRecord], Points]
    xlabel: str = "step"
    low: float | None = None
    high: float | None = None
    is_smooth: bool = True

    def draw(self, axes: Axes, runs: Sequence[RunRecord]) -> None:
        """Draw a line for each of the runs that have data."""
        for i, run in enumerate(runs):
            x, y = self.points(run)
            if x:
                colour, dashes = line_style(i)
                smooth = self.is_smooth and len(y) >= 20
                if smooth and len(runs) <= FEW:
                    axes.plot(x, y, color=colour, alpha=0.25, lw=0.8)
                axes.plot(
                    x, smoothed(y) if smooth else y, color=colour, ls=dashes, lw=1.8, label=run.name, **markers(x)
                )
        if self.low is not None:
            axes.set_ylim(max(self.low, min(0.0, axes.get_ylim()[0])), 1.05 * axes.get_ylim()[1])
        if self.high is not None:
            axes.set_ylim(top=self.high)
        finish(axes, self.title, self.xlabel, legend=1 < len(runs) <= FEW)

    def of_one(self, axes: Axes, run: RunRecord) -> None:
        """Draw the line of one run, and where it resumed with other settings."""
        self.draw(axes, [run])
        _mark_changes(axes, run)


def _metric(key: str) -> Callable[[RunRecord], Points]:
    return lambda run: series(run.steps, key)


def _frontier(run: RunRecord) -> Points:
    """Return (KL, reward) of the steps that have both, each smoothed."""
    rows = [row for row in run.steps if series([row], KL)[0] and series([row], REWARD)[0]]
    return smoothed(series(rows, KL)[1]), smoothed(series(rows, REWARD)[1])


METRICS = (
    Overlay(
        title="Tokens per response",
        caption="Tokens that the policy generated: mean of each batch.",
        points=_metric("train_rollouts/generation_length"),
        low=0.0,
    ),
    Overlay(
        title="Responses that ended on their own (share)",
        caption="The others reached their length limit.",
        points=_metric(ENDED),
        low=-0.03,
        high=1.03,
    ),
    Overlay(
        title="Prompts whose responses differ in reward (share)",
        caption="The others teach nothing where responses to a prompt are compared.",
        points=_metric("train_rollouts/useful_prompts"),
        low=-0.03,
        high=1.03,
    ),
    Overlay(
        title="Entropy of the policy (nats per token)",
        caption="Whether the policy still explores: near 0 it samples the same responses again and again.",
        points=_metric("train_optim/entropy"),
        low=0.0,
    ),
    Overlay(
        title="Gradient norm",
        caption="Before it is clipped to actor.optimizer.grad_clip.",
        points=_metric("train_optim/grad_norm"),
        low=0.0,
    ),
    Overlay(
        title="Clipped tokens (share)",
        caption="Tokens whose probability ratio the loss clips.",
        points=_metric("train_optim/clip_fraction"),
        low=0.0,
    ),
    Overlay(
        title="Learning rate", caption="Of the policy.", points=_metric("train_optim/lr"), low=0.0, is_smooth=False
    ),
)


def _has_curve(overlay: Overlay) -> Callable[[RunRecord], bool]:
    return lambda run: len(overlay.points(run)[0]) > 1


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
    draw_turns: (
        "Turns of the policy per conversation, and which share of the conversations a limit or a failure ended.",
        _recorded(TURNS),
    ),
    **{each.of_one: (each.caption, _has_curve(each)) for each in METRICS},
}


OVERLAYS = (
    Overlay(title="Reward", caption="Mean reward per batch, smoothed.", points=_metric(REWARD)),
    Overlay(
        title="Reward on held-out prompts",
        caption="Mean reward of each validation.",
        is_smooth=False,
        points=lambda run: series(run.validations, "reward"),
    ),
    Overlay(title="KL to the initial policy (nats per sequence)", caption="Training batches.", points=_metric(KL)),
    Overlay(
        title="Reward against KL",
        caption="Reward at equal KL; smoothed.",
        is_smooth=False,
        points=_frontier,
        xlabel="KL to the initial policy (nats per sequence)",
    ),
    Overlay(
        title="Critic: explained variance of the returns",
        caption="Cut off below -1.",
        low=-1.0,
        high=1.0,
        points=_metric(EXPLAINED),
    ),
    Overlay(title="Seconds per step", caption="All phases together.", points=_metric(STEP_TIME), low=0.0),
    *METRICS,
)


def overlaid(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Return (caption, SVG text) of the pictures that show several runs."""
    return [
        (overlay.caption, as_svg(overlay.draw, runs)) for overlay in OVERLAYS if any(overlay.points(r)[0] for r in runs)
    ]


def line_style(index: int) -> tuple[str, str]:
    """Return (colour, dashes) of the run with this index."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
