"""A process's metrics, logs and traces, its signals and its memory."""

import asyncio
import gc
import json
import logging
import signal
import socket
import subprocess
import sys
import weakref
from unittest import mock

import pytest
import triton_python_backend_utils as stub
from scrape import scrape
from span_collector import Collector

from rlhf_triton.errors import RlhfError
from rlhf_triton.monitoring import log_lines, tracing
from rlhf_triton.monitoring.log_lines import JsonFormatter, parsed, set_log_position
from rlhf_triton.monitoring.metrics import SHARED, Exporter, MetricSpec
from rlhf_triton.monitoring.tracing import end_step, parsed_traceparent, span, traceparent
from rlhf_triton.process import StopRequested, StopSignals, long_lived_imports
from rlhf_triton.python_backend.serving.triton import Gauge, MetricCounters
from rlhf_triton.tools.server.ports import free_port


@pytest.fixture(autouse=True)
def as_in_a_fresh_process():
    """Undo what lasts until a process ends: an exporter's log handlers and the signal handlers."""
    root = logging.getLogger()
    before = list(root.handlers)
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with mock.patch.dict(log_lines._position, step=None, version=None):
        yield
    for handler in set(root.handlers) - set(before):
        root.removeHandler(handler)
    for number, handled in kept.items():
        signal.signal(number, handled)


# ---- metrics ----


METRICS = (
    MetricSpec("step", "Last step."),
    MetricSpec("phase_seconds", "Phases.", label="phase"),
    MetricSpec("rows", "Rows.", "counter"),
    MetricSpec("depth", "Depth of a queue."),
    *SHARED,
)


def test_exporter_shows_gauges_counters_and_counts_log_messages(tmp_path):
    depth = []

    def live():
        if not depth:
            raise OSError("the disk is away")
        return {"depth": depth[-1]}

    port = free_port()
    exporter = Exporter("rlhf_test_", METRICS, tmp_path, live=live)
    exporter.serve("127.0.0.1", port)
    logging.getLogger("anything").info("fine")
    first = scrape(port, "rlhf_test_")
    assert first.pop("disk_size_bytes") >= first.pop("disk_free_bytes") > 0
    assert first == {"rows_total": 0, "log_messages_totalwarning": 0, "log_messages_totalerror": 0}
    exporter.show({"step": 3, "phase_seconds": {"generate": 1.5, "score": 0.5}})
    exporter.show({"phase_seconds": {"generate": 2.5}})  # a phase that the next step did not have
    for amount in (8, 4):
        exporter.count("rows", amount)
    depth.append(7)
    for level in (logging.WARNING, logging.ERROR, logging.CRITICAL):
        logging.getLogger("anything").log(level, "odd")
    assert scrape(port, "process_")["resident_memory_bytes"] > 0
    found = scrape(port, "rlhf_test_")
    last = [found.pop(f"last_problem_timestamp_seconds{level}") for level in ("warning", "error")]
    assert 0 < last[0] <= last[1]
    assert {name: value for name, value in found.items() if "disk" not in name} == {
        "step": 3,
        "phase_secondsgenerate": 2.5,
        "rows_total": 12,
        "depth": 7,
        "log_messages_totalwarning": 1,
        "log_messages_totalerror": 2,
    }


def test_exporter_is_off_without_a_port_and_warns_once_if_it_is_taken(tmp_path, caplog):
    handlers = list(logging.getLogger().handlers)
    Exporter("rlhf_test_", METRICS, tmp_path).serve("127.0.0.1", None)
    assert (logging.getLogger().handlers, caplog.messages) == (handlers, [])
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        Exporter("rlhf_test_", METRICS, tmp_path).serve("127.0.0.1", port)
    assert f"127.0.0.1:{port} cannot be served" in caplog.text
    assert len(caplog.messages) == 1


def test_triton_metric_families_are_never_freed(monkeypatch):
    """Triton's stub segfaults if it frees a metric family when a model is unloaded."""
    families = weakref.WeakSet[stub.MetricFamily]()
    metric = stub.MetricFamily()

    class Family(stub.MetricFamily):
        def Metric(self, **_):  # the real one does not hold its family either
            families.add(self)
            return metric

    with monkeypatch.context() as patch:
        patch.setattr(stub, "MetricFamily", Family)
        MetricCounters("critic", {"one": "", "two": ""})
        Gauge("critic", "three", "")
    gc.collect()
    assert len(families) == 3


# ---- log lines ----


def line(message="hello", *arguments, rank=0, **attributes):
    """Return what the formatter writes for a record."""
    record = logging.LogRecord("actor.loop", logging.WARNING, "loop.py", 1, message, arguments, None)
    vars(record).update(created=1_700_000_000.25, **attributes)
    text = JsonFormatter("actor", "my-run", rank).format(record)
    assert "\n" not in text
    assert text.isascii()
    assert parsed(text) == ("WARNING", record.getMessage())
    return dict(json.loads(text))


