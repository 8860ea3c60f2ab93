"""Whole runs and clients of a real system: an actor's files, `rlhf-triton run`, other trainers, a served reference."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
from live_system import ENVIRONMENT, System, make_run, run_actor, start_system
from span_collector import Collector
from transformers import AutoModelForCausalLM
from waiting import wait_for

from rlhf_triton.store.jsonl import read_jsonl
from rlhf_triton.tools.server.health import is_alive
from rlhf_triton.tools.server.shared_memory import SHARED_MEMORY
from rlhf_triton.wire.contract import CRITIC_TRAIN


def test_short_run_writes_metrics_checkpoints_and_a_policy(live, checkpoints):
    folder = live.run.config.run.dir
    summary = json.loads((folder / "actor_summary.json").read_text())
    assert summary["steps"] == summary["critic_updates"] == summary["weights_version"] == 3
    assert summary["failed_requests"] == summary["masked_samples"] == 0
    assert np.isfinite([summary[name] for name in ("reward_before", "reward_after", "kl_final", "ev_last")]).all()
    assert [line["step"] for line in live.run.critic_metrics() if "loss_mean" in line][:3] == [1, 2, 3]
    lines = read_jsonl(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["train_rollouts/consumed_samples"] for line in lines] == [8, 16, 24]
    phases = {line["phase"] for line in read_jsonl(folder / "timeline.jsonl")}
    assert {"generate", "scoring", "logprobs", "init_logprobs", "critic_update", "train_time"} <= phases
    assert not (folder / "summary.json").exists()  # `rlhf-triton run` writes it, which did not start this actor
    for step in (2, 3):  # checkpoint_every, and the last step
        for room in ("actor", "critic"):
            assert json.loads((folder / "checkpoints" / room / str(step) / "state.json").read_text())["step"] == step
    trained, start = (AutoModelForCausalLM.from_pretrained(path) for path in (folder / "policy", checkpoints.policy))
    assert any(not a.equal(b) for a, b in zip(trained.parameters(), start.parameters(), strict=True))


# ---- rlhf-triton run ----


@pytest.fixture
def process(tmp_path, checkpoints):
    """Start `rlhf-triton run` in a user's folder; yield it after step 2 of more steps than any test needs.

    The folder has modules named like ours, which the run must not import.
    """
    own = tmp_path / "own"
    own.mkdir()
    for name in ("actor", "config", "python_backend", "store", "tools", "trainer", "wire"):
        (own / f"{name}.py").write_text("raise AssertionError(__file__)")
    run = make_run(tmp_path / "run", checkpoints, actor={"steps": 5000, "checkpoint_every": 2500})
    command = [sys.executable, "-m", "rlhf_triton.tools", "run", "--config", str(run.path)]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=own,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **ENVIRONMENT},
        )
    try:
        wait_for_steps(tmp_path, process, 2)
        yield process
    finally:
        process.terminate()
        process.wait(120)


def children(process):
    """Return the run's processes by role, once all are there, in the order in which they should end."""
    roles = {"actor": "rlhf_triton.actor", "sidecar": "rlhf_triton.trainer", "server": "tritonserver"}
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = child.cmdline()
            line = " ".join(command)
            for role, word in roles.items():
                if f"{word} " in line and "triton_python_backend_stub" not in line and "-c" not in command:
                    found[role] = child
    return {role: found[role] for role in roles}


def wait_for_steps(tmp_path, process, count):
    """Wait for `count` steps."""

    def stepped():
        assert process.poll() is None, (tmp_path / "output").read_text()[-3000:]
        return len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) >= count

    wait_for(stepped)


@pytest.mark.slow
def test_run_stops_and_names_the_process_that_died(tmp_path, process):
    log = tmp_path / "run" / "logs" / "sidecar.log"
    wait_for(lambda: "weights_version=" in log.read_text())  # it comes after the step's answer
    family = psutil.Process(process.pid).children(recursive=True)
    children(process)["sidecar"].send_signal(signal.SIGKILL)
    assert process.wait(120) == 2
    output = (tmp_path / "output").read_text()
    died = "error: the critic sidecar was killed by SIGKILL, as the kernel does when memory runs out; its log is"
    assert f"{died} {log}\n" in output
    assert "weights_version=" in output.rpartition("ends with:\n")[2]
    assert "Traceback" not in output
    assert_nothing_is_left(process.pid, family)


