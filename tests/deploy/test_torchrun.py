"""Every torchrun line of deploy/, executed on loopback: they train, and what dies is replaced."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from pathlib import Path

import psutil
import pytest
import yaml
from live_system import ENVIRONMENT, Checkpoints, LiveRun, make_run, start_server, stop_process, wait_for
from manifests import OVERLAYS, Manifest, manifests, pods

from tools.server.child import Child
from tools.server.ports import is_open

TORCHRUN = "torch.distributed.run"
PODS = ("StatefulSet", "Job")
STEPS = 4


def lines() -> dict[str, tuple[list[str], dict[str, str]]]:
    """The command line and the environment of each container that starts torchrun, by overlay and name."""
    found = {}
    for overlay in OVERLAYS:
        for name, pod in pods(overlay).items():
            container = pod["spec"]["containers"][0]
            if TORCHRUN in container["command"]:
                found[f"{overlay}-{name}"] = (
                    container["command"],
                    {e["name"]: e["value"] for e in container["env"] if "value" in e},
                )
    return found


LINES = lines()


def on_loopback(command: list[str], port: int, config: Path) -> list[str]:
    """What follows `python -m` in the line, with this machine as every node, a process for each, and this YAML."""
    assert command[:2] == ["python3", "-m"]
    text = "\0".join(command[2:])
    text, hosts = re.subn(r"(--rdzv-endpoint=)[^:]+:\d+", rf"\g<1>127.0.0.1:{port}", text)
    text, processes = re.subn(r"(--nproc-per-node=)\d+", r"\g<1>1", text)
    text, configs = re.subn("/config/run.yaml", str(config), text)
    assert (hosts, processes, configs) == (1, 1, 1)
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


class Nodes:
    """The nodes of one line, all on this machine, with a rank each."""

    def __init__(self, name: str, run: LiveRun) -> None:
        """Start them in order: node 0 has the rendezvous, and no other node can replace it."""
        self._command, self._environment = LINES[name]
        self._name, self._run = name, run
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.agents = [self.start(0)]
        wait_for(lambda: is_open(f"127.0.0.1:{self._port}"), *self.agents)
        self.agents += [self.start(node) for node in range(1, option(self._command, "nnodes"))]

    def start(self, node: int) -> Child:
        environment = {**self._environment, **ENVIRONMENT, "PET_LOCAL_ADDR": "127.0.0.1"}
        log = self._run.config.run.logs_dir / f"{self._name}-{node}.log"
        return Child(self._name, on_loopback(self._command, self._port, self._run.path), log, environment)

    def rank(self, node: int) -> psutil.Process:
        """The process of the node's rank, which may be about to be replaced."""
        agent = psutil.Process(self.agents[node].process.pid)
        return next(child for child in agent.children() if "--config" in child.cmdline())

    def lose(self, node: int) -> None:
        """Kill the node's agent and its rank, as when its machine fails, and start the node again."""
        rank = self.rank(node)
        self.agents[node].process.kill()
        rank.kill()
        self.agents[node].process.wait()
        self.agents[node] = self.start(node)

    def stop(self) -> list[int]:
        for agent in self.agents:
            agent.process.terminate()
        return [agent.process.wait(120) for agent in self.agents]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_lines_train_and_what_dies_is_replaced(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """The trainer loses a rank, the actor a node."""
    client = {"retries": 60, "train_retries": 60, "backoff_s": 0.2}
    settings = {"ranks": 2, "steps": STEPS, "client": client}
    run = make_run(tmp_path, checkpoints, actor=settings, trainer={"ranks": 2})
    with contextlib.ExitStack() as stack:
        server = start_server(run)
        stack.callback(stop_process, server)
        trainer = Nodes("ranks-rlhf-trainer", run)
        stack.callback(trainer.stop)
        wait_for(lambda: (run.config.run.dir / "server.json").is_file(), server, *trainer.agents)
        actor = Nodes("ranks-rlhf-actor", run)
        stack.callback(actor.stop)
        everyone = [server, *trainer.agents]
        wait_for(lambda: run.journal.last_step() >= 1, *everyone, *actor.agents)
        trainer.rank(0).kill()
        actor.lose(1)
        for agent in actor.agents:
            assert agent.process.wait(300) == 0, agent.log_path.read_text()
        assert {line["step"] for line in run.critic_updates(up_to=STEPS)} == set(range(1, STEPS + 1))
        assert run.store.manifest(run.store.current() or 0).step == STEPS
        assert json.loads((run.config.run.dir / "actor_summary.json").read_text())["steps"] == STEPS
        assert trainer.stop() == [1, 1], "torchrun's own exit code after SIGTERM"
        logs = "".join(agent.log_path.read_text() for agent in trainer.agents)
        assert "forcefully" not in logs, "SIGTERM did not end the ranks"
