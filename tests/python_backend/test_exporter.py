"""`python_backend.monitoring.exporter`: what Prometheus reads over HTTP; a taken port costs only the metrics."""

from __future__ import annotations

import logging
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from python_backend.monitoring.exporter import Exporter, Values
from python_backend.monitoring.metrics import SHARED, MetricSpec
from tools.server.ports import free_port

METRICS = (
    MetricSpec("step", "Last step."),
    MetricSpec("phase_seconds", "Phases.", label="phase"),
    MetricSpec("rows", "Rows.", "counter"),
    MetricSpec("depth", "Depth of a queue."),
    *SHARED,
)


@pytest.fixture(autouse=True)
def same_log_handlers() -> Iterator[None]:
    """An exporter that serves watches the log until its process ends."""
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in set(root.handlers) - set(before):
        root.removeHandler(handler)


def scrape(port: int) -> dict[str, float]:
    """The samples of `rlhf_test_` by name and label."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    ours = {s.name + "".join(s.labels.values()): s.value for s in samples if s.name.startswith("rlhf_test_")}
    assert any(sample.name == "process_resident_memory_bytes" for sample in samples)
    return {name.removeprefix("rlhf_test_"): value for name, value in ours.items()}


def test_a_gauge_appears_with_its_value_and_a_counter_starts_at_0(tmp_path: Path) -> None:
    depth: list[float] = []

    def live() -> Values:
        if not depth:
            raise OSError("the disk is away")
        return {"depth": depth[-1]}

    port = free_port()
    exporter = Exporter("rlhf_test_", METRICS, tmp_path, live=live)
    exporter.serve("127.0.0.1", port)
    first = scrape(port)
    assert first.pop("disk_size_bytes") >= first.pop("disk_free_bytes") > 0
    assert first == {"rows_total": 0, "log_messages_totalwarning": 0, "log_messages_totalerror": 0}
    exporter.show({"step": 3, "phase_seconds": {"generate": 1.5, "score": 0.5}})
    exporter.show({"phase_seconds": {"generate": 2.5}})  # a phase that the next step did not have
    exporter.count("rows", 8)
    exporter.count("rows", 4)
    depth.append(7)
    found = scrape(port)
    assert (found["step"], found["rows_total"], found["depth"]) == (3, 12, 7)
    assert {name: value for name, value in found.items() if "phase" in name} == {"phase_secondsgenerate": 2.5}


def test_the_log_is_watched(tmp_path: Path) -> None:
    port = free_port()
    Exporter("rlhf_test_", METRICS, tmp_path).serve("127.0.0.1", port)
    logging.getLogger("anything").info("fine")
    assert not [name for name in scrape(port) if name.startswith("last_problem")]
    logging.getLogger("anything").warning("odd")
    logging.getLogger("anything").error("bad")
    logging.getLogger("anything").critical("worse")
    found = scrape(port)
    assert (found["log_messages_totalwarning"], found["log_messages_totalerror"]) == (1, 2)
    last = "last_problem_timestamp_seconds"
    assert 0 < found[f"{last}warning"] <= found[f"{last}error"]


def test_without_a_port_nothing_is_served_and_a_taken_one_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = list(logging.getLogger().handlers)
    Exporter("rlhf_test_", METRICS, tmp_path).serve("127.0.0.1", None)
    assert logging.getLogger().handlers == handlers
    assert not caplog.records
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        Exporter("rlhf_test_", METRICS, tmp_path).serve("127.0.0.1", port)
    (record,) = caplog.records
    assert f"127.0.0.1:{port} cannot be served" in record.getMessage()
