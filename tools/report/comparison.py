"""Writes the page that compares several runs: their curves overlaid, the settings that differ, and their numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.report.curves import DISTINCT, ENDED, Axes, as_svg, finish, markers, smoothed
from tools.report.data import RunRecord, load_run, series
from tools.report.page import changed_settings, ends, render, state, write_page
from tools.report.summary import SUMMARY_KEYS

Points = tuple[Sequence[float], Sequence[float]]
REWARD, KL = "train_rollouts/rewards", "train_rollouts/init_policy_kl_per_sequence"
COLOURS = (  # distinguishable on a screen and in print; more runs than colours get other dashes
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#5F6368",
    "#7A3E9D",
)
DASHES = ("solid", "dashed", "dotted")
FEW = 5  # more runs have no legend within the pictures, and no unsmoothed lines: they would hide the curves
ENDS = {  # figures from the curves, since a run without validation has no reward in its summary
    REWARD: "Mean training reward",
    KL: "KL from the initial policy in training, nats per sequence",
}


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


def _metric(key: str) -> Callable[[RunRecord], Points]:
    return lambda run: series(run.steps, key)


def _frontier(run: RunRecord) -> Points:
    """Return (KL, reward) of the steps that have both, each smoothed."""
    rows = [row for row in run.steps if series([row], KL)[0] and series([row], REWARD)[0]]
    return smoothed(series(rows, KL)[1]), smoothed(series(rows, REWARD)[1])


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
        points=_metric("train_rollouts/explained_variance"),
    ),
    Overlay(
        title="Tokens per response", caption="Mean of each batch.", points=_metric("train_rollouts/generation_length")
    ),
    Overlay(title="Seconds per step", caption="All phases together.", points=_metric("timers/step_time"), low=0.0),
    Overlay(title="Distinct bigrams (share of all)", caption="Repetition shows here first.", points=_metric(DISTINCT)),
    Overlay(
        title="Responses that ended on their own (share)",
        caption="The others reached their length limit.",
        points=_metric(ENDED),
    ),
)


def write_comparison(run_dirs: Sequence[Path], out: Path, *, refresh_s: float | None = None) -> Path:
    """Write a page that compares runs, with what their folders have now, and return its path.

    Args:
        refresh_s: seconds after which a browser loads the page again; None for a page that does not change any more.

    Raises:
        UnreadableRun: a folder is no run, or has a damaged file.
        PageNotWritten: `out` cannot be written.
    """
    names = short_names(run_dirs)
    runs = [replace(load_run(run_dir), name=name) for run_dir, name in zip(run_dirs, names, strict=True)]
    tables = {"Settings that differ": differing_settings(runs), "Numbers": numbers(runs)}
    page = render(
        "comparison.html.j2",
        title=f"{len(runs)} runs: RLHF on Triton",
        refresh_s=refresh_s,
        runs=[(run.name, line_style(i), state(run)) for i, run in enumerate(runs)],
        panels=[(overlay.caption, _drawn(overlay, runs)) for overlay in OVERLAYS if _has(overlay, runs)],
        tables={title: rows for title, rows in tables.items() if rows},
    )
    write_page(out, page)
    return out


def short_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return for each folder the shortest end of its path that tells it from the others."""
    parts = [run_dir.resolve().parts for run_dir in run_dirs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return names


def line_style(index: int) -> tuple[str, str]:
    """Return (colour, dashes) of the run with this index."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]


def differing_settings(runs: Sequence[RunRecord]) -> list[tuple[str, str, list[Any]]]:
    """Return (key, "", a value per run) of each setting that differs, and not only by being of no use to a run."""
    known = [run.settings for run in runs if run.settings]
    changed = {key for settings in known for key in changed_settings(settings)} - {"run.dir"}
    keys = dict.fromkeys(key for settings in known for key in settings if key in changed)
    differing = (key for key in keys if any(settings.get(key) != known[0].get(key) for settings in known))
    return [(key, "", [run.settings.get(key) for run in runs]) for key in differing]


def numbers(runs: Sequence[RunRecord]) -> list[tuple[str, str, list[Any]]]:
    """Return (name, sentence, a value per run) of each figure that at least one run has."""
    rows = []
    for key, what in ENDS.items():
        found = [ends(run, key) for run in runs]
        for end in ("first", "last"):
            name = f"{'reward' if key == REWARD else 'KL'} in training, {end} tenth"
            rows.append((name, f"{what}, {end} tenth of the steps.", [each and each[end] for each in found]))
    rows += [(key, sentence, [run.summary.get(key) for run in runs]) for key, sentence in SUMMARY_KEYS.items()]
    return [row for row in rows if any(value is not None for value in row[2])]


def _has(overlay: Overlay, runs: Sequence[RunRecord]) -> bool:
    return any(overlay.points(run)[0] for run in runs)


def _drawn(overlay: Overlay, runs: Sequence[RunRecord]) -> str:
    def draw(axes: Axes) -> None:
        for i, run in enumerate(runs):
            x, y = overlay.points(run)
            if x:
                colour, dashes = line_style(i)
                smooth = overlay.is_smooth and len(y) >= 20
                if smooth and len(runs) <= FEW:
                    axes.plot(x, y, color=colour, alpha=0.25, lw=0.8)
                axes.plot(
                    x, smoothed(y) if smooth else y, color=colour, ls=dashes, lw=1.8, label=run.name, **markers(x)
                )
        if overlay.low is not None:
            axes.set_ylim(bottom=max(overlay.low, min(0.0, axes.get_ylim()[0])))
        if overlay.high is not None:
            axes.set_ylim(top=overlay.high)
        finish(axes, overlay.title, overlay.xlabel, legend=len(runs) <= FEW)

    return as_svg(draw)
