"""Prints the phases, steps and validations of a run, a line each, as the actor and the sidecar record them."""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlhf_triton.monitoring.log_lines import say
from rlhf_triton.store.jsonl import NewLines
from rlhf_triton.store.run_lock import write_phase
from rlhf_triton.tools.report.data import REWARD_PREFIX, components, formatted, number

MAX_LINES = 100  # for a run's steps; more are left out
MAX_PAUSE_S = 60.0  # between lines for steps, whatever `MAX_LINES` leaves out
ETA_STEPS = 20  # steps whose intervals the estimate uses


class RunProgress:
    """Context manager that prints how far a run is; call `refresh` a few times a second while it is open."""

    def __init__(self, run_dir: Path, total_steps: int) -> None:
        self._run_dir = run_dir
        self._metrics = NewLines(run_dir / "metrics.jsonl")
        self._critic_metrics = NewLines(run_dir / "critic_metrics.jsonl")
        self._validations = NewLines(run_dir / "validations.jsonl")
        self._total = total_steps
        self._every = max(1, round(total_steps / MAX_LINES))
        self._recent = deque[dict[str, Any]](maxlen=ETA_STEPS + 1)  # the last steps
        self._reload: dict[str, Any] = {}  # the critic's last update that was published
        self._resumed_at = 0
        self._validated = -1  # step of the newest validation
        self._start = self._printed_at = time.monotonic()

    def __enter__(self) -> "RunProgress":
        for row in self._new_steps():  # steps from before a resume are not reported again
            self._resumed_at = row["step"]
        for _ in self._new_validations():
            pass
        return self

    def __exit__(self, *_: object) -> None:
        self.refresh()

    def phase(self, text: str) -> None:
        """Print the phase that begins now."""
        self.log(f"[{_clock(time.monotonic() - self._start)}] {text}")
        with contextlib.suppress(OSError):  # as in `log`
            write_phase(self._run_dir, text)  # for `rlhf-triton status`

    def log(self, text: str) -> None:
        """Print a line, if possible: a lost terminal or full disk must not keep a run from stopping in order."""
        say(text)

    def refresh(self) -> None:
        """Print a line for each step and validation recorded since the last call."""
        for row in self._new_steps():
            step = row["step"]
            is_late = time.monotonic() - self._printed_at > MAX_PAUSE_S
            if step % self._every == 0 or step in (1, self._total) or is_late:
                self._printed_at = time.monotonic()
                self.log(self._step_line(row))
        for line in self._new_validations():
            figures = [_format(line, "reward", "+.3f") or "unavailable", _format(line, "kl", ".2f", " nats of KL")]
            self.log(f"validation at step {line['step']}: reward {', '.join(filter(None, figures))}")

    def _new_validations(self) -> Iterator[dict[str, Any]]:
        """Yield validations of a later step than the last one yielded: a run that resumes rewrites the file."""
        for line in self._validations.read_objects():
            if line["step"] > self._validated:
                self._validated = line["step"]
                yield line

    def _new_steps(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of new steps; each is one of the recent ones before it is yielded."""
        for row in self._critic_metrics.read_objects():
            if row.get("reload"):
                self._reload = row
        last_yielded = 0
        for row in self._metrics.read_objects():
            step = row.get("step")
            if not isinstance(step, int):
                continue
            last = self._recent[-1]["step"] if self._recent else 0
            if step <= last:  # a resumed run has rewritten the file
                last_yielded = last
                self._recent.clear()
            self._recent.append(row)
            if step > last_yielded:
                yield row

    def _eta(self) -> str:
        """Return the time left, from the median interval between the latest steps; ignores pauses before a resume."""
        new = [row for row in self._recent if row["step"] > self._resumed_at]
        gaps = [after["time"] - before["time"] for before, after in pairwise(new)]
        last = self._recent[-1]
        per_step = statistics.median(gaps) if gaps else number(last.get("timers/step_time"))
        return "-" if per_step is None else _clock(per_step * (self._total - last["step"]))

    def _step_line(self, row: dict[str, Any]) -> str:
        served = self._reload or {"weights_version": row.get("train_rollouts/weights_version")}
        figures = [
            ("reward", _format(row, "train_rollouts/rewards", "+.3f")),
            *((name, _format(row, f"{REWARD_PREFIX}{name}", "+.3f")) for name in components([row])),
            ("useful prompts", _format(row, "train_rollouts/useful_prompts", ".0%")),
            ("KL", _format(row, "train_rollouts/init_policy_kl_per_sequence", ".2f")),
            ("tokens/s", _format(row, "tokens_per_s", ",.0f")),
            ("critic explains", _format(row, "train_rollouts/explained_variance", ".2f")),
            ("weights version", _format(served, "weights_version", ".0f")),
            ("reload", _format(self._reload, "reload_ms", ",.0f", " ms")),
            ("failed requests", _format(row, "client/failed_requests", ".0f")),
        ]
        available = (f"{name} {text}" for name, text in figures if text)  # a run without a critic has no critic figures
        parts = [f"step {row['step']}/{self._total}", *available, _format(row, "timers/step_time", ".1f", " s")]
        return "  ".join([*parts, f"ETA {self._eta()}"])


def _format(row: dict[str, Any], key: str, spec: str, unit: str = "") -> str:
    value = number(row.get(key))
    return "" if value is None else formatted(value, spec) + unit


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
