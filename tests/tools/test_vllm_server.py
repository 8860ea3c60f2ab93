"""The vLLM server that `tools run` starts: its arguments, its restarts, and what is refused before it is started."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from shebang import SHEBANG

from python_backend.config import ConfigError, RunConfig
from python_backend.errors import RlhfError
from tools.preflight import check_prompts
from tools.server.vllm import VllmServer, check_vllm, starts_vllm, vllm_arguments

SCRIPT = (
    SHEBANG
    + """import http.server, subprocess, sys
print("started", flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # as vLLM's engine
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def run_config(folder: Path, *, script: str = SCRIPT, max_tokens: int = 20, **policy: Any) -> RunConfig:
    (folder / "policy").mkdir()
    (folder / "policy/config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    command = folder / "vllm"
    command.write_text(script)
    command.chmod(0o755)
    generation = {
        "engine": "vllm",
        "max_new_tokens": 12,
        "vllm": {"command": str(command), "arguments": ["--seed", "3"]},
    }
    actor = {
        "policy": {"checkpoint": str(folder / "policy"), **policy},
        "prompts": {"max_tokens": max_tokens},
        "generation": generation,
    }
    return RunConfig.model_validate({"run": {"dir": str(folder / "run")}, "actor": actor})


def test_the_server_has_the_policy_its_dtype_and_its_lengths(tmp_path: Path):
    config = run_config(tmp_path, precision="bfloat16", lora_rank=16)
    assert starts_vllm(config)
    check_vllm(config)
    arguments = vllm_arguments(config, "127.0.0.1:8123")
    assert arguments[:2] == ["serve", str(tmp_path / "policy")]
    assert arguments[-2:] == ["--seed", "3"]
    pairs = dict(itertools.pairwise(arguments))
    assert [pairs[name] for name in ("--host", "--port", "--dtype", "--max-model-len", "--max-lora-rank")] == [
        "127.0.0.1",
        "8123",
        "bfloat16",
        "32",
        "16",
    ]


@pytest.mark.parametrize(("rank", "limit"), [(4, "8"), (12, "16"), (48, "64"), (512, "512")])
def test_vllm_takes_few_limits_of_the_rank(tmp_path: Path, rank: int, limit: str):
    arguments = vllm_arguments(run_config(tmp_path, lora_rank=rank), "127.0.0.1:8123")
    assert arguments[arguments.index("--max-lora-rank") + 1] == limit


def test_a_rank_that_vllm_does_not_serve_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"actor.policy.lora_rank: 513 is above 512"):
        check_vllm(run_config(tmp_path, lora_rank=513))


def test_a_server_that_dies_is_started_again_and_nothing_is_left(tmp_path: Path):
    events: list[str] = []
    server = VllmServer(run_config(tmp_path), log=events.append)
    try:
        server.await_ready(lambda: time.sleep(0.02))
        first = psutil.Process(server.pid)
        engine = first.children()
        first.send_signal(signal.SIGKILL)
        until(lambda: (server.look(), server.pid != first.pid)[1])
        assert "the vLLM server was killed by SIGKILL" in events[0]
        assert (tmp_path / "run/logs/vllm.previous.log").read_text() == "started\n", "the reason would be in it"
        psutil.wait_procs(engine, 60)
        assert not any(process.is_running() for process in engine)
        server.await_ready(lambda: time.sleep(0.02))
        group = psutil.Process(server.pid).children()
    finally:
        server.stop()
    assert not psutil.wait_procs(group, 60)[1]


def test_a_server_that_cannot_start_is_an_error_with_its_log(tmp_path: Path):
    config = run_config(tmp_path, script=f"{SHEBANG}import sys\nsys.exit('no such device')\n")
    server = VllmServer(config, log=print)
    with pytest.raises(RlhfError, match="no such device"):
        server.await_ready(lambda: time.sleep(0.02))
    server.stop()


def test_a_command_that_is_missing_is_an_error_that_names_the_remedy(tmp_path: Path):
    config = run_config(tmp_path)
    (tmp_path / "vllm").unlink()
    with pytest.raises(ConfigError, match=r"actor.generation.vllm.command: .*/vllm is not an executable; install vLLM"):
        check_vllm(config)


def test_rows_that_are_too_long_are_refused_before_the_start(tmp_path: Path):
    config = run_config(tmp_path, max_tokens=60)
    with pytest.raises(
        ConfigError, match=r"rows of at most 64 tokens, but actor.prompts.max_tokens \(60\) \+ .* is 72"
    ):
        check_prompts(config)
