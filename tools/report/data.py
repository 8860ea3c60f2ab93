"""The data reader of the report: summary, steps, critic updates, and held-out texts of a run, at any time."""

import json
import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_triton.actor.recording.metrics import figures_of_steps
from rlhf_triton.actor.run.settings import CHANGES_FILE, SETTINGS_FILE, flat_settings, started_with
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import read_json, replace_file
from rlhf_triton.store.jsonl import each_line
from rlhf_triton.store.run_lock import LOCK_FILE, RUN_LOCK_FILE, in_progress
from rlhf_triton.tools.report.sample_pairs import Gain, Pair, read_pairs, rewarded
from rlhf_triton.tools.report.user_sections import ReportSection, user_sections

RUN_FILES = (SETTINGS_FILE, "metrics.jsonl", RUN_LOCK_FILE, LOCK_FILE)  # every run has one of these
MAX_DRAWN = 2000  # plotted steps: more look the same, but make a page of many megabytes
MAX_TEXTS = 8  # shown from the beginning of a run, and as many from its end
REWARD_PREFIX = "train_rollouts/reward_"  # prefix of the metric with the mean of one of several rewards
# Timer -> label
PHASES = {
    "timers/generate": "generate",
    "timers/logprobs": "log-probs",
    "timers/init_logprobs": "reference log-probs",
    "timers/score_wait": "waiting for scores",
    "timers/critic_wait": "waiting for the critic",
    "timers/train_time": "policy update",
}
SUMMARY_KEYS = {  # possible keys of summary.json, in the file's order, with their descriptions in the report
    "steps": "Number of steps; each is one batch of rollouts and the update on it.",
    "reward_before": "Mean reward of the initial policy's texts on the held-out prompts.",
    "reward_after": "The same for the final policy, same prompts and sampling seeds.",
    "process_reward_before": "Mean reward of a step of these texts, by the process reward.",
    "process_reward_after": "The same for the final policy.",
    "steps_before": "Mean number of steps of the initial policy's texts.",
    "steps_after": "The same for the final policy.",
    "reward_gain_ci95": "95 % interval of the reward's gain: paired bootstrap over the prompts.",
    "kl_final": "KL from the initial to the final policy, nats per sequence, on the held-out prompts.",
    "unique_before": "Share of different responses among the held-out responses before training.",
    "unique_after": "The same after training: a collapse onto a few responses would show here.",
    "ev_v0": "Share of the returns' variance that critic version 0 explains on the held-out rollouts.",
    "ev_last": "The same for the last version, queried through the server, on the same rollouts.",
    "weights_version": "Version of the critic's weights that was served at the end.",
    "critic_updates": "Critic updates that were sent to the sidecar.",
    "failed_critic_updates": "Critic updates that failed in the sidecar; the run continued.",
    "reloads": "Versions of the critic that the server loaded during the run.",
    "failed_requests": "Requests that failed, by the client's count.",
    "server_failures": "Requests answered with an error other than 503, by the server's and its models' count.",
    "masked_samples": "Samples that were excluded from training because they have no reward.",
    "steps_without_signal": "Steps in which no response had an advantage, such as groups of equal rewards.",
    "seconds_total": "Seconds of the last `rlhf-triton run`, from its start to the report.",
    "seconds_per_step": "Mean seconds per step.",
    "reload_ms_p50": "Median milliseconds until the server has loaded a version; the old weights serve meanwhile.",
    "peak_rss_mb": "Peak memory of all processes together, in MB.",
}


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run, read from its folder; the argument of a `report` function."""

    folder: Path  # absolute
    summary: dict[str, Any]  # {name in SUMMARY_KEYS: value}
    settings: dict[str, Any]  # {`section.key`: value}; empty if `rlhf-triton run` did not start the run
    steps: list[dict[str, Any]]  # of a long run, every n-th step and the newest
    pairs: list[Pair]
    validations: list[dict[str, Any]]  # every n-th line and the newest; empty if the run does not validate
    changes: list[dict[str, Any]]  # resumes with other settings, as CHANGES_FILE has them
    texts: list[dict[str, Any]]  # from training rollouts, if the run has no pairs, or conversations
    is_finished: bool  # the actor has done its last step and validation
    in_progress: bool
    policy: Path | None  # the folder of the trained policy, absolute

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.folder.name

    @cached_property
    def sections(self) -> list[ReportSection]:
        """Sections from the function that `report` names."""
        return user_sections(self.settings.get("report"), self)

    @cached_property
    def reward_gain(self) -> Gain | None:
        """The gain in reward over the pairs that have both rewards; None without such pairs."""
        scored = rewarded(self.pairs)
        return Gain.of(scored) if scored else None


def check_run(run_dir: Path) -> None:
    """Raise RlhfError unless this is the folder of a run."""
    if not run_dir.is_dir():
        raise RlhfError(f"{run_dir} is {'not a folder' if run_dir.exists() else 'missing'}: name the folder of a run")
    if not any((run_dir / name).is_file() for name in RUN_FILES):
        raise RlhfError(f"{run_dir} is not a run's folder: it has neither {SETTINGS_FILE} nor metrics.jsonl")


def load_run(run_dir: Path) -> RunRecord:
    """Return the data that a run's folder has now: finished, in progress or crashed. Raises RlhfError."""
    check_run(run_dir)
    try:
        return _load(run_dir.resolve(), *_current_summary(run_dir))
    except ValueError as error:  # from a file that is not what the run wrote
        raise RlhfError(f"the run in {run_dir} cannot be read: {error}") from error


