"""Spans: their parents and traces, what is sent, and that nothing is imported, sent or slowed without a collector."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
from span_collector import Collector, Span, collector

from python_backend.monitoring import tracing
from python_backend.monitoring.tracing import TracingUnavailable, end_step, parsed_traceparent, span, traceparent

pytest.importorskip("opentelemetry.exporter.otlp.json.http", reason="the extra `tracing` is not installed")
REMOTE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@pytest.fixture
def received() -> Iterator[Collector]:
    with collector() as server:
        yield server


def only(spans: list[Span]) -> Span:
    (found,) = spans
    return found


def test_spans_nest_and_carry_their_attributes(received: Collector) -> None:
    with tracing.tracing("actor", received.url + "/", "my-run"):
        assert traceparent() is None
        with span("outer", rows=3, kind="a"):
            with span("inner"):
                context = traceparent()
            with pytest.raises(ZeroDivisionError), span("failing"):
                _ = 1 / 0
    outer, inner = only(received.named("outer")), only(received.named("inner"))
    assert outer.attributes == {"rows": 3, "kind": "a"}
    assert (outer.service, outer.parent, inner.parent) == ("actor", "", outer.id)
    assert context is not None
    assert context.startswith(f"00-{inner.trace}-{inner.id}-0")
    assert parsed_traceparent(context) == context
    assert only(received.named("failing")).failed
    assert not outer.failed
    assert {each.trace for each in received.spans} == {outer.trace}
    assert set(received.requests) == {("/v1/traces", "application/json")}


def test_a_parent_in_another_process(received: Collector) -> None:
    with tracing.tracing("sidecar", received.url, "my-run"):
        with span("other"), span("train", parent=REMOTE, step=3):
            pass
        with span("untraced", parent=None, step=4):  # of a client that sends no context
            pass
        with span("unsampled", parent=REMOTE[:-1] + "0"):
            assert str(traceparent())[-2:] == "00"
    train = only(received.named("train"))
    assert (train.trace, train.parent, train.attributes) == ("a" * 32, "b" * 16, {"step": 3})
    assert not received.named("unsampled")
    assert only(received.named("untraced")).attributes == {"step": 4}
    assert not received.named("step"), "only the actor opens the span of a step"


def test_each_step_has_a_trace_even_if_two_overlap(received: Collector) -> None:
    async def phase(name: str, step: int) -> None:
        with span(name, of_step=step):
            await asyncio.sleep(0)
            with span("request"):
                await asyncio.sleep(0)

    async def run() -> None:
        await asyncio.gather(phase("train", 1), phase("rollout", 2))
        end_step(1)
        await phase("train", 2)
        end_step(2)
        end_step(2)

    with tracing.tracing("actor", received.url, "my-run"):
        asyncio.run(run())
    roots = {root.attributes["step"]: root for root in received.named("step")}
    assert sorted(roots) == [1, 2]
    assert roots[1].trace != roots[2].trace
    for name, step in (("rollout", 2), ("train", 1), ("train", 2)):
        found = only([each for each in received.named(name) if each.attributes["step"] == step])
        assert (found.trace, found.parent) == (roots[step].trace, roots[step].id)
    assert sorted(each.trace for each in received.named("request")) == sorted(
        [roots[1].trace, roots[2].trace, roots[2].trace]
    )


def test_a_step_that_never_ends_is_sent_at_the_end(received: Collector) -> None:
    with tracing.tracing("actor", received.url, "my-run"), span("rollout", of_step=1):
        pass
    assert only(received.named("rollout")).parent == only(received.named("step")).id


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "00",
        REMOTE[:-1],
        REMOTE + "0",
        REMOTE.upper(),
        "01" + REMOTE[2:],
        REMOTE + "\n",
        "00-" + "0" * 32 + "-" + "b" * 16 + "-01",
        "00-" + "a" * 32 + "-" + "0" * 16 + "-01",
        "ä" * 55,
    ],
)
def test_a_malformed_context_is_ignored(text: str | None) -> None:
    assert parsed_traceparent(text) is None
    assert parsed_traceparent(REMOTE) == REMOTE


def test_a_collector_that_refuses_or_hangs_costs_one_warning(
    received: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    monkeypatch.setattr(tracing, "STOP_S", 60.0)
    received.status = 400
    with caplog.at_level(logging.INFO), tracing.tracing("actor", received.url, "my-run"):
        for _ in range(5):
            with span("lost"):
                pass
    assert len(received.requests) == 5
    assert [record.getMessage() for record in caplog.records] == [
        f"run.trace_endpoint: {received.url} does not accept spans; they are dropped meanwhile"
    ]
    received.answering.clear()
    monkeypatch.setattr(tracing, "STOP_S", 0.1)
    with tracing.tracing("actor", received.url, "my-run"), span("waiting"):
        pass
    assert not received.answering.is_set()  # the block ended although no answer came


def test_nothing_happens_without_an_endpoint() -> None:
    script = (
        "import sys\n"
        "from python_backend.monitoring import tracing\n"
        "with tracing.tracing('actor', None, 'my-run'):\n"
        "    with tracing.span('a', step=1, parent='x'):\n"
        "        assert tracing.traceparent() is None\n"
        "    tracing.end_step(1)\n"
        "print(sorted(name for name in sys.modules if name.startswith('opentelemetry')))\n"
    )
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", script]
    assert subprocess.check_output(command, text=True, env=environment) == "[]\n"


def test_a_missing_extra_is_named() -> None:
    with (
        mock.patch.dict(sys.modules, {"opentelemetry.sdk.trace": None}),
        pytest.raises(
            TracingUnavailable, match=r"run\.trace_endpoint needs opentelemetry.*pip install '\.\[tracing\]'"
        ),
    ):
        tracing.start("actor", "http://localhost:4318", "my-run")
