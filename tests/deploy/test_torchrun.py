"""Every torchrun line of deploy/, executed on loopback: all nodes join, and a rank that dies is restarted."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from manifests import OVERLAYS, pods

TORCHRUN = "torch.distributed.run"
# In place of `actor` and `trainer`: joins the group as they do. Rank 1 dies in its first life.
STAND_IN = """
import json, os, pathlib, signal, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([1.0])
dist.all_reduce(total)
died = pathlib.Path("died")
if dist.get_rank() == 1 and not died.exists():
    died.touch()
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
print(json.dumps([dist.get_rank(), int(total), sys.argv[1:]]), flush=True)
"""


def lines() -> dict[str, tuple[list[str], dict[str, str]]]:
    """The command line and the environment of each container that starts torchrun, by overlay and name."""
    found = {}
    for overlay in OVERLAYS:
        for name, pod in pods(overlay).items():
            container = pod["spec"]["containers"][0]
            if TORCHRUN in container["command"]:
                found[f"{overlay}-{name}"] = container["command"], {e["name"]: e["value"] for e in container["env"]}
    return found


LINES = lines()


def on_loopback(command: list[str], port: int) -> list[str]:
    """The line with this Python, this machine as every node, and one process for each node."""
    text = "\0".join([sys.executable, *command[1:]])
    text, hosts = re.subn(r"(--rdzv-endpoint=)[^:]+:\d+", rf"\g<1>127.0.0.1:{port}", text)
    text, processes = re.subn(r"(--nproc-per-node=)\d+", r"\g<1>1", text)
    assert (hosts, processes) == (1, 1)
    return text.split("\0")


def option(command: list[str], name: str) -> int:
    return int(next(word.partition("=")[2] for word in command if word.startswith(f"--{name}=")))


def test_the_lines_are_found() -> None:
    assert set(LINES) == {"ranks-rlhf-actor", "ranks-rlhf-trainer"}


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_all_nodes_join_and_a_dead_rank_is_restarted(name: str, tmp_path: Path) -> None:
    command, environment = LINES[name]
    nodes = option(command, "nnodes")
    module = command[command.index("-m", command.index(TORCHRUN)) + 1]
    (tmp_path / f"{module}.py").write_text(STAND_IN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = [
        subprocess.Popen(
            on_loopback(command, port), cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **environment, "OMP_NUM_THREADS": "1", "PET_LOCAL_ADDR": "127.0.0.1"},
        )
        for _ in range(nodes)
    ]  # fmt: skip
    try:
        said = [agent.communicate(timeout=240) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0] * nodes, said
    found = sorted(json.loads(out) for out, _ in said)
    assert found == [[rank, nodes, ["--config", "/config/run.yaml"]] for rank in range(nodes)]
    assert (tmp_path / "died").exists()
