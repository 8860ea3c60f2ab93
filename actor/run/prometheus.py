"""The actor's metrics for Prometheus, from the numbers of each step and the counters of its client."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from actor.scoring.retry import RequestCounters
from python_backend.config import RunConfig
from python_backend.monitoring.exporter import Exporter, Values
from python_backend.monitoring.metrics import ACTOR


class ActorMetrics:
    """What one actor shows to Prometheus, if `monitoring.actor_port` is set."""

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
        """Show the numbers of a step, named as in metrics.jsonl."""
        phases = {name.removeprefix("timers/"): value for name, value in line.items() if name.startswith("timers/")}
        phases.pop("step_time", None)
        self.exporter.show({"step": step, "step_timestamp_seconds": time.time(), "phase_seconds": phases})
        for spec in ACTOR:
            if spec.kind == "counter" and spec.key in line:
                self.exporter.count(spec.name, line[spec.key])

    def chart(self, line: Mapping[str, Any]) -> None:
        """Show the numbers of a step or a validation that have a gauge."""
        self.exporter.show({spec.name: line[spec.key] for spec in ACTOR if spec.kind == "gauge" and spec.key in line})
