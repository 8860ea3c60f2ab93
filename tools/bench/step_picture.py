"""The step measurement's pictures: a step as a timeline, serial above overlapped, and step time over its size.
Given: a result, a folder. Returns: step.png and step_scaling.png there.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.pictures import STYLE

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
MODES = {"serial": "#9AA0A6", "overlapped": "#0072B2"}


def draw(result: dict[str, Any], out: Path) -> None:
    """Both pictures."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        _timelines(result, out / "step.png")
        _growth(result, out / "step_scaling.png")


def _timelines(result: dict[str, Any], path: Path) -> None:
    """The block of median length of each contender: a lane for each phase."""
    from matplotlib.figure import Figure

    blocks = {key: _median_block(result["samples"], *key) for key in TITLES}
    longest = max(block["seconds"] for block in blocks.values())
    figure = Figure(figsize=(10, 1.75 * len(blocks)), dpi=130, layout="constrained")
    axes = figure.subplots(len(blocks), 1, sharex=True)
    for ax, (key, block) in zip(axes, blocks.items(), strict=True):
        for lane, (phase, (_, colour)) in enumerate(LANES.items()):
            spans = [(start, end - start) for name, start, end in block["spans"] if name == phase]
            ax.broken_barh(spans, (lane - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.5)
        ax.axvline(block["seconds"], color="#3C4043", lw=1, ls=(0, (4, 3)))
        ax.set(
            title=f"{TITLES[key]}: {block['seconds'] / block['steps']:.1f} s a step", xlim=(0, longest * 1.01),
            ylim=(len(LANES) - 0.4, -0.6),
        )  # fmt: skip
        ax.set_yticks(range(len(LANES)), [name for name, _ in LANES.values()], fontsize=7)
        ax.grid(axis="y", visible=False)
    axes[-1].set_xlabel(f"seconds; {block['steps']} steps of the same work")
    figure.savefig(path)


def _median_block(samples: Sequence[dict[str, Any]], contest: str, mode: str) -> dict[str, Any]:
    own = sorted(
        (sample for sample in samples if (sample["contest"], sample["mode"]) == (contest, mode)),
        key=lambda sample: float(sample["seconds"]),
    )
    return own[len(own) // 2]


def _growth(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    samples = [sample for sample in result["samples"] if sample["contest"] == "scaling"]
    figure = Figure(figsize=(9, 3.4), dpi=130, layout="constrained")
    axes = figure.subplots(1, 2)
    labels = {"rollout": "responses of a step", "longest": "tokens of the longest response"}
    for ax, (key, label) in zip(axes, labels.items(), strict=True):
        other = "longest" if key == "rollout" else "rollout"
        fixed = statistics.mode(sample[other] for sample in samples)
        for mode, colour in MODES.items():
            points = {
                size: statistics.median(s["seconds"] / s["steps"] for s in samples if _is(s, mode, key, size, fixed))
                for size in sorted({s[key] for s in samples if s[other] == fixed})
            }
            ax.plot(list(points), list(points.values()), "o-", color=colour, lw=1.6, ms=4, label=mode)
        ax.set(xlabel=label, title=f"{fixed} {'tokens at most' if key == 'rollout' else 'responses'}")
        ax.set_xscale("log", base=2)
        ax.set_xticks(list(points), [str(size) for size in points])
        ax.minorticks_off()
        ax.set_ylim(0)
        ax.legend()
    axes[0].set_ylabel("seconds a step")
    figure.savefig(path)


def _is(sample: dict[str, Any], mode: str, key: str, size: int, fixed: int) -> bool:
    other = "longest" if key == "rollout" else "rollout"
    return bool(sample["mode"] == mode and sample[key] == size and sample[other] == fixed)