def test_json_log_line_has_all_fields():
    assert line("%d of %d", 3, 8) == {
        "time": "2023-11-14T22:13:20.250+00:00",
        "level": "WARNING",
        "process": "actor",
        "run": "my-run",
        "step": None,
        "version": None,
        "logger": "actor.loop",
        "message": "3 of 8",
    }
    assert line("zwei\nZeilen – \ud800")["message"] == "zwei\nZeilen – \ud800"
    assert line(rank=2)["rank"] == 2


def test_log_position_persists_until_it_is_set_again():
    set_log_position(step=7, version=3)
    set_log_position(step=8)
    lines = [line(), line(step=2, version=1)]  # the second is written by a task that works on another step
    set_log_position(version=0)
    assert [(each["step"], each["version"]) for each in (*lines, line())] == [(8, 3), (2, 1), (8, 0)]


@pytest.mark.parametrize("text", ["10:00:00 ERROR no disk", "", "[1]", "null", '{"level": "ERROR"}'])
def test_log_lines_of_other_programs_are_not_parsed(text):
    assert parsed(text) is None


SCRIPT = """
logging.getLogger("a.b").info("an %s", "info")
logging.getLogger("a.b").debug("not logged")
warnings.warn("old")
say("  | warning: from the server", sys.stderr)
say("plain", sys.stderr)
report(ValueError("critic.model: missing"), 2)
type("Odd", (), {"__del__": lambda self: {}["gone"]})()
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise RuntimeError("the end")
"""


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_stderr_warnings_and_exceptions_become_log_lines(log_format):
    start = (
        "import logging, sys, threading, warnings\n"
        "from rlhf_triton.config.command_line import log_to_stderr, report\n"
        "from rlhf_triton.config.sections import RunSection\n"
        "from rlhf_triton.monitoring.log_lines import say\n"
        f"log_to_stderr('sidecar', RunSection(run_id='r1', log_format={log_format!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", start + SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    if log_format == "text":
        assert lines[0].endswith(" INFO an info")
        assert {"  | warning: from the server", "error: critic.model: missing"} < set(lines)
        assert lines[-1] == "RuntimeError: the end"
        return
    found = [json.loads(text) for text in lines]
    assert {(each["process"], each["run"]) for each in found} == {("sidecar", "r1")}
    assert [(each["level"], each["message"].partition(" <")[0]) for each in found if "old" not in each["message"]] == [
        ("INFO", "an info"),
        ("WARNING", "from the server"),
        ("INFO", "plain"),
        ("ERROR", "critic.model: missing"),
        ("ERROR", "exception ignored in"),
        ("CRITICAL", "uncaught exception"),
        ("CRITICAL", "uncaught exception"),
    ]
    assert [each["level"] for each in found if "old" in each["message"]] == ["WARNING"]
    assert [each["exception"].splitlines()[-1] for each in found[-2:]] == [
        "ZeroDivisionError: division by zero",
        "RuntimeError: the end",
    ]


# ---- spans ----

REMOTE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@pytest.fixture
def received():
    pytest.importorskip("opentelemetry.exporter.otlp.json.http", reason="the extra `tracing` is not installed")
    with Collector() as server:
        yield server
        server.answering.set()


def only(spans):
    (found,) = spans
    return found


def test_spans_nest_and_carry_their_attributes(received):
    with tracing.tracing("actor", received.url + "/", "my-run"):
        assert traceparent() is None
        with span("outer", rows=3, kind="a"):
            with span("inner"):
                context = str(traceparent())
            with pytest.raises(ZeroDivisionError), span("failing"):
                _ = 1 / 0
    outer, inner, failing = (only(received.named(name)) for name in ("outer", "inner", "failing"))
    assert (outer.service, outer.attributes) == ("actor", {"rows": 3, "kind": "a"})
    assert [each.parent for each in (outer, inner, failing)] == ["", outer.id, outer.id]
    assert [each.failed for each in (outer, inner, failing)] == [False, False, True]
    assert {each.trace for each in received.spans} == {outer.trace}
    assert context.startswith(f"00-{inner.trace}-{inner.id}-0")
    assert parsed_traceparent(context) == context
    assert set(received.requests) == {("/v1/traces", "application/json")}


def test_span_continues_a_remote_parents_trace(received):
    with tracing.tracing("sidecar", received.url, "my-run"):
        with span("other"), span("train", parent=REMOTE, step=3):
            pass
        with span("untraced", parent=None, step=4):  # the client sends no context
            pass
        with span("unsampled", parent=REMOTE[:-1] + "0"):
            assert str(traceparent())[-2:] == "00"
    train = only(received.named("train"))
    assert (train.trace, train.parent, train.attributes) == ("a" * 32, "b" * 16, {"step": 3})
    assert only(received.named("untraced")).attributes == {"step": 4}
    assert received.named("unsampled") == received.named("step") == [], (
        "another process than the actor opened the span of a step"
    )


def test_each_step_has_a_trace_even_if_two_overlap_and_one_never_ends(received):
    async def phase(name, step):
        with span(name, of_step=step):
            await asyncio.sleep(0)
            with span("request"):
                await asyncio.sleep(0)

    async def run():
        await asyncio.gather(phase("train", 1), phase("rollout", 2))
        end_step(1)
        await phase("train", 2)
        for _ in range(2):
            end_step(2)
        await phase("rollout", 3)

    with tracing.tracing("actor", received.url, "my-run"):
        asyncio.run(run())
    roots = {root.attributes["step"]: root for root in received.named("step")}
    assert len({root.trace for root in roots.values()}) == len(roots) == 3
    parents = [(each.trace, each.parent) for each in (*received.named("train"), *received.named("rollout"))]
    assert sorted(parents) == sorted((roots[step].trace, roots[step].id) for step in (1, 2, 2, 3))
    assert sorted(each.trace for each in received.named("request")) == sorted(trace for trace, _ in parents)


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
def test_malformed_traceparent_is_ignored(text):
    assert parsed_traceparent(text) is None
    assert parsed_traceparent(REMOTE) == REMOTE


def test_failing_trace_collector_causes_one_warning(received, caplog, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    monkeypatch.setattr(tracing, "STOP_S", 60.0)
    received.status = 400
    with tracing.tracing("actor", received.url, "my-run"):
        for _ in range(5):
            with span("lost"):
                pass
    assert len(received.requests) == 5
    assert caplog.messages == [
        f"run.trace_endpoint: {received.url} does not accept spans; they are dropped until it does"
    ]
    received.answering.clear()
    monkeypatch.setattr(tracing, "STOP_S", 0.1)
    with tracing.tracing("actor", received.url, "my-run"), span("waiting"):
        pass
    assert not received.answering.is_set()  # the block ended although no answer came


def test_tracing_imports_nothing_without_an_endpoint():
    script = (
        "import sys\n"
        "from rlhf_triton.monitoring import tracing\n"
        "with tracing.tracing('actor', None, 'my-run'):\n"
        "    with tracing.span('a', step=1, parent='x'):\n"
        "        assert tracing.traceparent() is None\n"
        "    tracing.end_step(1)\n"
        "print(sorted(name for name in sys.modules if name.startswith('opentelemetry')))\n"
    )
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", script]
    assert subprocess.check_output(command, text=True, env=environment) == "[]\n"


def test_tracing_without_opentelemetry_names_the_missing_extra():
    with (
        mock.patch.dict(sys.modules, {"opentelemetry.sdk.trace": None}),
        pytest.raises(RlhfError, match=r"run\.trace_endpoint needs opentelemetry.*pip install '\.\[tracing\]'"),
    ):
        tracing.start("actor", "http://localhost:4318", "my-run")


# ---- signals ----


INSIDE_WAIT = """
import signal
from rlhf_triton.process import stop_event
stop = stop_event(signal.SIGINT, signal.SIGTERM)
with stop._cond:  # as the main thread does for a moment in each stop.wait()
    signal.raise_signal(signal.{name})
assert stop.wait(120)
"""


JUST_BEFORE_WAIT = """
import os, signal, threading
from rlhf_triton.process import stop_event
stop = stop_event(signal.SIGINT, signal.SIGTERM)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.{name}])  # as if it came just before the wait: that is not interrupted
def elsewhere():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.{name}])
    os.kill(os.getpid(), signal.{name})
timer = threading.Timer(0.2, elsewhere)
timer.start()
assert stop.wait(120)
"""


@pytest.mark.parametrize("script", [INSIDE_WAIT, JUST_BEFORE_WAIT], ids=["within a wait", "just before it"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signal_ends_a_wait_without_a_deadlock(script, name):
    subprocess.run([sys.executable, "-c", script.format(name=name)], check=True, timeout=120)


def test_stop_signal_raises_once_and_only_within_raising():
    signals = StopSignals()
    signals.check()
    signal.raise_signal(signal.SIGTERM)  # as between the start of a process and its assignment
    with pytest.raises(StopRequested), signals.raising():
        pytest.fail("it arrived before")
    signals.check()
    with pytest.raises(StopRequested), signals.raising():
        signal.raise_signal(signal.SIGINT)
    with signals.raising():
        pass
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(StopRequested):
        signals.check()
    assert signals.count == 3


# ---- the garbage collector ----


def test_garbage_collection_skips_objects_of_imports():
    try:
        with long_lived_imports():
            assert not gc.isenabled()
            lasting = []
        later = []
        assert gc.isenabled()
        assert [any(item is each for item in gc.get_objects()) for each in (lasting, later)] == [False, True]
    finally:
        gc.unfreeze()
