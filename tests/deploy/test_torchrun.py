"""Every torchrun line of deploy/, executed on loopback: all nodes join, and what dies is replaced."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from manifests import OVERLAYS, Manifest, manifests, pods

from tools.server.ports import is_open

TORCHRUN = "torch.distributed.run"
PODS = ("StatefulSet", "Job")
# In place of `actor` and `trainer`: joins the group as they do. Once, node 0 loses its rank, or node 1 ends altogether.
STAND_IN = """
import datetime, json, os, pathlib, signal, sys
import torch, torch.distributed as dist

# As theirs, its timeout is bounded: a rank that starts again may look for the others of the attempt before.
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
total = torch.tensor([1.0])
dist.all_reduce(total)
died = pathlib.Path("died")
is_node = os.environ["DIES"] == "node"
if os.environ["NODE"] == str(int(is_node)) and not died.exists():
    died.touch()
    if is_node:
        os.kill(os.getppid(), signal.SIGKILL)
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


@pytest.mark.parametrize("name", LINES)
def test_the_numbers_agree(name: str) -> None:
    overlay, _, workload = name.partition("-")
    command, _ = LINES[name]
    texts = [manifest["data"]["run.yaml"] for manifest in manifests(overlay) if manifest["kind"] == "ConfigMap"]
    role = workload.removeprefix("rlhf-")
    nodes = option(command, "nnodes")
    assert yaml.safe_load(texts[0])[role]["ranks"] == nodes * option(command, "nproc-per-node")
    (spec,) = [m["spec"] for m in manifests(overlay) if m["kind"] in PODS and m["metadata"]["name"] == workload]
    assert {spec[key] for key in ("replicas", "completions", "parallelism") if key in spec} == {nodes}
    pod = spec["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == str(option(command, "nproc-per-node"))
    assert pod["terminationGracePeriodSeconds"] > option(command, "shutdown-timeout")
    service = spec.get("serviceName") or pod["subdomain"]
    assert f"--rdzv-endpoint={workload}-0.{service}:29400" in command
    assert naming_service(overlay, service)["spec"]["selector"] == spec["template"]["metadata"]["labels"]


def naming_service(overlay: str, name: str) -> Manifest:
    """The headless service that gives the pods their names, also before they are ready."""
    (service,) = [m for m in manifests(overlay) if (m["kind"], m["metadata"]["name"]) == ("Service", name)]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    return service


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dies"), [*((name, "rank") for name in LINES), ("ranks-rlhf-trainer", "node")])
def test_all_nodes_join_and_what_dies_is_replaced(name: str, dies: str, tmp_path: Path) -> None:
    command, environment = LINES[name]
    nodes = option(command, "nnodes")
    module = command[command.index("-m", command.index(TORCHRUN)) + 1]
    (tmp_path / f"{module}.py").write_text(STAND_IN)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def start(node: int) -> subprocess.Popen[str]:
        local = {"PET_LOCAL_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "NODE": str(node), "DIES": dies}
        return subprocess.Popen(
            on_loopback(command, port), cwd=tmp_path, env={**os.environ, **environment, **local}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    agents = [start(0)]
    try:
        while not is_open(f"127.0.0.1:{port}"):  # node 0 has the rendezvous: no node can replace it
            assert agents[0].poll() is None, agents[0].communicate()
            time.sleep(0.1)
        agents += [start(node) for node in range(1, nodes)]
        if dies == "node":
            agents[1].communicate()
            agents[1] = start(1)
        said = [agent.communicate() for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()  # closes the pipes
    assert [agent.returncode for agent in agents] == [0] * nodes, said
    found = sorted(json.loads(out) for out, _ in said)
    assert found == [[rank, nodes, ["--config", "/config/run.yaml"]] for rank in range(nodes)]
    assert (tmp_path / "died").exists()
