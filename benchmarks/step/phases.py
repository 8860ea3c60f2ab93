"""Benchmark of a PPO step by phase, overlapped as in a run and serial, with all processes on the same two cores."""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.benchmark import Option, Record, Result, Target
from benchmarks.support.samples import Sample, grouped, ratio, select
from benchmarks.support.workload import SIZES
from tools.report.curves import figure_of

CORES = 2  # shared by all processes
# Phases that the actor itself computes, so they cannot overlap.
OWN_PHASES = ("generate", "logprobs", "init_logprobs", "train_time")
OPTIONS = {
    "model": Option("7m", f"policy, reward and critic, one of {', '.join(SIZES)}", quick="tiny", known=SIZES),
    "rollout": Option(64, "responses per step", quick=8),
    "longest": Option(128, "tokens of the longest response", quick=12),
    "steps": Option(3, "steps per block", quick=1),
    "rounds": Option(3, "blocks of each mode", quick=1),
}
LANES = {
    "generate": ("generation", "#0072B2"),
    "scoring": ("rewards and values", "#E69F00"),
    "logprobs": ("log-probs", "#56B4E9"),
    "init_logprobs": ("reference log-probs", "#7FC8F0"),
    "critic_update": ("critic's update and reload", "#D55E00"),
    "train_time": ("policy's update", "#009E73"),
}


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Measure blocks of steps."""
    from benchmarks.step.blocks import measure_blocks  # torch: not for --help

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    measure_blocks(settings, record)


def summarise(result: Result) -> list[dict[str, Any]]:
    """Return the seconds of a step and of its phases, for each mode."""
    return [
        {
            "mode": mode,
            "s_a_step": median_step(own),
            "cpu_s": median_step(own, "cpu_seconds"),
            **{phase: median_phase(own, phase) for phase in LANES},
        }
        for (mode,), own in grouped(result["samples"], "mode").items()
    ]


def targets(result: Result) -> list[Target]:
    """Return the ratio of overlapped to serial step times, and lower bounds of this ratio."""
    samples, serial = result["samples"], select(result["samples"], mode="serial")
    if not serial:
        return []
    seconds = median_step(serial)
    own = sum(median_phase(serial, phase) for phase in OWN_PHASES)
    return [
        Target("overlapped / serial", ratio(samples, "overlapped", "serial", "seconds", by="mode")),
        Target("the actor's own computing / serial", own / seconds),
        Target(f"all processor time on {CORES} cores / serial", median_step(serial, "cpu_seconds") / CORES / seconds),
    ]


def median_step(samples: Sequence[Sample], key: str = "seconds") -> float:
    """Return `key` per step, as the median over the blocks."""
    return statistics.median(sample[key] / sample["steps"] for sample in samples)


def median_phase(samples: Sequence[Sample], phase: str) -> float:
    """Return the seconds of one phase per step, as the median over the blocks."""
    sums = [sum(end - start for name, start, end in s["spans"] if name == phase) / s["steps"] for s in samples]
    return statistics.median(sums)


def draw(result: Result, out: Path) -> None:
    """Draw the block with the median duration of each mode as a timeline, with a lane for each phase."""
    blocks = {}
    for (mode,), own in grouped(result["samples"], "mode").items():
        blocks[mode] = sorted(own, key=lambda block: float(block["seconds"]))[len(own) // 2]
    with figure_of(out / "step.png", (10, 1.75 * len(blocks))) as figure:
        axes = figure.subplots(len(blocks), 1, sharex=True, squeeze=False)[:, 0]
        for ax, (mode, block) in zip(axes, blocks.items(), strict=True):
            for lane, (phase, (_, colour)) in enumerate(LANES.items()):
                spans = [(start, end - start) for name, start, end in block["spans"] if name == phase]
                ax.broken_barh(spans, (lane - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.5)
            ax.axvline(block["seconds"], color="#3C4043", lw=1, ls=(0, (4, 3)))
            title = f"{mode}: {block['seconds'] / block['steps']:.1f} s a step"
            ax.set(title=title, ylim=(len(LANES) - 0.4, -0.6), xlabel="seconds")
            ax.set_yticks(range(len(LANES)), [name for name, _ in LANES.values()], fontsize=7)
            ax.grid(axis="y", visible=False)
