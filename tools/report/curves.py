"""Draws the report's pictures of a run: as SVG for the page, and the first four as a PNG."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO

from rlhf_triton.tools.report.data import PHASES, REWARD_PREFIX, RunRecord, components, series

Axes = Any  # matplotlib is imported only by the functions that draw
Draw = Callable[[Axes, RunRecord], None]
REWARD = "train_rollouts/rewards"
KL = "train_rollouts/init_policy_kl_per_sequence"
MARKED = 40  # the points of longer lines are not marked
STYLE = {
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E8EAED",
    "legend.frameon": False,
    "svg.hashsalt": "report",
}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Draws metrics over the steps, and where the run resumed with other settings."""

    title: str
    caption: str
    lines: Mapping[str, str]
    """{metric: label}."""
    low: float | None = 0.0
    """Below this the axis ends: a fresh critic can be arbitrarily bad."""
    high: float | None = None

    def __call__(self, axes: Axes, run: RunRecord) -> None:
        """Draw it."""
        drawn = {label: series(run.steps, key) for key, label in self.lines.items()}
        if REWARD in self.lines:
            drawn["held-out prompts"] = series(run.validations, "reward")
        for label, (steps, values) in drawn.items():
            if steps:
                axes.plot(steps, values, label=label, marker="o" if len(steps) <= MARKED else None, markersize=3)
        for number, change in enumerate(run.changes):
            label = "_" if number else "resumed with other settings"
            axes.axvline(change["step"] + 0.5, color="grey", linestyle=":", label=label)
        if self.low is not None or self.high is not None:
            axes.set_ylim(self.low, self.high)
        axes.set(title=self.title, xlabel="step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        labels = axes.get_legend_handles_labels()[1]
        if len(labels) > 2:  # beside the lines, which a list of this length would cover
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
        elif len(labels) > 1:
            axes.legend()


CURVES = (  # TensorBoard has all other metrics
    Curve(title="Reward", caption="The mean reward per batch.", lines={REWARD: "training batch"}, low=None),
    Curve(
        title="KL to the initial policy (nats per sequence)",
        caption="How far the policy has moved from the initial policy, estimated on the sampled tokens: while it is "
        "near 0, the estimate of a batch can be negative.",
        lines={KL: "training batch"},
        low=None,
    ),
    Curve(
        title="Critic: explained variance of the returns",
        caption="How much of the returns' variance the critic explains: 1 is all. Below 0, the returns' mean would be "
        "closer to them than the critic's values, as with a new critic. The axis ends at -1.",
        lines={"train_rollouts/explained_variance": "served version"},
        low=-1.0,
        high=1.0,
    ),
    Curve(
        title="Served version of the critic weights",
        caption="Which critic version scored the rows of a step.",
        lines={"train_rollouts/weights_version": "version"},
    ),
    Curve(title="Seconds per step, by phase", caption="Where a step's time goes.", lines=PHASES),
    Curve(
        title="Turns of the policy per conversation",
        caption="How often the policy speaks before a conversation ends.",
        lines={"train_rollouts/turns": "turns"},
    ),
    Curve(
        title="Conversations that a limit ended (share)",
        caption="Conversations whose environment failed are not counted.",
        lines={"train_rollouts/truncated": "share"},
        high=1.03,
    ),
    Curve(
        title="Tokens per response",
        caption="Tokens that the policy generated: mean of each batch.",
        lines={"train_rollouts/generation_length": "tokens"},
    ),
    Curve(
        title="Responses that ended on their own (share)",
        caption="The others reached their length limit.",
        lines={"train_rollouts/fraction_of_samples_properly_ended": "share"},
        high=1.03,
    ),
    Curve(
        title="Prompts whose responses differ in reward (share)",
        caption="Algorithms that compare the responses to a prompt learn nothing from the other prompts.",
        lines={"train_rollouts/useful_prompts": "share"},
        high=1.03,
    ),
    Curve(
        title="Entropy of the policy (nats per token)",
        caption="Whether the policy still explores: near 0 it samples the same responses again and again.",
        lines={"train_optim/entropy": "entropy"},
    ),
    Curve(
        title="Norm of the policy's gradient",
        caption="Before it is clipped to actor.optimizer.grad_clip; a jump often precedes a collapse.",
        lines={"train_optim/grad_norm": "norm"},
    ),
    Curve(
        title="Clipped tokens (share)",
        caption="Tokens whose probability ratio the loss clips: they do not train the policy.",
        lines={"train_optim/clip_fraction": "share"},
    ),
)


def pictures(run: RunRecord) -> list[tuple[str, Draw]]:
    """Return caption and function of each picture that the run has data for; those of user sections come second."""
    sums = Curve(
        title="Each reward, without its weight",
        caption="What each reward function, model or environment gave: their weighted sum is the reward.",
        lines={REWARD_PREFIX + name: name for name in components(run.steps)},
        low=None,
    )
    drawable = [
        (curve.caption, curve)
        for curve in (CURVES[0], sums, *CURVES[1:])
        if any(len(series(run.steps, key)[0]) > 1 for key in curve.lines)  # one point is no curve
    ]
    own = [(caption, draw) for section in run.sections for caption, draw in section.pictures.items()]
    return [*drawable[:1], *own, *drawable[1:]]


@contextlib.contextmanager
def figure_of(out: Path | TextIO, size: tuple[float, float], **metadata: None) -> Iterator[Any]:
    """Yield a styled figure of `size` inches; save it at the end of the block, as a PNG or, to a stream, as SVG.

    `metadata`: entries that the picture must not have, so that the same data give the same bytes.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, dpi=150, layout="constrained")
        yield figure
        figure.savefig(out, format=None if isinstance(out, Path) else "svg", metadata=metadata)


def as_svg(draw: Draw, run: RunRecord) -> str:
    """Return a picture of the run as SVG text."""
    out = StringIO()
    with figure_of(out, (6.2, 3.5), Date=None, Creator=None) as figure:
        draw(figure.subplots(), run)
    return out.getvalue()


def write_curves(run: RunRecord, out_png: Path) -> None:
    """Write one PNG with the first four pictures."""
    with figure_of(out_png, (10, 6.8), Software=None) as figure:
        for axes, picture in zip_longest(figure.subplots(2, 2).flat, pictures(run)[:4]):
            if picture is None:
                axes.remove()
            else:
                picture[1](axes, run)