def finish_run(run_dir: Path, **measured: float) -> RunRecord:
    """Write summary.json of a run whose actor has finished, and return the run.

    The summary has the SUMMARY_KEYS that the run measured, those `measured` included, and the figures that its
    `report` function adds.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged.
    """
    run = _load(run_dir.resolve(), _finite_figures({**_actor_figures(run_dir), **measured}), True)
    added = {name: value for section in run.sections for name, (value, _) in section.figures.items()}
    summary = run.summary | {name: value for name, value in added.items() if _is_finite(value)}
    text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
    replace_file(run_dir / "summary.json", text.encode(), durable=False)
    return replace(run, summary=summary)


def _load(run_dir: Path, summary: dict[str, Any], is_finished: bool) -> RunRecord:
    started = started_with(run_dir)
    pairs = read_pairs(run_dir) if is_finished and _has_samples(run_dir) else []
    return RunRecord(
        folder=run_dir,
        summary=summary,
        settings={} if started is None else flat_settings(started),
        steps=read_steps(run_dir / "metrics.jsonl"),
        pairs=pairs,
        validations=read_steps(run_dir / "validations.jsonl"),
        changes=list(each_line(run_dir / CHANGES_FILE)),
        texts=[] if pairs and pairs[0].conversation_before is None else _read_texts(run_dir),
        is_finished=is_finished,
        in_progress=in_progress(run_dir),
        policy=run_dir / "policy" if loading_line(run_dir) else None,
    )


def _current_summary(run_dir: Path) -> tuple[dict[str, Any], bool]:
    """Return the summary of a run at any time, and whether its actor has finished.

    The summary is that of summary.json if it was written after the last step. Otherwise it has those SUMMARY_KEYS that
    the actor's own summary or the metrics of the steps provide.
    """
    figures = _step_figures(run_dir)
    written = read_json(run_dir / "summary.json") or {}
    if written.get("steps") == figures["steps"]:
        return written, True
    actor = read_json(run_dir / "actor_summary.json") or {}
    finished = actor.get("steps") == figures["steps"]
    return _finite_figures(_actor_figures(run_dir) if finished else figures), finished


def _actor_figures(run_dir: Path) -> dict[str, Any]:
    """Return the figures of a run whose actor has finished."""
    path = run_dir / "actor_summary.json"
    figures: dict[str, Any] | None = read_json(path)
    if figures is None:
        raise FileNotFoundError(f"{path} is missing: the actor writes it when its last step is done")
    # `reward_before` shows that the run validated; only a run that did not validate may lack samples.jsonl.
    if "reward_before" in figures or _has_samples(run_dir):
        figures = figures | _text_figures(read_pairs(run_dir))
    if "critic_updates" in figures:
        figures = figures | _reload_figures(each_line(run_dir / "critic_metrics.jsonl", required=True))
    return figures


