"""`make demo-sao`: GRPO, SAO, and SAO with a pretrained critic at equal generated tokens.

The runs are `grpo`, `sao` and `sao-pretrained` in one folder, with the same tasks and held-out sums. The third run has
another seed, so that its responses are not those from which its critic was pretrained. Its report and its summary.json
have the comparison.
"""

import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from examples.demo.pretrained import CRITIC_LAYERS, Built, Log, build_once, code_fingerprint
from tools.report.curves import EXPLAINED, finish, line_style
from tools.report.data import Gain, ReportSection, RunRecord, load_run, rewarded, series

GRPO, COLD, PRETRAINED = ARMS = ("grpo", "sao", "sao-pretrained")
OTHER_SEED = 1000  # added to the seed
SHARE = 0.9  # of the cold run's final accuracy: a run is compared by the step at which it had that
FIGURES = {  # of each run -> (head of the table's column, description in the report)
    "before": ("accuracy before", "Accuracy of the initial policy on the held-out sums."),
    "after": ("after", "Accuracy of the final policy on the same sums."),
    "after_ci95": ("95 % interval", "Its 95 % interval: bootstrap over the sums."),
    "tokens": ("tokens generated", "Tokens generated in training."),
    "explained_first": (
        "explained variance, step 1",
        "Variance of the returns that the critic explains in step 1, before it learned from this run.",
    ),
    "explained_last": ("last quarter", "The same in training, mean over the last quarter of the steps."),
    "reached": ("step at 90 %", "Step at which the accuracy was 90 % of the cold SAO run's final one."),
    "minutes": ("minutes", "Minutes of the whole run."),
}


def prepare(out_dir: Path, policy: Path, quick: bool, log: Log = print) -> Built:
    """Return the folder with `critic`, the policy's lowest layers with a zero head; build it if needed."""
    from examples.demo.models import save_critic  # imports torch

    def build(folder: Path) -> dict[str, Any]:
        save_critic(policy, folder / "critic", num_hidden_layers=1 if quick else CRITIC_LAYERS)
        return {}

    return build_once(out_dir, code_fingerprint("torch", "transformers"), build, log)


def compare(folder: Path, overrides: Sequence[str], seed: int) -> int:
    """Do the three runs in `folder` and compare them; return 0, or the exit code of the first that did not finish."""
    from tools import run
    from tools.report import page

    pretrain = f"critic.pretrain={json.dumps([str(folder / COLD)])}"
    other = f"run.seed={seed + OTHER_SEED}"
    warm = [pretrain, other, "actor.algorithm.critic_warmup_steps=0", f"report={__name__}:sections"]
    for arm in ARMS:
        config = "configs/rlvr.yaml" if arm == GRPO else "configs/sao.yaml"
        print(f"{folder / arm}: {config}", flush=True)
        own = [f"run.dir={folder / arm}", *(warm if arm == PRETRAINED else ())]
        if code := run.main(["--fresh", "--config", config, "actor.validation.every=5", *overrides, *own]):
            return code
    return page.main([*(str(folder / arm) for arm in ARMS), "--out", str(folder / "comparison.html")])


def sections(run: RunRecord) -> list[ReportSection]:
    """Return the comparison of a finished run with the others in its folder, or []. Raises RlhfError."""
    if not run.pairs:
        return []
    folder = Path(run.settings["run.dir"]).parent
    runs = {arm: run if arm == run.name else load_run(folder / arm) for arm in ARMS}
    goal = SHARE * runs[COLD].summary["reward_after"]
    measured = {arm: figures(each, goal) for arm, each in runs.items()}
    known = {f"{arm}_{name}": (each[name], FIGURES[name][1]) for arm, each in measured.items() for name in FIGURES}
    results = []
    for arm in (COLD, PRETRAINED):
        gain = gain_over(runs[arm], runs[GRPO])
        known[f"{arm}_gain_ci95"] = (
            [gain.low, gain.high],
            f"95 % interval of the final accuracy of {arm} over GRPO's.",
        )
        results.append(
            f"Accuracy of {arm} over GRPO's: {gain.mean:+.3f}, 95 % interval [{gain.low:.3f}, {gain.high:.3f}]."
        )

    def draw(axes: Any, run: RunRecord) -> None:
        for i, (arm, each) in enumerate(runs.items()):
            steps, values = series(each.validations, "reward")
            low, high = np.transpose([interval(value, len(each.pairs)) for value in values])
            axes.fill_between(steps, low, high, color=line_style(i)[0], alpha=0.15, lw=0)
            axes.plot(steps, values, color=line_style(i)[0], marker="o", ms=3, label=arm)
        finish(axes, "Accuracy on held-out sums", "step")

    rows = [[arm, *("–" if value is None else value for value in each.values())] for arm, each in measured.items()]
    return [
        ReportSection(
            title="GRPO and SAO at equal generated tokens",
            table=[["run", *(head for head, _ in FIGURES.values())], *rows],
            pictures={"Accuracy on the held-out sums, with 95 % intervals: bootstrap over the sums.": draw},
            results=results,
            figures=known,
        )
    ]


def figures(run: RunRecord, goal: float) -> dict[str, Any]:
    """Return {name in FIGURES: value} of a run; None where it has no critic, or never reached the accuracy `goal`."""
    explained = series(run.steps, EXPLAINED)[1]
    lengths = series(run.steps, "train_rollouts/generation_length")[1]
    after = run.summary["reward_after"]
    return {
        "before": run.summary["reward_before"],
        "after": after,
        "after_ci95": interval(after, len(run.pairs)),
        "tokens": round(sum(lengths) * run.settings["actor.rollout_size"]),
        "explained_first": next(iter(explained), None),
        "explained_last": statistics.fmean(explained[-max(1, len(explained) // 4) :]) if explained else None,
        "reached": step_of(goal, *series(run.validations, "reward")),
        "minutes": run.summary["seconds_total"] / 60,
    }


def interval(accuracy: float, number: int) -> list[float]:
    """Return the 95 % percentile bootstrap interval of the mean of `number` rewards of 0 or 1.

    A resample of such rewards has a binomial number of ones.
    """
    means = np.random.default_rng(0).binomial(number, accuracy, 4000) / number
    return np.percentile(means, [2.5, 97.5]).tolist()


def gain_over(run: RunRecord, other: RunRecord) -> Gain:
    """Return the final accuracy of a run minus that of another one, paired by held-out sum."""
    known = {pair.prompt_id: after for pair, _, after in rewarded(other.pairs)}
    both = [(pair, known[pair.prompt_id], after) for pair, _, after in rewarded(run.pairs) if pair.prompt_id in known]
    return Gain.of(both)


def step_of(goal: float, steps: Sequence[int], values: Sequence[float]) -> float | None:
    """Return the first step at which the values, linear between validations, are at least `goal`; None: never."""
    if values and values[0] >= goal:
        return float(steps[0])
    for (left, low), (right, high) in pairwise(zip(steps, values, strict=True)):
        if high >= goal:
            return left + (right - left) * (goal - low) / (high - low)
    return None
