"""The actor's metrics for Prometheus, from the numbers of each step and the counters of its client."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from python_backend.client.retry import RequestCounters
from python_backend.config import RunConfig
from python_backend.monitoring.exporter import CARD, Exporter, MetricSpec, Values

PREFIX = "rlhf_actor_"
STEP_GAUGES = {  # key in metrics.jsonl -> gauge
    "tokens_per_s": MetricSpec("tokens_per_second", "Response tokens of the last step, per second of the step."),
    "timers/step_time": MetricSpec("step_seconds", "Duration of the last step."),
    "train_rollouts/rewards": MetricSpec("reward", "Mean reward of the last step."),
    "train_rollouts/init_policy_kl_per_sequence": MetricSpec("kl_nats", "KL from the reference, nats per sequence."),
    "train_rollouts/kl_coef": MetricSpec("kl_coef", "KL coefficient."),
    "train_rollouts/generation_length": MetricSpec("response_tokens", "Mean length of the responses."),
    "train_rollouts/explained_variance": MetricSpec("explained_variance", "Explained variance of the critic's values."),
    "train_rollouts/weights_version": MetricSpec("weights_version", "Newest critic version that scored the last step."),
    "train_rollouts/staleness": MetricSpec("staleness", "Critic updates that the oldest scores of the step lack."),
    "train_rollouts/staleness_mean": MetricSpec("staleness_mean", "Mean number of critic updates that scores lack."),
    "train_rollouts/policy_staleness": MetricSpec("policy_lag", "Policy updates that the responses of the step lack."),
    "train_optim/loss": MetricSpec("loss", "Loss of the policy."),
    "train_optim/grad_norm": MetricSpec("grad_norm", "Norm of the policy's gradient, before clipping."),
    "val_rollouts/rewards": MetricSpec("validation_reward", "Mean reward of the last validation."),
    **CARD,
}
RUN_METRICS = (
    MetricSpec("step", "Last step that ended."),
    MetricSpec("steps_planned", "`actor.steps`."),
    MetricSpec("step_timestamp_seconds", "When the last step ended, or the actor started."),
    MetricSpec("allowed_staleness", "The staleness that `actor.max_staleness` and `trainer.publish.every` allow."),
    MetricSpec("phase_seconds", "Duration of each phase of the last step; phases overlap.", label="phase"),
    MetricSpec("rows", "Responses.", "counter"),
    MetricSpec("masked_rows", "Responses without a reward, which were masked.", "counter"),
    MetricSpec("failed_critic_updates", "Critic updates that the server answered with an error.", "counter"),
)
CLIENT_COUNTERS = (  # fields of RequestCounters
    MetricSpec("requests", "Requests to the servers.", "counter"),
    MetricSpec("retries", "Attempts after the first.", "counter"),
    MetricSpec("failovers", "Retries that went to another server at once.", "counter"),
    MetricSpec("over_budget", "Requests that failed because the retry budget was spent.", "counter"),
    MetricSpec("failed_requests", "Requests that failed for good.", "counter"),
    MetricSpec("outages", "How often no server was healthy.", "counter"),
    MetricSpec("outage_seconds", "Duration of the outages that have ended.", "counter"),
)
METRICS = (*STEP_GAUGES.values(), *RUN_METRICS, *CLIENT_COUNTERS)


class ActorMetrics:
    """What one actor shows to Prometheus, if `monitoring.actor_port` is set."""

    def __init__(self, config: RunConfig, counters: RequestCounters, failed_critic_updates: Callable[[], int]) -> None:
        def live() -> Values:
            return {**vars(counters), "failed_critic_updates": failed_critic_updates()}

        self.exporter = Exporter(PREFIX, METRICS, config.run.dir, live=live)
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
        self.exporter.count("rows", line["train_rollouts/rollout_size"])
        self.exporter.count("masked_rows", line["train_rollouts/masked_samples"])

    def chart(self, line: Mapping[str, Any]) -> None:
        """Show the numbers of a step or a validation that have a gauge."""
        self.exporter.show({gauge.name: line[key] for key, gauge in STEP_GAUGES.items() if key in line})
