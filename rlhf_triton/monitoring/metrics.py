"""The table of metrics of actor, sidecar and gateway, for exporters, `rlhf-triton status`, dashboards and docs.

`python deploy/monitoring/generate.py` writes the dashboards.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlhf_triton.errors import RlhfError

if TYPE_CHECKING:
    from prometheus_client.core import Metric


@dataclass(frozen=True)
class MetricSpec:
    """Declaration of a metric. The exporter adds its prefix to `name`, and the suffix `_total` to a counter."""

    name: str
    help: str
    kind: Literal["gauge", "counter", "histogram"] = "gauge"
    label: str = ""  # label name; several (gateway) are separated by commas
    unit: str = "short"  # Grafana's name of the unit
    key: str = ""  # key in metrics.jsonl; for a counter, of the amount that a step adds
    panel: str = ""  # title of the dashboard panel that shows the metric
    legend: str = ""
    query: str = "{}"  # the panel's query; {} is the exported name
    status: str = ""  # name in `rlhf-triton status`


RATE = "rate({}[$__rate_interval])"
INCREASE = "increase({}[5m])"
_ROLLOUT = "train_rollouts/"

GPU_MEMORY = (  # the keys of `rlhf_triton.models.out_of_memory.gpu_bytes`
    MetricSpec("gpu_bytes", "Memory of the GPU that the process's tensors take.", key="gpu_bytes"),
    MetricSpec("gpu_peak_bytes", "Largest gpu_bytes of the process so far.", key="gpu_peak_bytes"),
    MetricSpec("gpu_reserved_bytes", "Memory of the GPU that the process's allocator holds.", key="gpu_reserved_bytes"),
    MetricSpec("gpu_size_bytes", "Memory of the GPU.", key="gpu_size_bytes"),
)
SHARED = (
    *GPU_MEMORY,
    MetricSpec("log_messages", "Warnings and errors in the log.", "counter", "level"),
    MetricSpec("last_problem_timestamp_seconds", "When the last warning or error was logged.", label="level"),
    MetricSpec("disk_free_bytes", "Free space of the file system of run.dir."),
    MetricSpec("disk_size_bytes", "Size of the file system of run.dir."),
)
ACTOR = (
    MetricSpec(
        "tokens_per_second",
        "Response tokens of the last step, per second of the step.",
        key="tokens_per_s",
        panel="Tokens per second",
        legend="generated, per step",
    ),
    MetricSpec(
        "reward",
        "Mean reward of the last step.",
        key=f"{_ROLLOUT}rewards",
        panel="Reward",
        legend="training",
        status="reward",
    ),
    MetricSpec(
        "kl_nats",
        "KL from the reference, nats per sequence.",
        key=f"{_ROLLOUT}init_policy_kl_per_sequence",
        panel="KL from the reference",
        legend="nats per sequence",
        status="KL",
    ),
    MetricSpec("kl_coef", "KL coefficient.", key=f"{_ROLLOUT}kl_coef"),
    MetricSpec(
        "response_tokens",
        "Mean length of the responses.",
        key=f"{_ROLLOUT}generation_length",
        panel="Response length",
        legend="tokens",
    ),
    MetricSpec(
        "turns",
        "Mean number of the policy's turns in a conversation with an environment.",
        key=f"{_ROLLOUT}turns",
        status="turns",
    ),
    MetricSpec(
        "truncated",
        "Share of the conversations that a limit of `environment` or of generation ended.",
        key=f"{_ROLLOUT}truncated",
        status="truncated",
    ),
    MetricSpec(
        "failed_environments",
        "Share of the conversations whose environment failed.",
        key=f"{_ROLLOUT}failed_environments",
        status="failed environments",
    ),
    MetricSpec(
        "explained_variance",
        "Explained variance of the critic's values.",
        key=f"{_ROLLOUT}explained_variance",
        panel="Loss",
        legend="explained variance",
    ),
    MetricSpec(
        "weights_version",
        "Newest critic version that scored the last step.",
        key=f"{_ROLLOUT}weights_version",
        panel="Versions of the critic",
        legend="scored the last step",
    ),
    MetricSpec(
        "masked_rows",
        "Responses without a reward, which were masked.",
        "counter",
        key=f"{_ROLLOUT}masked_samples",
        panel="Failures, per 5 minutes",
        legend="masked rows",
        query=INCREASE,
        status="masked",
    ),
    MetricSpec(
        "staleness",
        "Critic updates missing from the oldest weights that scored the step.",
        key=f"{_ROLLOUT}staleness",
        panel="Staleness and policy lag",
        legend="staleness, maximum",
    ),
    MetricSpec(
        "staleness_mean",
        "Critic updates missing from the weights that scored the step, mean.",
        key=f"{_ROLLOUT}staleness_mean",
        panel="Staleness and policy lag",
        legend="staleness, mean",
        status="staleness",
    ),
    MetricSpec(
        "allowed_staleness",
        "The staleness that `actor.max_staleness` and `trainer.publish.every` allow.",
        panel="Staleness and policy lag",
        legend="staleness, allowed",
    ),
    MetricSpec(
        "policy_lag",
        "Policy updates missing from the weights that sampled the step.",
        key=f"{_ROLLOUT}policy_staleness",
        panel="Staleness and policy lag",
        legend="policy lag",
    ),
    MetricSpec(
        "step_seconds",
        "Duration of the last step.",
        unit="s",
        key="timers/step_time",
        panel="Phases of a step",
        legend="whole step",
        status="seconds a step",
    ),
    MetricSpec(
        "phase_seconds",
        "Duration of each phase of the last step; phases overlap.",
        label="phase",
        unit="s",
        panel="Phases of a step",
        legend="{{phase}}",
    ),
    MetricSpec("loss", "Loss of the policy.", key="train_optim/loss", panel="Loss", legend="policy"),
    MetricSpec(
        "grad_norm",
        "Norm of the policy's gradient, before clipping.",
        key="train_optim/grad_norm",
        panel="Gradient norm",
        legend="policy",
    ),
    MetricSpec(
        "validation_reward",
        "Mean reward of the last validation.",
        key="val_rollouts/rewards",
        panel="Reward",
        legend="validation",
    ),
    MetricSpec("step", "Last step that ended.", panel="Steps", legend="actor"),
    MetricSpec("steps_planned", "`actor.steps`.", panel="Steps", legend="planned"),
    MetricSpec("step_timestamp_seconds", "When the last step ended, or the actor started."),
    MetricSpec("rows", "Responses.", "counter", key=f"{_ROLLOUT}rollout_size"),
    MetricSpec("failed_critic_updates", "Critic updates that the server answered with an error.", "counter"),
    # Fields of RequestCounters:
    MetricSpec(
        "requests",
        "Requests to the servers.",
        "counter",
        unit="reqps",
        panel="Requests per second",
        legend="of the actor",
        query=RATE,
    ),
    MetricSpec(
        "retries",
        "Attempts after the first.",
        "counter",
        unit="reqps",
        panel="Requests per second",
        legend="retries",
        query=RATE,
    ),
    MetricSpec("failovers", "Retries that went to another server at once.", "counter"),
    MetricSpec("over_budget", "Requests that failed because the retry budget was spent.", "counter"),
    MetricSpec(
        "failed_requests",
        "Requests that failed after all retries.",
        "counter",
        panel="Failures, per 5 minutes",
        legend="failed requests",
        query=INCREASE,
    ),
    MetricSpec(
        "outages",
        "How often no server was healthy.",
        "counter",
        panel="Failures, per 5 minutes",
        legend="outages",
        query=INCREASE,
    ),
    MetricSpec("outage_seconds", "Duration of the outages that have ended.", "counter"),
    *SHARED,
)
TRAINER = (
    MetricSpec("step", "Last critic update that was trained or failed.", panel="Steps", legend="critic"),
    MetricSpec(
        "weights_version", "Version of the critic that CURRENT names.", panel="Versions of the critic", legend="CURRENT"
    ),
    MetricSpec("loss", "Mean loss of the last update.", panel="Loss", legend="critic"),
    MetricSpec(
        "grad_norm",
        "Mean norm of the gradient of the last update, before clipping.",
        panel="Gradient norm",
        legend="critic",
    ),
    MetricSpec("learning_rate", "Learning rate of the last update."),
    MetricSpec("update_seconds", "Duration of the last update."),
    MetricSpec(
        "publish_seconds",
        "Time to put the last version into service: write, verify, reload.",
        label="phase",
        unit="s",
        panel="Putting a version into service",
        legend="{{phase}}",
    ),
    MetricSpec("updates", "Critic updates that were trained.", "counter"),
    MetricSpec(
        "failed_updates",
        "Critic updates that failed, or whose version was rejected.",
        "counter",
        panel="Failures, per 5 minutes",
        legend="failed critic updates",
        query=INCREASE,
    ),
    MetricSpec("skipped_optimizer_steps", "Optimizer steps that were skipped: not finite, or no memory.", "counter"),
    MetricSpec("out_of_memory", "Micro-batches halved because the GPU was out of memory.", "counter"),
    MetricSpec(
        "rejected_versions",
        "Versions that verification or an instance rejected.",
        "counter",
        panel="Failures, per 5 minutes",
        legend="rejected versions",
        query=INCREASE,
    ),
    MetricSpec("heartbeat_timestamp_seconds", "When the sidecar last made progress or was idle."),
    MetricSpec("blocked", "1 while an error, such as a full disk, blocks the sidecar, otherwise 0."),
    MetricSpec(
        "journal_pending_entries",
        "Accepted requests that have no result yet.",
        panel="Journal",
        legend="pending entries",
    ),
    MetricSpec(
        "journal_last_step",
        "Last training step that the journal accepted.",
        panel="Journal",
        legend="steps not trained",
        query="{} - on () rlhf_trainer_step",
    ),
    *SHARED,
)
GATEWAY = (  # served at its own /metrics
    MetricSpec("requests", "Requests that ended; 499: the client has left.", "counter", "route,status"),
    MetricSpec("request_seconds", "Duration of a request, the wait for a server included.", "histogram", "route"),
    MetricSpec("requests_in_flight", "Requests that have not ended."),
    MetricSpec("rows", "Rows that were to be scored.", "counter"),
    MetricSpec("failed_rows", "Rows that got no reward.", "counter"),
)
TABLES = {"rlhf_actor_": ACTOR, "rlhf_trainer_": TRAINER, "rlhf_gateway_": GATEWAY}  # by prefix


logger = logging.getLogger(__name__)
LEVELS = ("warning", "error")
Values = Mapping[str, float | Mapping[str, float]]  # by name; with a label, by the label's value


class Exporter:
    """Exports the metrics of one process to Prometheus, as a collector of prometheus_client. Thread-safe.

    A gauge is absent until it has a value; a counter starts at 0. prometheus_client is imported only when needed,
    because `trainer --init-only` runs without it.
    """

    def __init__(
        self, prefix: str, metrics: Sequence[MetricSpec], run_dir: Path, *, live: Callable[[], Values] = dict
    ) -> None:
        """`live`: returns further values at each scrape; if it raises OSError or RlhfError, they are absent."""
        self.metrics = metrics
        self._prefix = prefix
        self._run_dir = run_dir
        self._live = live
        self._lock = threading.RLock()  # garbage collection inside it may log an error, which is counted
        self._values: dict[str, dict[str, float]] = {}
        for metric in self.metrics:
            if metric.kind == "counter" and not metric.label:
                self.count(metric.name, 0.0)
        for level in LEVELS:
            self.count("log_messages", 0.0, level)

    def show(self, values: Values) -> None:
        """Set metrics; a mapping by label value replaces all previous values of its metric."""
        with self._lock:
            self._values |= {name: _by_label(value) for name, value in values.items()}

    def count(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """Add to a counter."""
        with self._lock:
            counts = self._values.setdefault(name, {})
            counts[label] = counts.get(label, 0.0) + amount

    def count_log_message(self, level: str) -> None:
        """Count a log message of `level` "warning" or "error", and record the time."""
        self.count("log_messages", 1.0, level)
        with self._lock:
            self._values.setdefault("last_problem_timestamp_seconds", {})[level] = time.time()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that have a value; prometheus_client calls this at each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        current = self._all()
        for metric in self.metrics:
            if metric.name in current:
                family = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}[metric.kind]
                shown = family(self._prefix + metric.name, metric.help, labels=[metric.label] if metric.label else None)
                for label, value in current[metric.name].items():
                    shown.add_metric([label] if metric.label else [], value)
                yield shown

    def serve(self, host: str, port: int | None) -> None:
        """Serve the metrics in a thread until the process ends; no-op if `port` is None.

        If the port is in use, logs a warning instead of failing the run.
        """
        if port is None:
            return
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

        registry = CollectorRegistry()
        registry.register(self)  # a collector needs only `collect`
        ProcessCollector(registry=registry)
        try:
            server, _ = start_http_server(port, host, registry)
        except OSError as error:
            logger.warning("no metrics for Prometheus: %s:%d cannot be served: %s", host, port, error)
            return
        logging.getLogger().addHandler(_LogCounter(self))
        logger.info("metrics for Prometheus: http://%s:%d/metrics", host, server.server_port)

    def _all(self) -> dict[str, dict[str, float]]:
        with self._lock:
            values_by_metric = {name: dict(values) for name, values in self._values.items()}
        for read in (self._live, self._disk):
            try:
                values_by_metric |= {name: _by_label(value) for name, value in read().items()}
            except (OSError, RlhfError):  # thread edge: a scrape must not fail with the disk
                continue
        return values_by_metric

    def _disk(self) -> Values:
        usage = shutil.disk_usage(self._run_dir)
        return {"disk_free_bytes": usage.free, "disk_size_bytes": usage.total}


class _LogCounter(logging.Handler):
    """Counts logged warnings and errors for an exporter."""

    def __init__(self, exporter: Exporter) -> None:
        super().__init__(logging.WARNING)
        self._exporter = exporter

    def emit(self, record: logging.LogRecord) -> None:
        self._exporter.count_log_message("error" if record.levelno >= logging.ERROR else "warning")


def _by_label(value: float | Mapping[str, float]) -> dict[str, float]:
    return dict(value) if isinstance(value, Mapping) else {"": float(value)}
