"""`python -m tools serve` as a process: signals, failures, and what it leaves behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny_models import regions, server_processes, write_repository, write_scoring_model

from python_backend.config import RunConfig
from python_backend.config.sections import UNMEASURED
from python_backend.store.durable import read_json
from tools.serve import demo_preparation
from trainer.control_plane import ControlPlane

# `tools.serve` on a repository that is there already: rendering has its own tests, and needs checkpoints.
SERVE = """
import sys, tools.render_configs, tools.serve
tools.render_configs.render_repository = lambda config, out: []
tools.serve.check_files = lambda config, **_: None
sys.exit(tools.serve.main(sys.argv[1:]))
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose repository is rendered and whose critic has a version."""
    (tmp_path / "weights" / "critic").mkdir(parents=True)
    (tmp_path / "weights" / "critic" / "CURRENT").write_text("0\n")
    ports = "http_port: 0, grpc_port: 0, metrics_port: 0"
    models = "".join(f"{role}: {json.dumps(UNMEASURED)}\n" for role in ("reward", "critic"))
    (tmp_path / "run.yaml").write_text(f"{models}server: {{{ports}, exit_timeout_s: 1}}")
    return tmp_path


def serve(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SERVE, "--config", str(run_dir / "run.yaml"), f"run.dir={run_dir}"]
    return subprocess.Popen(
        [*command, *overrides], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def wait_until_gone(parent_pid: int) -> None:
    while server_processes(parent_pid) or regions(parent_pid):
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_stops_cleanly_on_a_signal(run_dir: Path, number: signal.Signals) -> None:
    write_repository(run_dir / "model_repository")
    process = serve(run_dir)
    wait_for(run_dir / "server.json", process)
    grpc_url = json.loads((run_dir / "server.json").read_text())["grpc"]
    with ControlPlane(grpc_url) as control:
        control.probe_scoring("critic_infer", ("rewards", "values"), timeout_s=10)
    process.send_signal(number)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert "ready: inference http://127.0.0.1:" in out
    assert out.endswith("stopped\n")
    assert server_processes(process.pid) == []
    assert regions(process.pid) == []
    assert not (run_dir / "server.json").exists()


def test_serve_can_be_stopped_while_a_model_loads(run_dir: Path) -> None:
    wait = "print('loading', flush=True); time.sleep(60)"
    write_scoring_model(run_dir / "model_repository", "critic", on_load=wait)
    process = serve(run_dir)
    assert process.stdout is not None
    while "loading" not in process.stdout.readline():
        assert process.poll() is None, process.communicate()
    process.terminate()
    _, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert server_processes(process.pid) == []
    assert regions(process.pid) == []


def test_a_killed_serve_takes_its_server_along(run_dir: Path) -> None:
    write_scoring_model(run_dir / "model_repository", "critic")
    process = serve(run_dir)
    wait_for(run_dir / "server.json", process)
    process.kill()
    process.communicate()
    wait_until_gone(process.pid)


def test_serve_starts_a_server_that_died_again(run_dir: Path) -> None:
    write_scoring_model(run_dir / "model_repository", "critic")
    process = serve(run_dir)
    state = run_dir / "server.json"
    wait_for(state, process)
    first = json.loads(state.read_text())
    psutil.Process(first["pid"]).kill()
    while (read_json(state) or first)["pid"] == first["pid"]:  # gone for a while
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    second = json.loads(state.read_text())
    assert {**second, "pid": 0} == {**first, "pid": 0}
    assert process.stdout is not None
    said = [""]
    while "serving again after" not in said[-1]:  # said after server.json is written
        said.append(process.stdout.readline())
        assert said[-1], said
    process.terminate()
    _, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert any("tritonserver was killed by SIGKILL" in line for line in said)
    wait_until_gone(process.pid)


def test_serve_exits_with_one_sentence_when_a_model_does_not_load(run_dir: Path) -> None:
    write_scoring_model(run_dir / "model_repository", "critic", on_load="raise ValueError('3 labels')")
    process = serve(run_dir)
    _, err = process.communicate()
    assert process.returncode == 1
    assert err.startswith("error: critic could not be loaded: ValueError: 3 labels (model.py line 10);")
    assert len(err.splitlines()) == 1
    assert server_processes(process.pid) == []
    assert regions(process.pid) == []


def test_serve_exits_with_one_sentence_when_the_configuration_is_wrong(run_dir: Path) -> None:
    process = serve(run_dir, "server.port=8000")
    _, err = process.communicate()
    assert process.returncode == 1
    assert "unknown key server.port" in err


def test_commands_answer_at_once_and_know_their_names() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "tools"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert all(name in shown.stdout for name in ("serve", "render", "run", "prepare"))
    assert not {"torch", "numpy", "grpc", "pydantic"} & {
        line.split("|")[-1].strip() for line in shown.stderr.splitlines()
    }
    wrong = subprocess.run([*command[:1], "-m", "tools", "srve"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr) == (2, "error: unknown command 'srve'; did you mean serve?\n")


def test_the_demo_is_prepared_where_its_seed_says() -> None:
    assert demo_preparation(RunConfig()) == ([], [])
    config = RunConfig.model_validate({"demo": {"cache_dir": "cache", "quick": True}, "run": {"seed": 3}})
    arguments, overrides = demo_preparation(config)
    assert arguments[:3] == ["tools.demo.prepare", "--recipe", "sentences"]
    assert arguments[3:] == ["--out", "cache/seed-3-quick", "--seed", "3", "--quick"]
    assert "critic.checkpoint=cache/seed-3-quick/critic" in overrides


def test_the_pretrained_models_of_a_chat_demo_serve_every_seed() -> None:
    config = RunConfig.model_validate({"demo": {"recipe": "chat", "cache_dir": "cache"}, "run": {"seed": 3}})
    arguments, overrides = demo_preparation(config)
    assert arguments == ["tools.demo.prepare", "--recipe", "chat", "--out", "cache/chat-seed-3", "--seed", "3"]
    assert {"actor.policy.checkpoint=cache/pretrained/policy", "reward.checkpoint=cache/chat-seed-3/reward"} <= set(
        overrides
    )


def test_the_reasoning_tasks_are_prepared_once_for_all_seeds() -> None:
    config = RunConfig.model_validate({"demo": {"recipe": "reasoning", "cache_dir": "cache"}, "run": {"seed": 3}})
    arguments, overrides = demo_preparation(config)
    assert arguments == ["tools.demo.prepare", "--recipe", "reasoning", "--out", "cache/reasoning"]
    assert overrides == [
        "actor.policy.checkpoint=cache/reasoning/policy",
        "actor.prompts.path=cache/reasoning/prompts.jsonl",
        "actor.validation.prompts=cache/reasoning/validation.jsonl",
    ]