def _step_figures(run_dir: Path) -> dict[str, Any]:
    """Return the figures of the steps so far, from metrics.jsonl and critic_metrics.jsonl."""
    last, of_steps = figures_of_steps(run_dir / "metrics.jsonl")
    if not last:
        return {"steps": 0}
    failed = int(last.get("client/failed_requests", 0))
    figures: dict[str, Any] = {"steps": last["step"], "failed_requests": failed, **of_steps}
    if "train_rollouts/weights_version" in last:
        figures["critic_updates"] = last["step"]
        figures["failed_critic_updates"] = int(last.get("client/failed_critic_updates", 0))
        figures |= _reload_figures(each_line(run_dir / "critic_metrics.jsonl"))
    return figures


def _text_figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the diversity of the responses, and mean rewards over the pairs that have both; {} without pairs."""
    if not pairs:
        return {}
    figures: dict[str, Any] = {}
    for when in ("before", "after"):
        responses = [getattr(pair, f"response_{when}") for pair in pairs]
        figures[f"unique_{when}"] = len(set(responses)) / len(responses)
    if scored := rewarded(pairs):
        gain = Gain.of(scored)
        figures["reward_before"] = gain.before
        figures["reward_after"] = gain.after
        figures["reward_gain_ci95"] = [gain.low, gain.high]
    return figures


def _reload_figures(critic: Iterable[dict[str, Any]]) -> dict[str, Any]:
    milliseconds = [row["reload_ms"] for row in critic if "reload_ms" in row]
    return {"reloads": len(milliseconds), "reload_ms_p50": statistics.median(milliseconds) if milliseconds else None}


def _finite_figures(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the SUMMARY_KEYS, in order, that have a value other than None, NaN and infinity."""
    return {key: figures[key] for key in SUMMARY_KEYS if _is_finite(figures.get(key))}


def _is_finite(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _has_samples(run_dir: Path) -> bool:
    """Return whether samples.jsonl has lines, that is, whether the run validated."""
    path = run_dir / "samples.jsonl"
    return path.is_file() and path.stat().st_size > 0


def loading_line(run_dir: Path) -> str | None:
    """Return the line of Python that loads the policy that the run left; None if it has left none yet."""
    folder = run_dir / "policy"
    return f"AutoModelForCausalLM.from_pretrained({str(folder)!r})" if folder.is_dir() else None


def read_steps(path: Path, most: float = MAX_DRAWN) -> list[dict[str, Any]]:
    """Return the rows of a file by ascending step, the last one of a step that a resume repeated.

    Of more than `most` rows, return every n-th and the newest.
    """
    rows: list[dict[str, Any]] = []
    every = 1
    newest: list[dict[str, Any]] = []
    for i, row in enumerate(each_line(path)):
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        if i % every == 0:
            rows.append(row)
        if len(rows) > most:
            rows = rows[::2]
            every *= 2
        newest = [row]
    return rows if rows[-1:] == newest else rows + newest


def _read_texts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the first and the last MAX_TEXTS lines of rollouts.jsonl; [] if the file is missing."""
    rows = each_line(run_dir / "rollouts.jsonl")
    return [*islice(rows, MAX_TEXTS), *deque(rows, MAX_TEXTS)]


def formatted(value: float, spec: str) -> str:
    """Return `format(value, spec)`, but without a minus sign if the result is 0."""
    text = format(value, spec)
    return text if text.strip("+-0.,") else format(0.0, spec)


def series(rows: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return (steps, values) of the rows in which `key` is a finite number."""
    points = [(row["step"], number(row.get(key))) for row in rows]
    finite = [(step, value) for step, value in points if value is not None]
    return [step for step, _ in finite], [value for _, value in finite]


def components(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the rewards of a weighted sum that rows of metrics.jsonl have; [] if it is a single one."""
    names = {name.removeprefix(REWARD_PREFIX) for row in rows for name in row if name.startswith(REWARD_PREFIX)}
    names = {name for name in names if name != "version" and not name.endswith("_missing")}
    return sorted(names) if len(names) > 1 else []


def number(value: Any) -> float | None:
    """Return the value as a float; None unless it is a finite number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
