"""Draws the crash test: kills by victim and time, scoring latency, and the steps trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos.points import POINTS, VICTIMS
from chaos.summary import outages
from chaos.traffic import RequestRecord
from tools.report.curves import figure_of

Axes = Any  # matplotlib is imported only by functions that draw
MARKS = ("o", "s", "^", "D", "v", "P", "X")
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#3C4043")


def draw(path: Path, record: RequestRecord, kills: Sequence[dict[str, Any]]) -> None:
    """Write the picture, a timeline of the run, to `path`."""
    with figure_of(path, (12, 8.4)) as figure:
        killed, scoring, steps = figure.subplots(3, 1, sharex=True, height_ratios=[1.3, 1.2, 1.0])
        _draw_kills(killed, kills)
        _draw_latency(scoring, record, kills)
        _draw_steps(steps, record, kills)
        steps.set_xlabel("seconds since the first request")


def _draw_kills(axes: Axes, kills: Sequence[dict[str, Any]]) -> None:
    victims = [*VICTIMS, *sorted({kill["victim"] for kill in kills} - {*VICTIMS})]  # ranks are named by their number
    for point, mark, colour in zip(POINTS, MARKS, COLOURS, strict=True):
        of_point = [kill for kill in kills if kill["hit"] and kill["point"] == point]
        axes.scatter(
            [kill["time_s"] for kill in of_point],
            [victims.index(kill["victim"]) for kill in of_point],
            marker=mark,
            color=colour,
            s=52,
            label=point,
            zorder=3,
        )
    axes.set_yticks(range(len(victims)), victims)
    axes.set(
        ylim=(len(victims) - 0.5, -0.5),
        title=f"{sum(kill['hit'] for kill in kills)} processes killed or stopped, by victim and kill point",
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0), title="killed at")


def _draw_latency(axes: Axes, record: RequestRecord, kills: Sequence[dict[str, Any]]) -> None:
    _lines(axes, kills)
    gaps = outages(record)
    for i, gap in enumerate(gaps):
        label = "no answer for more than 1 s" if i == 0 else None
        axes.axvspan(gap["time_s"], gap["time_s"] + gap["seconds"], color="#FBD9D3", lw=0, label=label)
    axes.scatter(
        [when for when, _ in record.latencies],
        [seconds * 1e3 for _, seconds in record.latencies],
        s=3,
        color="#0072B2",
        alpha=0.35,
        lw=0,
        label="an answer",
        rasterized=True,
    )
    axes.set(yscale="log", ylabel="ms", title="scoring (critic_infer), from sending to the answer, retries included")
    axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0), markerscale=3)


def _draw_steps(axes: Axes, record: RequestRecord, kills: Sequence[dict[str, Any]]) -> None:
    _lines(axes, kills)
    axes.plot(
        [when for _, when, _ in record.trained],
        [step for step, _, _ in record.trained],
        color="#009E73",
        marker=".",
        ms=4,
        lw=1.2,
        label="step acknowledged",
    )
    axes.scatter(
        [when for _, when, _ in record.saved],
        [step for step, _, _ in record.saved],
        color="#D55E00",
        marker="|",
        s=70,
        zorder=3,
        label="critic_save acknowledged",
    )
    axes.set(ylabel="step", title="training steps: each acknowledged once its version is served")
    axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0))


def _lines(axes: Axes, kills: Sequence[dict[str, Any]]) -> None:
    for kill in kills:
        if kill["hit"]:
            axes.axvline(kill["time_s"], color="#9AA0A6", lw=0.6, alpha=0.7, zorder=0)
