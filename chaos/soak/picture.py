"""Draws the soak test: kills, steps, memory and open files of each process, shared memory and disk over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chaos.soak.usage import UsageSample
from tools.report.curves import figure_of

Axes = Any  # matplotlib is imported only by functions that draw
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#3C4043", "#9AA0A6", "#F0E442")


def draw(path: Path, samples: Sequence[UsageSample], kills: Sequence[Mapping[str, Any]], calm_from_s: float) -> None:
    """Write the picture, a timeline of the run, to `path`."""
    with figure_of(path, (12, 12)) as figure:
        steps, killed, memory, files, disk = figure.subplots(5, 1, sharex=True, height_ratios=[1, 1, 1.3, 1.3, 1])
        minutes = [sample.time_s / 60 for sample in samples]
        steps.plot(minutes, [sample.step for sample in samples], color=COLOURS[2], lw=1.5)
        steps.set(title="steps completed by the actor", ylabel="step")
        names = list(dict.fromkeys(name for sample in samples for name in sample.processes))
        _draw_kills(killed, kills, names)
        for name, colour in zip(names, COLOURS, strict=False):
            for ax, field in ((memory, "rss_mb"), (files, "files")):
                values = [getattr(s.processes[name], field) if name in s.processes else float("nan") for s in samples]
                ax.plot(minutes, values, color=colour, lw=1.2, label=name)
        memory.set(title="resident memory of each process", ylabel="MB", ylim=(0, None))
        files.set(title="open files of each process, without sockets", ylabel="files", ylim=(0, None))
        memory.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0))
        disk.plot(
            minutes, [s.disk_mb for s in samples], color=COLOURS[0], lw=1.2, label="versions, journal, checkpoints"
        )
        disk.plot(minutes, [s.shared_memory_mb for s in samples], color=COLOURS[3], lw=1.2, label="/dev/shm")
        disk.set(title="disk and shared memory", ylabel="MB", ylim=(0, None), xlabel="minutes")
        disk.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0))
        for ax in (steps, killed, memory, files, disk):
            ax.axvspan(calm_from_s / 60, minutes[-1] if minutes else 0, color="#E8F0FE", lw=0, zorder=0)


def _draw_kills(axes: Axes, kills: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    for kill in kills:
        at = names.index(kill["victim"])
        start, until = kill["time_s"] / 60, (kill["time_s"] + (kill["until_s"] or 0)) / 60
        axes.plot([start, until], [at, at], color="#D55E00", lw=4, solid_capstyle="butt")
        axes.plot([start], [at], marker="|", ms=12, color="#3C4043")
    axes.set_yticks(range(len(names)), names)
    title = "processes killed (SIGKILL), and how long until the next step; growth is measured where blue"
    axes.set(ylim=(len(names) - 0.5, -0.5), title=f"{len(kills)} {title}")
