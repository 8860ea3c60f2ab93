"""Benchmark of a PPO step by phase: overlapped, serial, and serial over padded PyTriton.

Overlapped and serial steps are also measured with services that sleep instead of computing.
"""

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

MOST_RATIO = 0.75
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
TITLES = {
    ("computed", "padded"): "serial, over padded PyTriton",
    ("computed", "serial"): "serial",
    ("computed", "overlapped"): "overlapped",
    ("waited", "serial"): "serial, services wait",
    ("waited", "overlapped"): "overlapped, services wait",
}


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Measure blocks of steps with services that compute, and with services that sleep."""
    from benchmarks.step.contests import measure_contests  # torch: not for --help

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    measure_contests(settings, record)


def summarise(result: Result) -> list[dict[str, Any]]:
    """Return the seconds of a step and of its phases, for each contest and mode."""
    return [
        {
            "contest": contest,
            "mode": mode,
            "s_a_step": median_step(own),
            "cpu_s": median_step(own, "cpu_seconds"),
            **{phase: median_phase(own, phase) for phase in LANES},
        }
        for (contest, mode), own in grouped(result["samples"], "contest", "mode").items()
    ]


def targets(result: Result) -> list[Target]:
    """Return ratios of overlapped to serial step times, and lower bounds of these ratios."""
    computed, waited = (select(result["samples"], contest=contest) for contest in ("computed", "waited"))
    found = []
    for what, samples, most in (("computed", computed, None), ("waited", waited, MOST_RATIO)):
        if serial := select(samples, mode="serial"):
            found += [
                Target(f"{what}: overlapped / serial", mode_ratio(samples, "overlapped", "serial"), None, most),
                Target(f"{what}: the actor's own computing / serial", critical_path(serial) / median_step(serial)),
            ]
    if select(computed, mode="serial"):
        found += [
            Target(f"computed: all processor time on {CORES} cores / serial", cores_bound(computed)),
            Target("computed: overlapped / serial over padded PyTriton", mode_ratio(computed, "overlapped", "padded")),
        ]
    return found


def median_step(samples: Sequence[Sample], key: str = "seconds") -> float:
    """Return `key` per step, as the median over the blocks."""
    return statistics.median(sample[key] / sample["steps"] for sample in samples)


def median_phase(samples: Sequence[Sample], phase: str) -> float:
    """Return the seconds of one phase per step, as the median over the blocks."""
    sums = [sum(end - start for name, start, end in s["spans"] if name == phase) / s["steps"] for s in samples]
    return statistics.median(sums)


def critical_path(samples: Sequence[Sample]) -> float:
    """Return the seconds of a serial step in which the actor itself computes, which overlapping cannot hide."""
    serial = select(samples, mode="serial")
    return sum(median_phase(serial, phase) for phase in OWN_PHASES)


def cores_bound(samples: Sequence[Sample]) -> float:
    """Return a serial step's CPU time spread over all cores, divided by its seconds: a lower bound for any schedule."""
    serial = select(samples, mode="serial")
    return median_step(serial, "cpu_seconds") / CORES / median_step(serial)


def mode_ratio(samples: Sequence[Sample], one: str, other: str) -> float | None:
    """Return the median over the rounds of the seconds of mode `one` divided by those of `other`."""
    return ratio(samples, one, other, "seconds", by="mode")


def draw(result: Result, out: Path) -> None:
    """Draw the block with the median duration of each contest and mode as a timeline, with a lane for each phase."""
    by_key = grouped(result["samples"], "contest", "mode")
    found = {key: sorted(by_key[key], key=lambda block: float(block["seconds"])) for key in TITLES if key in by_key}
    blocks = {key: own[len(own) // 2] for key, own in found.items()}
    if not blocks:
        return
    longest = max(block["seconds"] for block in blocks.values())
    with figure_of(out / "step.png", (10, 1.75 * len(blocks))) as figure:
        axes = figure.subplots(len(blocks), 1, sharex=True, squeeze=False)[:, 0]
        for ax, (key, block) in zip(axes, blocks.items(), strict=True):
            for lane, (phase, (_, colour)) in enumerate(LANES.items()):
                spans = [(start, end - start) for name, start, end in block["spans"] if name == phase]
                ax.broken_barh(spans, (lane - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.5)
            ax.axvline(block["seconds"], color="#3C4043", lw=1, ls=(0, (4, 3)))
            title = f"{TITLES[key]}: {block['seconds'] / block['steps']:.1f} s a step"
            ax.set(title=title, xlim=(0, longest * 1.01), ylim=(len(LANES) - 0.4, -0.6))
            ax.set_yticks(range(len(LANES)), [name for name, _ in LANES.values()], fontsize=7)
            ax.grid(axis="y", visible=False)
        axes[-1].set_xlabel(f"seconds; {block['steps']} steps of the same work")
