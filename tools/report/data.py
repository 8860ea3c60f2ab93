"""Reads a run, at any time, for the report: summary, steps, critic updates, held-out texts and their gains."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from actor.run.lock import LOCK_FILE, RUN_LOCK_FILE, in_progress
from actor.run.settings import CHANGES_FILE, SETTINGS_FILE, read_settings
from python_backend.errors import RlhfError
from python_backend.store.jsonl import each_line
from examples.demo.gold import paired_ci95
from tools.report.summary import Pair, current_summary, gold_gains, has_samples, read_pairs

Row = TypeVar("Row")
RUN_FILES = (SETTINGS_FILE, "metrics.jsonl", RUN_LOCK_FILE, LOCK_FILE)  # every run has one of these
ALL_WORDS = "all words"
MOST_DRAWN = 2000  # plotted steps, and critic updates: more look the same, but make a page of many megabytes
MOST_TEXTS = 8  # shown from the beginning of a run, and as many from its end
SHOWN_S = 0.005  # phases that are shorter would be shown as 0.00
# Timer -> label; "other" is the part of a step that no timer covers.
PHASES = {
    "timers/generate": "generate",
    "timers/logprobs": "log-probs",
    "timers/init_logprobs": "reference log-probs",
    "timers/score_wait": "waiting for scores",
    "timers/critic_wait": "waiting for the critic",
    "timers/train_time": "policy update",
    "other": "other",
}


class UnreadableRun(RlhfError):
    """A folder is missing, is no run, or has a damaged file."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The mean gain over the held-out prompts with its 95 % interval."""

    label: str
    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Data of the report, as read from the run folder."""

    name: str
    summary: dict[str, Any]
    settings: dict[str, Any]  # {`section.key`: value}; empty if `tools run` did not start the run
    steps: list[dict[str, Any]]  # every n-th step of a long run
    critic: list[dict[str, Any]]  # every n-th line of each kind; empty if the algorithm has no critic
    pairs: list[Pair]
    validations: list[dict[str, Any]]  # every n-th line; empty if the run does not validate
    changes: list[dict[str, Any]]  # resumes with other settings, as CHANGES_FILE has them
    texts: list[dict[str, Any]]  # from training rollouts, if the run has no pairs
    is_finished: bool  # the actor has done its last step and validation
    in_progress: bool

    @property
    def gold(self) -> bool:
        """Whether the held-out texts have a gold score, which the run was not trained on."""
        return "gold_before" in self.summary

    @cached_property
    def gains(self) -> list[Gain]:
        """The gold gain with the whole lexicon and, if there is a top word, without it; [] without gold scores."""
        if not self.gold:
            return []
        gains = [_gain(ALL_WORDS, *gold_gains(self.pairs))]
        top_word = self.summary.get("top_word")
        if top_word:
            gains.append(_gain(f"without “{top_word}”", *gold_gains(self.pairs, [top_word])))
        return gains


def load_run(run_dir: Path) -> RunRecord:
    """Return the data that a run's folder has now: finished, in progress or crashed. Raises UnreadableRun."""
    if not run_dir.is_dir():
        raise UnreadableRun(
            f"{run_dir} is {'not a folder' if run_dir.exists() else 'missing'}: name the folder of a run"
        )
    if not any((run_dir / name).is_file() for name in RUN_FILES):
        raise UnreadableRun(f"{run_dir} is no run: it has neither {SETTINGS_FILE} nor metrics.jsonl")
    try:
        return _load(run_dir.resolve())
    except ValueError as error:  # from a file that is not what the run wrote
        raise UnreadableRun(f"the run in {run_dir} cannot be read: {error}") from error


