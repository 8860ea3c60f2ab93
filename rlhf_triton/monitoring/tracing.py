"""Sends spans of training steps to an OpenTelemetry collector, as OTLP over HTTP with JSON.

Without `run.trace_endpoint`, opentelemetry is not imported and every function here does nothing. The trace of a step
crosses processes as a W3C `traceparent`: a header of each request, then metadata of the journal's entry.
"""

import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from typing import Any

from rlhf_triton.errors import RlhfError

logger = logging.getLogger(__name__)
Attribute = str | int | float
STOP_S = 2.0  # how long the end of the process waits for unsent spans
TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class _Tracer:
    """The spans of one process. Exports in a background thread, which drops spans that it cannot send."""

    def __init__(self, process: str, endpoint: str, run: str) -> None:
        try:
            from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as error:
            raise RlhfError(f"run.trace_endpoint needs {error.name}: pip install '.[tracing]'") from error
        self._w3c = TraceContextTextMapPropagator()
        self._with_span = set_span_in_context
        resource = Resource.create({"service.name": process, "rlhf.run": run})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(_warn_once(exporter, endpoint)))
        self.tracer = self._provider.get_tracer("rlhf_triton")
        self._steps: dict[int, Any] = {}

    def context(self, parent: str | None, of_step: int | None) -> Any:
        """Return the parent's context; None for the current one."""
        if parent is not None:
            return self._w3c.extract({"traceparent": parent})
        if of_step is None or self.traceparent() is not None:
            return None
        if of_step not in self._steps:
            self._steps[of_step] = self.tracer.start_span("step", attributes={"step": of_step})
        return self._with_span(self._steps[of_step])

    def traceparent(self) -> str | None:
        carrier: dict[str, str] = {}
        self._w3c.inject(carrier)
        return carrier.get("traceparent")

    def end_step(self, step: int) -> None:
        if step in self._steps:
            self._steps.pop(step).end()

    def stop(self) -> None:
        for step in list(self._steps):
            self.end_step(step)
        # In a daemon thread, because the SDK waits up to 30 s for a collector that does not answer.
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-shutdown", daemon=True)
        closing.start()
        closing.join(STOP_S)


_tracer: _Tracer | None = None


def start(process: str, endpoint: str | None, run: str) -> None:
    """Send this process's spans to the collector at `endpoint`, a base URL; do nothing if it is None.

    Args:
        process: the spans' `service.name`.
        run: the run's identity.

    Raises:
        RlhfError: the extra `tracing` is not installed.
    """
    global _tracer
    if endpoint is not None:
        _tracer = _Tracer(process, endpoint, run)


def stop() -> None:
    """End all spans and send them; waits at most STOP_S."""
    global _tracer
    tracer = _tracer
    _tracer = None
    if tracer is not None:
        tracer.stop()


@contextlib.contextmanager
def tracing(process: str, endpoint: str | None, run: str) -> Iterator[None]:
    """Call `start`, and at the end of the block `stop`. Raises RlhfError as `start`."""
    start(process, endpoint, run)
    try:
        yield
    finally:
        stop()


@contextlib.contextmanager
def span(
    name: str, *, parent: str | None = None, of_step: int | None = None, **attributes: Attribute
) -> Iterator[None]:
    """Record the block as a span.

    Args:
        parent: `traceparent` of the parent, perhaps from another process; None: the current span.
        of_step: training step, recorded as the attribute `step`. Without a parent and a current span, the parent is the
            step's own span, which lasts until `end_step`.
    """
    tracer = _tracer
    if tracer is None:
        yield
        return
    if of_step is not None:
        attributes = {"step": of_step, **attributes}
    with tracer.tracer.start_as_current_span(name, tracer.context(parent, of_step), attributes=attributes):
        yield


def is_tracing() -> bool:
    """Return whether this process sends spans."""
    return _tracer is not None


def traceparent() -> str | None:
    """Return the `traceparent` of the current span; None if there is none."""
    return None if _tracer is None else _tracer.traceparent()


def end_step(step: int) -> None:
    """End the span of a training step; child spans, such as the critic's update, may end later."""
    if _tracer is not None:
        _tracer.end_step(step)


def parsed_traceparent(text: str | None) -> str | None:
    """Return `text` if it is a `traceparent` of version 00; None if it is missing or malformed."""
    return text if text is not None and TRACEPARENT.fullmatch(text) else None


def _warn_once(exporter: Any, endpoint: str) -> Any:
    """Make the exporter log one warning when it starts losing spans, instead of the SDK's repeated ones; return it."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    export = exporter.export
    is_failing = False

    def export_and_report(spans: Any) -> Any:
        nonlocal is_failing
        result = export(spans)
        failed = result.name != "SUCCESS"
        if failed and not is_failing:
            logger.warning("run.trace_endpoint: %s does not accept spans; they are dropped until it does", endpoint)
        is_failing = failed
        return result

    exporter.export = export_and_report
    return exporter
