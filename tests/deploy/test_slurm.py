"""The Slurm script, executed on loopback: torchrun itself, in place of srun, scontrol and our processes small ones."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from python_backend.config import load_config

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm" / "run.sbatch"
# Starts as many processes as nodes are asked for, and forwards SIGTERM, as srun does.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do [[ $1 == --nodes=* ]] && nodes=${1#*=}; shift; done
pids=()
for ((i = 0; i < nodes; i++)); do "$@" & pids+=($!); done
trap 'kill -TERM "${pids[@]}"' TERM
code=0
for pid in "${pids[@]}"; do until wait "$pid"; do code=$?; kill -0 "$pid" 2>/dev/null || break; done; done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then printf '127.0.0.1\\n%.0s' $(seq "$SLURM_JOB_NUM_NODES"); else echo "$@" >> log; fi
"""
SERVER = """import signal, socket, sys
from pathlib import Path
log = Path("log").open("a")
signal.signal(signal.SIGTERM, lambda *_: (print("server ended", file=log), sys.exit()))
port = next(int(word.partition("=")[2]) for word in sys.argv if word.startswith("server.http_port="))
with socket.create_server(("127.0.0.1", port)) as server:
    while True:
        server.accept()[0].close()
"""
RANK = """import json, os, signal, sys, time
import torch, torch.distributed as dist
from pathlib import Path
name = os.path.basename(sys.argv[0])[:-3]
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
dist.init_process_group("gloo")
total = torch.tensor([1.0])
dist.all_reduce(total)
if dist.get_rank() == 0:
    Path(f"{name}.json").write_text(json.dumps([int(total), sys.argv[1:], "TRAINING_KEY" in os.environ]))
try:
    while name == "trainer" or "RUN_ON" in os.environ or not Path("trainer.json").exists():
        time.sleep(0.1)
    dist.barrier()
finally:
    if dist.get_rank() == 0:
        print(f"{name} ended", file=Path("log").open("a"))
"""


@pytest.fixture
def started(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """The script on four nodes: a server, one of the trainer, two of the actor."""
    for name, text in {
        "srun": SRUN,
        "scontrol": SCONTROL,
        "tools.py": SERVER,
        "trainer.py": RANK,
        "actor.py": RANK,
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "my.yaml").write_text("{}")
    ports = consecutive_ports(4)
    environment = {
        **os.environ, **request.param, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable,
        "SLURM_JOB_NODELIST": "node[1-4]", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_ID": "7", "TMPDIR": str(tmp_path),
        "SERVERS": "1", "TRAINERS": "1", "ACTORS": "2", "GPUS": "1", "OMP_NUM_THREADS": "1",
        "HTTP_PORT": str(ports), "GRPC_PORT": str(ports + 1), "RENDEZVOUS_PORT": str(ports + 2),
        "PET_LOCAL_ADDR": "127.0.0.1",
    }  # fmt: skip
    command = [str(SCRIPT), "my.yaml"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def consecutive_ports(count: int) -> int:
    """The first of `count` free ports in a row."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            first = probe.getsockname()[1]
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return int(first)


@pytest.mark.slow
@pytest.mark.parametrize("started", [{}], indirect=True)
def test_a_run_from_start_to_end(started: subprocess.Popen[str], tmp_path: Path) -> None:
    said = started.communicate()[1]
    assert started.returncode == 0, said
    assert (tmp_path / "log").read_text().splitlines() == ["actor ended", "trainer ended", "server ended"]
    for name, ranks in {"actor": 2, "trainer": 1}.items():
        size, arguments, has_key = json.loads((tmp_path / f"{name}.json").read_text())
        assert (size, has_key, arguments[:2]) == (ranks, True, ["--config", "my.yaml"])
        config = load_config(tmp_path / "my.yaml", arguments[2:])
        assert config.trainer.servers == [f"127.0.0.1:{config.server.grpc_port}"]
        assert config.actor.client.servers == (f"127.0.0.1:{config.server.http_port}",)


@pytest.mark.slow
@pytest.mark.parametrize("started", [{"RUN_ON": "1"}], indirect=True)
def test_before_the_time_limit_it_stops_in_order_and_is_queued_again(
    started: subprocess.Popen[str], tmp_path: Path
) -> None:
    while not (tmp_path / "actor.json").exists() or not (tmp_path / "trainer.json").exists():
        assert started.poll() is None, started.communicate()
        time.sleep(0.1)
    started.terminate()
    said = started.communicate()[1]
    assert started.returncode != 0, said
    ends = ["actor ended", "trainer ended", "server ended", "requeue 7"]
    assert (tmp_path / "log").read_text().splitlines() == ends


def test_the_linter_finds_nothing() -> None:
    scripts = [SCRIPT, SCRIPT.parents[2] / "tools" / "install.sh"]
    done = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), *scripts], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