def _load(run_dir: Path) -> RunRecord:
    summary, is_finished = current_summary(run_dir)
    pairs = read_pairs(run_dir) if is_finished and has_samples(run_dir) else []
    return RunRecord(
        name=run_dir.name,
        summary=summary,
        settings=read_settings(run_dir / SETTINGS_FILE),
        steps=read_steps(run_dir / "metrics.jsonl"),
        critic=read_critic(run_dir) if "critic_updates" in summary else [],
        pairs=pairs,
        validations=read_steps(run_dir / "validations.jsonl"),
        changes=list(each_line(run_dir / CHANGES_FILE)),
        texts=[] if pairs else read_texts(run_dir),
        is_finished=is_finished,
        in_progress=in_progress(run_dir),
    )


def loading_line(run_dir: Path) -> str | None:
    """Return the line of Python that loads the policy that the run left; None if it has left none yet."""
    folder = run_dir / "policy"
    return f"AutoModelForCausalLM.from_pretrained({str(folder)!r})" if folder.is_dir() else None


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file by ascending step, thinned; for a step repeated after a resume, the last row."""
    chosen = Thinned[dict[str, Any]]()
    for row in each_line(path):
        while chosen.rows and chosen.rows[-1]["step"] >= row["step"]:
            chosen.rows.pop()
        chosen.add(row)
    return chosen.rows


def read_texts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the first and the last MOST_TEXTS lines of rollouts.jsonl; [] if the file is missing."""
    rows = each_line(run_dir / "rollouts.jsonl")
    return [*islice(rows, MOST_TEXTS), *deque(rows, MOST_TEXTS)]


def read_critic(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of critic_metrics.jsonl by time; updates and each kind of reload are thinned separately."""
    chosen: dict[str | None, Thinned[dict[str, Any]]] = {}
    for row in each_line(run_dir / "critic_metrics.jsonl"):
        chosen.setdefault(row.get("reload"), Thinned()).add(row)
    return sorted((row for kind in chosen.values() for row in kind.rows), key=lambda row: row["time"])


class Thinned(Generic[Row]):
    """Keeps every n-th row of a stream; n doubles whenever more than MOST_DRAWN rows are kept."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._every = 1
        self._seen = 0

    def add(self, row: Row) -> None:
        """Add the next row of the stream."""
        if self._seen % self._every == 0:
            self.rows.append(row)
        self._seen += 1
        if len(self.rows) > MOST_DRAWN:
            self.rows = self.rows[::2]
            self._every *= 2


def reward_gain(run: RunRecord) -> Gain | None:
    """Return the gain in reward over the pairs that have both rewards; None if there is no such pair."""
    scored = [
        (pair.reward_before, pair.reward_after)
        for pair in run.pairs
        if pair.reward_before is not None and pair.reward_after is not None
    ]
    return _gain("reward", [s[0] for s in scored], [s[1] for s in scored]) if scored else None


def phase_seconds(row: dict[str, Any]) -> dict[str, float]:
    """Return {label in PHASES: seconds} of a step; "other" is the time that no timer covers."""
    seconds = {name: number(row.get(key)) or 0.0 for key, name in PHASES.items()}
    total = number(row.get("timers/step_time")) or 0.0
    return seconds | {"other": max(0.0, total - sum(seconds.values()))}


def formatted(value: float, spec: str) -> str:
    """Return `format(value, spec)`, but without a minus sign if the result is 0."""
    text = format(value, spec)
    return text if text.strip("+-0.,") else format(0.0, spec)


def series(rows: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return (steps, values) of the rows in which `key` is a finite number."""
    found = [(row["step"], number(row.get(key))) for row in rows]
    kept = [(step, value) for step, value in found if value is not None]
    return [step for step, _ in kept], [value for _, value in kept]


def number(value: Any) -> float | None:
    """Return the value as a float; None unless it is a finite number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _gain(label: str, before: Sequence[float], after: Sequence[float]) -> Gain:
    low, high = paired_ci95(before, after)
    mean = statistics.fmean(after) - statistics.fmean(before)
    return Gain(label=label, mean=mean, low=low, high=high)
