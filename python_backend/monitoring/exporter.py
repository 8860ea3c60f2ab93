"""Serves the metrics of a process to Prometheus. A gauge is absent until it has a value; a counter starts at 0."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from python_backend.errors import RlhfError
from python_backend.monitoring.metrics import MetricSpec

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)
LEVELS = ("warning", "error")
Values = Mapping[str, float | Mapping[str, float]]  # by name; with a label, by the label's value


class Exporter:
    """The metrics of one process, as a collector of prometheus_client. Thread-safe.

    prometheus_client is imported only here and only to serve: `trainer --init-only` runs where it is not installed.
    """

    def __init__(
        self, prefix: str, metrics: Sequence[MetricSpec], run_dir: Path, *, live: Callable[[], Values] = dict
    ) -> None:
        """`live` returns further values at each scrape. After an OSError or RlhfError they are absent."""
        self.metrics = metrics
        self._prefix, self._run_dir, self._live = prefix, run_dir, live
        self._lock = threading.RLock()  # garbage collection inside it may log an error, which is counted
        self._values: dict[str, dict[str, float]] = {}
        for metric in self.metrics:
            if metric.kind == "counter" and not metric.label:
                self.count(metric.name, 0.0)
        for level in LEVELS:
            self.count("log_messages", 0.0, level)

    def show(self, values: Values) -> None:
        """Set metrics; a mapping of label values replaces those of before."""
        with self._lock:
            self._values |= {name: _by_label(value) for name, value in values.items()}

    def count(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """Add to a counter."""
        with self._lock:
            counts = self._values.setdefault(name, {})
            counts[label] = counts.get(label, 0.0) + amount

    def logged(self, level: str) -> None:
        """Count a message of the log, "warning" or "error", and note the time."""
        self.count("log_messages", 1.0, level)
        with self._lock:
            self._values.setdefault("last_problem_timestamp_seconds", {})[level] = time.time()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that have a value (called by prometheus_client at each scrape)."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found = self._all()
        for metric in self.metrics:
            if metric.name in found:
                family = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}[metric.kind]
                shown = family(self._prefix + metric.name, metric.help, labels=[metric.label] if metric.label else None)
                for label, value in found[metric.name].items():
                    shown.add_metric([label] if metric.label else [], value)
                yield shown

    def serve(self, host: str, port: int | None) -> None:
        """Serve the metrics, and those of the process, in a thread until the process ends; not if `port` is None.

        If the port is in use, log a warning and serve no metrics: a run must not fail for that.
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
            found = {name: dict(values) for name, values in self._values.items()}
        for read in (self._live, self._disk):
            try:
                found |= {name: _by_label(value) for name, value in read().items()}
            except (OSError, RlhfError):  # thread edge: a scrape must not fail with the disk
                continue
        return found

    def _disk(self) -> Values:
        usage = shutil.disk_usage(self._run_dir)
        return {"disk_free_bytes": usage.free, "disk_size_bytes": usage.total}


class _LogCounter(logging.Handler):
    """Counts warnings and errors of the log for an exporter."""

    def __init__(self, exporter: Exporter) -> None:
        super().__init__(logging.WARNING)
        self._exporter = exporter

    def emit(self, record: logging.LogRecord) -> None:
        self._exporter.logged("error" if record.levelno >= logging.ERROR else "warning")


def _by_label(value: float | Mapping[str, float]) -> dict[str, float]:
    return dict(value) if isinstance(value, Mapping) else {"": float(value)}
