"""The Slurm script, executed on loopback with a small srun and scontrol: it trains, stops in order, and goes on."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from live_system import ENVIRONMENT, Checkpoints, LiveRun, make_run

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm" / "run.sbatch"
# Starts as many processes as nodes are asked for, and forwards SIGTERM, as srun does. The server stays on loopback.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do [[ $1 == --nodes=* ]] && nodes=${1#*=}; shift; done
pids=()
for ((i = 0; i < nodes; i++)); do "${@/server.host=0.0.0.0/server.host=127.0.0.1}" & pids+=($!); done
trap 'kill -TERM "${pids[@]}"' TERM
code=0
for pid in "${pids[@]}"; do until wait "$pid"; do code=$?; kill -0 "$pid" 2>/dev/null || break; done; done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then printf '127.0.0.1\\n%.0s' $(seq "$SLURM_JOB_NUM_NODES"); else echo "$@"; fi
"""


class Job(subprocess.Popen[bytes]):
    """The script on a cluster of which this machine is every node: one server, ranks of the trainer and the actor."""

    def __init__(self, folder: Path, run: LiveRun, *, trainers: int, actors: int) -> None:
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        first = consecutive_ports(4)
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "SLURM_JOB_NODELIST": "node[1-9]",
            "SLURM_JOB_NUM_NODES": str(1 + trainers + actors),
            "SLURM_JOB_ID": "7",
            "SERVERS": "1",
            "TRAINERS": str(trainers),
            "ACTORS": str(actors),
            "GPUS": "1",
            "TMPDIR": str(folder),
            "HTTP_PORT": str(first),
            "GRPC_PORT": str(first + 1),
            "RENDEZVOUS_PORT": str(first + 2),
            "PET_LOCAL_ADDR": "127.0.0.1",
        }
        self._log = folder / "log"
        with self._log.open("wb") as log:
            super().__init__([SCRIPT, run.path], env=environment, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def __exit__(self, *_: object) -> None:
        """Kill what is left of it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in [*psutil.Process(self.pid).children(recursive=True), self]:
                each.kill()
        self.wait()


def consecutive_ports(count: int) -> int:
    """The first of `count` free ports in a row, below those that the kernel gives to outgoing connections."""
    while True:
        first = random.randrange(20_000, 32_000)
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first


def assert_order(text: str, *lines: str) -> None:
    """Fail unless the last occurrences of the lines are in this order."""
    positions = [text.rfind(line) for line in lines]
    assert -1 not in positions, (lines, text)
    assert positions == sorted(positions), (lines, text)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_before_the_time_limit_it_stops_in_order_and_is_queued_again(tmp_path: Path, checkpoints: Checkpoints) -> None:
    run = make_run(tmp_path, checkpoints, actor={"ranks": 2, "steps": 1000})
    with Job(tmp_path, run, trainers=1, actors=2) as job:
        while run.journal.last_step() < 2:
            assert job.poll() is None, job.log
            time.sleep(0.1)
        job.terminate()
        assert job.wait() != 0
    ends = ["whose checkpoint is written", "SignalException", "draining", "stopped", "requeue 7"]
    assert_order(job.log, *ends)
    assert {line["step"] for line in run.critic_metrics() if "loss_mean" in line} >= {1}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_without_a_critic_from_start_to_end(tmp_path: Path, checkpoints: Checkpoints) -> None:
    run = make_run(tmp_path, checkpoints, actor={"algorithm": {"name": "rloo", "responses_per_prompt": 4}, "steps": 2})
    with Job(tmp_path, run, trainers=0, actors=1) as job:
        assert job.wait() == 0, job.log
    assert_order(job.log, "step 2/2", "draining", "stopped")
    assert "requeue" not in job.log


def test_the_linter_finds_nothing() -> None:
    scripts = [SCRIPT, SCRIPT.parents[2] / "tools" / "install.sh"]
    done = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), *scripts], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