@pytest.mark.slow
def test_run_restarts_its_server_and_ctrl_c_stops_actor_then_sidecar_then_server(tmp_path, process):
    children(process)["server"].send_signal(signal.SIGKILL)
    wait_for(lambda: "serving again after" in (tmp_path / "output").read_text())
    wait_for_steps(tmp_path, process, len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) + 3)
    family = psutil.Process(process.pid).children(recursive=True)
    roles = children(process)
    ended = []
    process.send_signal(signal.SIGINT)

    def all_ended():  # who ended between two looks did so in the order of `roles`, for all that can be seen
        ended.extend(role for role, child in roles.items() if role not in ended and not is_alive(child))
        return len(ended) == len(roles) and process.poll() is not None

    wait_for(all_ended)
    assert ended == ["actor", "sidecar", "server"]
    assert process.returncode == 130
    output = (tmp_path / "output").read_text()
    log = (tmp_path / "run" / "logs" / "actor.log").read_text()
    assert "resumes from the newest checkpoint" in output
    assert "Traceback" not in output + log
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert f"stopped after step {last}, whose checkpoint is written" in log
    for room in ("actor", "critic"):  # before sidecar and server were stopped
        assert (tmp_path / "run" / "checkpoints" / room / str(last) / "state.json").is_file(), room
    assert_nothing_is_left(process.pid, family)


def assert_nothing_is_left(pid, family):
    """Assert that no process of the run and no shared-memory region of its server is left."""
    assert not [process for process in family if is_alive(process)]
    assert not list(SHARED_MEMORY.glob(f"rlhf-{pid}-*"))


# ---- a run with a served reference, spans and lines of JSON ----


@dataclasses.dataclass
class Served(System):
    """A run like `live`'s, three PPO steps, with a served reference, traces and JSON log lines."""

    received: Collector


@pytest.fixture(scope="module")
def served(tmp_path_factory, checkpoints):
    pytest.importorskip("opentelemetry.exporter.otlp.json.http", reason="the extra `tracing` is not installed")
    with Collector() as received:
        told = {"trace_endpoint": received.url, "log_format": "json"}
        run = make_run(tmp_path_factory.mktemp("served"), checkpoints, run=told, actor={"kl_reference": "triton"})
        system = start_system(run)
        try:
            code, log = run_actor(run, "actor")
            assert code == 0, log
            # each process sends its spans every 5 s
            last = [(CRITIC_TRAIN, "tritonserver"), ("critic_train: journal", CRITIC_TRAIN), ("reload", "sidecar")]
            wait_for(lambda: all(len({s.trace for s in received.named(*each) if s.parent}) >= 3 for each in last))
            wait_for(lambda: {span.parent for span in received.spans} <= {"", *(span.id for span in received.spans)})
            yield Served(run, system.server, system.sidecar, received)
        finally:
            system.stop()


@pytest.mark.slow
def test_one_trace_per_step_spans_actor_server_and_sidecar(served):
    for root in served.received.named("step"):
        step = root.attributes["step"]
        spans = [each for each in served.received.spans if each.trace == root.trace]
        names = {span.id: span.name for span in spans}
        ways = {(span.service, span.name, names[span.parent]) for span in spans if span is not root}
        assert ways >= {
            ("actor", "critic_infer", "rollout_time"),
            ("actor", "critic_update", "step"),
            ("actor", CRITIC_TRAIN, "critic_update"),
            ("tritonserver", "InferRequest", "critic_infer"),
            ("tritonserver", "InferRequest", CRITIC_TRAIN),
            ("tritonserver", "critic", "critic_infer"),
            ("actor", "reward_model", "rollout_time"),
            ("tritonserver", "InferRequest", "reward_model"),
            (CRITIC_TRAIN, "critic_train: journal", CRITIC_TRAIN),
            ("sidecar", "train", CRITIC_TRAIN),
            ("sidecar", "publish", CRITIC_TRAIN),
            ("sidecar", "verify", "publish"),
            ("sidecar", "reload", "publish"),
        }
        assert {span.attributes["step"] for span in spans if span.name == "train"} == {step}
        assert [span.attributes["version"] for span in spans if span.name == "reload"] == [step]
        assert not any(span.failed for span in spans)
    assert len({span.trace for span in served.received.named("step")}) == 3
    assert len(served.received.named("validation")) == 2
