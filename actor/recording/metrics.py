"""Writes each step's metrics to files, TensorBoard, trackers and Prometheus."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_triton.actor.recording.trackers import TEXTS_FILE, Trackers
from rlhf_triton.actor.run.staleness import Metric
from rlhf_triton.client.retry import RequestCounters
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.monitoring.metrics import ACTOR, Exporter, Values
from rlhf_triton.store.jsonl import append_jsonl, drop_steps_from, each_line


def finite(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line with None in place of NaN and infinity, which JSON cannot express."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()
    }


def kl_text(kl: float | None) -> str:
    """Return the text of a KL in a log line; "" if it is not measured."""
    return "" if kl is None else f", KL {round(kl, 2) + 0.0:.2f} nats per sequence"  # a rounded -0.0 becomes 0.0


def has_signal(line: Mapping[str, Any]) -> bool:
    """Return whether, by its line of metrics.jsonl, a step has a response with an advantage other than 0."""
    return any(line.get(f"train_rollouts/advantages_{name}", 1.0) != 0 for name in ("mean", "std"))


def figures_of_steps(path: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the last line of metrics.jsonl, {} if there is none, and the summary's figures of all its steps."""
    last: dict[str, Any] = {}
    num_steps = 0
    seconds = 0.0
    masked = 0
    useless = 0
    for line in each_line(path):
        last = line
        num_steps = num_steps + 1
        seconds += line.get("timers/step_time", 0.0)
        masked += int(line.get("train_rollouts/masked_samples", 0))
        useless += not has_signal(line)
    figures = {
        "masked_samples": masked,
        "steps_without_signal": useless,
        "seconds_per_step": seconds / max(1, num_steps),
    }
    return last, figures


class ActorMetrics:
    """Prometheus metrics of one actor, served if `monitoring.actor_port` is set."""

    def __init__(self, config: RunConfig, counters: RequestCounters, failed_critic_updates: Callable[[], int]) -> None:
        def live() -> Values:
            return {**vars(counters), "failed_critic_updates": failed_critic_updates()}

        self.exporter = Exporter("rlhf_actor_", ACTOR, config.run.dir, live=live)
        allowed = max(config.actor.max_staleness, config.trainer.publish.every - 1)
        self.exporter.show({"steps_planned": config.actor.steps, "step_timestamp_seconds": time.time()})
        if config.serves_critic:
            self.exporter.show({"allowed_staleness": allowed})
        self.exporter.serve(config.monitoring.host, config.monitoring.actor_port)

    def step(self, step: int, line: Mapping[str, Any]) -> None:
        """Export a step's timings and counters; `line` has the names of metrics.jsonl."""
        phases = {name.removeprefix("timers/"): value for name, value in line.items() if name.startswith("timers/")}
        phases.pop("step_time", None)
        self.exporter.show({"step": step, "step_timestamp_seconds": time.time(), "phase_seconds": phases})
        for spec in ACTOR:
            if spec.kind == "counter" and spec.key in line:
                self.exporter.count(spec.name, line[spec.key])

    def chart(self, line: Mapping[str, Any]) -> None:
        """Export the values of a step or a validation that have a gauge."""
        self.exporter.show({spec.name: line[spec.key] for spec in ACTOR if spec.kind == "gauge" and spec.key in line})


class MetricsLog:
    """Metrics log of one run: JSONL, TensorBoard, trackers and Prometheus.

    A resumed run drops the lines of steps that it repeats.
    """

    def __init__(
        self, run_dir: Path, *, first_step: int, trackers: Trackers, exported: ActorMetrics | None = None
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / "metrics.jsonl"
        drop_steps_from(first_step, self._path)
        self._trackers = trackers
        self._exported = exported
        self._texts_path = run_dir / TEXTS_FILE
        drop_steps_from(first_step, self._texts_path)
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Append the metrics as one line to metrics.jsonl, and chart them."""
        append_jsonl(self._path, [finite({"step": step, "time": time.time(), **metrics})])
        self.chart(metrics, step)
        if self._exported is not None:
            self._exported.step(step, metrics)

    def chart(self, metrics: Mapping[str, Metric], step: int) -> None:
        """Send metrics everywhere except to metrics.jsonl; counts become a histogram, in TensorBoard only."""
        for name, value in metrics.items():
            if isinstance(value, dict):
                self._board.add_histogram(name, np.repeat(list(map(int, value)), list(value.values())), step)
            else:
                self._board.add_scalar(name, value, step)
        self._board.flush()
        if self._exported is not None:
            self._exported.chart(metrics)
        self._trackers.log({name: value for name, value in metrics.items() if not isinstance(value, dict)}, step)

    def add_texts(self, texts: Sequence[Mapping[str, Any]]) -> None:
        """Write texts from `read_texts`, each with its step, to rollouts.jsonl, TensorBoard and trackers' tables."""
        append_jsonl(self._texts_path, texts)
        for i, text in enumerate(texts):
            shown = f"reward {text['reward']}\n\n**{text['prompt']}**{text['response']}"
            self._board.add_text(f"train_rollouts/text_{i}", shown, text["step"])
        if texts:
            self._trackers.add_texts(texts)

    def close(self) -> None:
        """Close the event file and the trackers."""
        self._board.close()
        self._trackers.finish()
