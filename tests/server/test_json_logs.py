"""`run.log_format: json`: every line of actor, sidecar, `tools serve` and gateway says its run, step and version."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from live_system import Checkpoints, make_run, run_actor, start_system
from tiny_models import write_repository
from tiny_serve import serve, wait_for, write_run

FIELDS = {"time", "level", "process", "run", "step", "version", "logger", "message"}


def lines_of(log: str, process: str) -> list[dict[str, Any]]:
    """The lines of a log, each of which must be JSON."""
    assert [text for text in log.splitlines() if not text.startswith('{"time": ')] == []
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


def test_every_line_of_a_run_is_json(tmp_path: Path, checkpoints: Checkpoints) -> None:
    run = make_run(tmp_path / "run", checkpoints, run={"log_format": "json"})
    system = start_system(run)
    try:
        code, log = run_actor(run, "actor")
        assert code == 0
        failed, error_log = run_actor(run, "other-actor", f"actor.policy.checkpoint={tmp_path}/none")
    finally:
        system.stop()
    actor = lines_of(log, "actor")
    done = {line["message"].split("/")[0]: line for line in actor if line["message"].startswith("step ")}
    assert [done[f"step {step}"]["step"] for step in (1, 2, 3)] == [1, 2, 3]
    for line in done.values():
        assert f"scored by weights version {line['version']}, " in line["message"]
    assert steps(actor) == sorted(steps(actor))
    sidecar = lines_of(system.sidecar.log_path.read_text(), "sidecar")
    assert steps(sidecar)[-1] == 3
    updates = [line for line in sidecar if "loss_mean=" in line["message"]]
    assert [(line["step"], line["version"]) for line in updates] == [(1, 1), (2, 2), (3, 3)]
    assert failed == 2
    assert [line["level"] for line in lines_of(error_log, "actor")] == ["ERROR"]


def test_every_line_of_serve_is_json(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    write_repository(run_dir / "model_repository")
    process = serve(run_dir, "run.log_format=json", "run.run_id=test")
    wait_for(run_dir / "server.json", process)
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
