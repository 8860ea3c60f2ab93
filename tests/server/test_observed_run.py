"""`run.trace_endpoint` in whole runs: one trace per step, from actor to sidecar; without it, none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from bare_client import ask
from live_system import (
    KEY,
    Checkpoints,
    LiveRun,
    System,
    identity,
    make_run,
    run_actor,
    start_system,
    training_inputs,
    wait_for,
)
from span_collector import Collector, Span, collector

from python_backend.store.journal import Entry
from python_backend.wire.contract import CRITIC_TRAIN

pytest.importorskip("opentelemetry.exporter.otlp.json.http", reason="the extra `tracing` is not installed")
# Records at the exit of each Python process of a run whether it has loaded the SDK.
WITNESS = """
import atexit, pathlib, sys
def write():
    name = sys.modules["__main__"].__spec__.name if getattr(sys.modules["__main__"], "__spec__", None) else "other"
    pathlib.Path(__file__).with_name(name).write_text(str("opentelemetry.sdk" in sys.modules))
atexit.register(write)
"""
REMOTE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def whole_run(run: LiveRun, until: Callable[[], bool] = lambda: True) -> None:
    """Run server, sidecar and actor to the end of its steps, and stop them when `until()` is true."""
    system = start_system(run)
    try:
        code, log = run_actor(run, "actor")
        assert code == 0, log
        wait_for(until, system.server)
    finally:
        system.stop()
    assert json.loads((run.config.run.dir / "actor_summary.json").read_text())["critic_updates"] == 3


def of_step(received: Collector, step: int) -> dict[tuple[str, str], list[Span]]:
    """The spans of one step's trace, by service and name."""
    (root,) = (span for span in received.named("step") if span.attributes["step"] == step)
    found: dict[tuple[str, str], list[Span]] = {("root", "step"): [root]}
    for span in received.spans:
        if span.trace == root.trace:
            found.setdefault((span.service, span.name), []).append(span)
    return found


def test_one_trace_leads_from_the_step_to_the_reload(tmp_path: Path, checkpoints: Checkpoints) -> None:
    with collector() as received:

        def complete() -> bool:  # tritonserver sends its spans every 5 s
            return len({span.trace for span in received.named(CRITIC_TRAIN, "tritonserver")}) == 3

        whole_run(make_run(tmp_path / "run", checkpoints, run={"trace_endpoint": received.url}), complete)
    for step in (1, 2, 3):
        spans = of_step(received, step)
        parents = {span.id: (service, name) for (service, name), each in spans.items() for span in each}
        ways = {(*key, parents[span.parent][1]) for key, each in spans.items() for span in each if key[1] != "step"}
        assert ways >= {
            ("actor", "rollout_time", "rollout_wait"),
            ("actor", "generate", "rollout_time"),
            ("actor", "critic_infer", "rollout_time"),
            ("actor", "train_time", "step"),
            ("actor", "critic_update", "step"),
            ("actor", CRITIC_TRAIN, "critic_update"),
            ("tritonserver", "InferRequest", "critic_infer"),
            ("tritonserver", "InferRequest", CRITIC_TRAIN),
            ("tritonserver", "critic", "critic_infer"),
            ("tritonserver", "reward_model", "critic_infer"),
            (CRITIC_TRAIN, "critic_train: journal", CRITIC_TRAIN),
            ("sidecar", "train", CRITIC_TRAIN),
            ("sidecar", "publish", CRITIC_TRAIN),
            ("sidecar", "verify", "publish"),
            ("sidecar", "reload", "publish"),
        }
        assert {span.attributes["step"] for span in spans["sidecar", "train"]} == {step}
        assert [span.attributes["version"] for span in spans["sidecar", "reload"]] == [step]
        assert not any(span.failed for each in spans.values() for span in each)
    assert len({span.trace for span in received.named("step")}) == 3
    assert len(received.named("validation")) == 2


def test_a_repeated_step_may_belong_to_another_trace(live: System) -> None:
    """The context is stored with the journal's entry, but it is not content that a repeat must share."""
    step = live.run.next_step()
    request = {**training_inputs(seed=1), **identity("test", step)}
    contexts = (REMOTE, REMOTE.replace("a", "c"), "malformed")
    answers = [ask(live.run.url, CRITIC_TRAIN, request, headers={**KEY, "traceparent": each}) for each in contexts]
    assert len({int(answer["weights_version"][0]) for answer in answers}) == 1
    assert live.run.journal.traceparent(Entry(step, 0, "train")) == REMOTE


def test_a_collector_that_never_answers_does_not_keep_a_run(tmp_path: Path, checkpoints: Checkpoints) -> None:
    with collector() as received:
        received.answering.clear()
        whole_run(make_run(tmp_path / "run", checkpoints, run={"trace_endpoint": received.url}))
        assert not received.answering.is_set()
        assert received.requests


def test_without_the_setting_nothing_is_sent_or_imported(
    tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITNESS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(":"))
    with collector() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        run = make_run(tmp_path / "run", checkpoints)
        whole_run(run)
    assert received.requests == []
    assert (tmp_path / "actor.__main__").read_text() == (tmp_path / "trainer.__main__").read_text() == "False"
    text = (run.config.run.repository_dir / CRITIC_TRAIN / "config.pbtxt").read_text()
    assert "trace_endpoint" not in text
