"""What a whole run tells with `run.log_format: json` and `run.trace_endpoint`; and the JSON lines of other commands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bare_client import ask
from live_system import (
    KEY,
    Checkpoints,
    System,
    identity,
    make_run,
    run_actor,
    start_system,
    training_inputs,
    wait_for,
)
from span_collector import Collector, Span, collector
from tiny_models import write_repository
from tiny_serve import serve, write_run
from tiny_serve import wait_for as wait_for_file

from python_backend.store.journal import Entry
from python_backend.wire.contract import CRITIC_TRAIN

FIELDS = {"time", "level", "process", "run", "step", "version", "logger", "message"}
REMOTE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@dataclass(frozen=True)
class Observed:
    """What a run of three steps has left, and what an actor without a policy has said."""

    received: Collector
    actor: str
    sidecar: str
    other_actor: str


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Iterator[Observed]:
    pytest.importorskip("opentelemetry.exporter.otlp.json.http", reason="the extra `tracing` is not installed")
    with collector() as received:
        told = {"trace_endpoint": received.url, "log_format": "json"}
        run = make_run(tmp_path_factory.mktemp("observed"), checkpoints, run=told)
        system = start_system(run)
        try:
            code, log = run_actor(run, "actor")
            assert code == 0, log
            failed, error_log = run_actor(run, "other-actor", f"actor.policy.checkpoint={run.path}/none")
            assert failed == 2
            # tritonserver sends its spans every 5 s
            wait_for(lambda: len({span.trace for span in received.named(CRITIC_TRAIN, "tritonserver")}) == 3)
        finally:
            system.stop()
        yield Observed(received, log, system.sidecar.log_path.read_text(), error_log)


# ---- log lines ----


def lines_of(log: str, process: str) -> list[dict[str, Any]]:
    """The lines of a log, each of which must be JSON."""
    lines = [json.loads(text) for text in log.splitlines()]
    for line in lines:
        assert line.keys() - {"exception"} == FIELDS, line
        assert (line["process"], line["run"]) == (process, "test"), line
    return lines


def steps(lines: list[dict[str, Any]]) -> list[int]:
    """The steps of the lines from the first that has one; all after it must have one, and a version."""
    first = next(i for i, line in enumerate(lines) if line["step"] is not None)
    assert all(isinstance(line["step"], int) and isinstance(line["version"], int) for line in lines[first:])
    return [line["step"] for line in lines[first:]]


def test_every_line_of_a_run_is_json(observed: Observed) -> None:
    actor = lines_of(observed.actor, "actor")
    done = {line["message"].split("/")[0]: line for line in actor if line["message"].startswith("step ")}
    assert [done[f"step {step}"]["step"] for step in (1, 2, 3)] == [1, 2, 3]
    for line in done.values():
        assert f"scored by weights version {line['version']}, " in line["message"]
    assert steps(actor) == sorted(steps(actor))
    sidecar = lines_of(observed.sidecar, "sidecar")
    assert steps(sidecar)[-1] == 3
    updates = [line for line in sidecar if "loss_mean=" in line["message"]]
    assert [(line["step"], line["version"]) for line in updates] == [(1, 1), (2, 2), (3, 3)]
    assert [line["level"] for line in lines_of(observed.other_actor, "actor")] == ["ERROR"]


def test_every_line_of_serve_is_json(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    write_repository(run_dir / "model_repository")
    process = serve(run_dir, "run.log_format=json", "run.run_id=test")
    wait_for_file(run_dir / "server.json", process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert (process.returncode, out) == (0, "")
    messages = [line["message"] for line in lines_of(err, "server")]
    assert any(message.startswith("ready: inference http://127.0.0.1:") for message in messages)
    assert messages[-1] == "stopped"


def test_every_line_of_the_gateway_is_json(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: {run_id: test, log_format: json}\ngateway: {port: 0}\n")
    command = [sys.executable, "-m", "tools", "gateway", "--config", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        out, rest = process.communicate()
    (ready, *_) = lines_of(first + rest, "gateway")
    assert ready["message"].startswith("gateway: http://127.0.0.1:")
    assert out == ""


# ---- traces ----


def of_step(received: Collector, step: int) -> dict[tuple[str, str], list[Span]]:
    """The spans of one step's trace, by service and name."""
    (root,) = (span for span in received.named("step") if span.attributes["step"] == step)
    found: dict[tuple[str, str], list[Span]] = {("root", "step"): [root]}
    for span in received.spans:
        if span.trace == root.trace:
            found.setdefault((span.service, span.name), []).append(span)
    return found


def test_one_trace_leads_from_the_step_to_the_reload(observed: Observed) -> None:
    for step in (1, 2, 3):
        spans = of_step(observed.received, step)
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
    assert len({span.trace for span in observed.received.named("step")}) == 3
    assert len(observed.received.named("validation")) == 2


def test_a_repeated_step_may_belong_to_another_trace(live: System) -> None:
    """The context is stored with the journal's entry, but it is not content that a repeat must share."""
    step = live.run.next_step()
    request = {**training_inputs(seed=1), **identity("test", step)}
    contexts = (REMOTE, REMOTE.replace("a", "c"), "malformed")
    answers = [ask(live.run.url, CRITIC_TRAIN, request, headers={**KEY, "traceparent": each}) for each in contexts]
    assert len({int(answer["weights_version"][0]) for answer in answers}) == 1
    assert live.run.journal.traceparent(Entry(step, 0, "train")) == REMOTE
