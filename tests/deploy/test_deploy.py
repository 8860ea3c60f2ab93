"""Tests of deploy/ and Dockerfile.triton beyond `make check-deploy`; what they start runs on loopback.

`tools/install.sh` runs in a fresh virtual environment: each image gets only what it needs.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import venv
from pathlib import Path

import psutil
import pytest
import yaml
from live_system import ENVIRONMENT, make_run, start_server, stop_process
from manifests import DEPLOY, OVERLAYS, containers, manifests, pods
from waiting import wait_for

from rlhf_triton.actor.run.stopping import STOP_GRACE_S
from rlhf_triton.config.loading import load_config
from rlhf_triton.tools.server.child import Child
from rlhf_triton.tools.server.drain import DRAIN_S
from rlhf_triton.tools.server.ports import is_open
from rlhf_triton.tools.server.tritonserver import EXIT_TIMEOUT_S

layout = pytest.mark.parametrize("overlay", OVERLAYS)
POD_CONTEXT = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
CONTAINER_CONTEXT = {
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


@layout
def test_pods_have_no_privileges_and_write_only_to_their_volumes(overlay):
    for name, pod in pods(overlay).items():
        spec = pod["spec"]
        assert spec["securityContext"].items() >= POD_CONTEXT.items(), name
        assert not spec["automountServiceAccountToken"]
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}} in spec["volumes"]
        for container in containers(pod):
            assert container["securityContext"].items() >= CONTAINER_CONTEXT.items(), name
        assert {"name": "shm", "mountPath": "/dev/shm"} in spec["containers"][0]["volumeMounts"]


def config_of(overlay, folder):
    """Return the run of the overlay's ConfigMap."""
    (text,) = [manifest["data"]["run.yaml"] for manifest in manifests(overlay) if manifest["kind"] == "ConfigMap"]
    (folder / "run.yaml").write_text(text)
    return load_config(folder / "run.yaml")


@layout
def test_layout_yaml_is_valid_and_its_paths_are_mounted(overlay, tmp_path):
    config = config_of(overlay, tmp_path)
    assert config.run.dir.is_relative_to("/data")
    assert config.server.training_key_env == "TRAINING_KEY"
    if overlay == "single":
        return
    specs = {name: pod["spec"] for name, pod in pods(overlay).items()}
    server = specs["rlhf-server"]["containers"][0]
    probe = server["startupProbe"]
    repository = probe["exec"]["command"][probe["exec"]["command"].index("--repository") + 1]
    assert Path(repository) == config.server_dir / "model_repository"
    assert config.server_dir.is_relative_to("/tmp")  # not on the volume that the servers share
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 2 * config.server.start_timeout_s
    assert [port["containerPort"] for port in server["ports"]] == [8000, 8001, 8002]
    (pre_stop_s,) = [word for word in server["lifecycle"]["preStop"]["exec"]["command"] if word.isdigit()]
    stopping_s = int(pre_stop_s) + DRAIN_S + EXIT_TIMEOUT_S + 5
    assert specs["rlhf-server"]["terminationGracePeriodSeconds"] >= stopping_s
    trainer = specs["rlhf-trainer"]["containers"][0]
    assert str(config.run.journal_dir / "heartbeat.json") in trainer["readinessProbe"]["exec"]["command"][-1]
    assert specs["rlhf-actor"]["terminationGracePeriodSeconds"] > STOP_GRACE_S + 5
    assert config.actor.client.servers == ("dns:rlhf-server:8000",)
    assert config.trainer.servers == ["dns:rlhf-server:8001"]


def secrets(pod):
    """Return the secrets that become variables of the pod's containers; a `key` selects one of a secret's keys."""
    return [
        source.get("secretRef") or source["valueFrom"]["secretKeyRef"]
        for container in containers(pod)
        for source in [*container.get("envFrom", []), *container.get("env", [])]
        if "secretRef" in source or "secretKeyRef" in source.get("valueFrom", {})
    ]


@layout
def test_pods_receive_only_the_secrets_they_need(overlay):
    """Pods that serve receive all secrets, because rewards may be judges."""
    found = {name: [secret.get("key") for secret in secrets(pod)] for name, pod in pods(overlay).items()}
    several = {"rlhf-server": [None], "rlhf-trainer": ["TRITON_CONTROL_KEY"], "rlhf-actor": ["TRAINING_KEY"]}
    assert found == ({"rlhf-run": [None]} if overlay == "single" else several)


# ---- starting runs: torchrun lines, on loopback ----

# Starts as many processes as nodes are asked for, and forwards SIGTERM, as srun does. The server stays on loopback.
TORCHRUN = "torch.distributed.run"
STEPS = 4


def lines():
    """Return command line and environment of each container that starts torchrun, by overlay and name."""
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


def on_loopback(command, port, config):
    """Return what follows `python -m` in the line, with this machine as every node, one process each, and this YAML."""
    assert command[:2] == ["python3", "-m"]
    text = "\0".join(command[2:])
    text, hosts = re.subn(r"(--rdzv-endpoint=)[^:]+:\d+", rf"\g<1>127.0.0.1:{port}", text)
    text, processes = re.subn(r"(--nproc-per-node=)\d+", r"\g<1>1", text)
    text, configs = re.subn("/config/run.yaml", str(config), text)
    assert (hosts, processes, configs) == (1, 1, 1)
    return text.split("\0")


def option(command, name):
    return int(next(word.partition("=")[2] for word in command if word.startswith(f"--{name}=")))


def test_torchrun_arguments_agree_with_their_manifests():
    assert set(LINES) == {"ranks-rlhf-actor", "ranks-rlhf-trainer"}
    for name, (command, _) in LINES.items():
        overlay, _, workload = name.partition("-")
        found = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests(overlay)}
        nodes = option(command, "nnodes")
        processes = option(command, "nproc-per-node")
        (text,) = [manifest["data"]["run.yaml"] for (kind, _), manifest in found.items() if kind == "ConfigMap"]
        assert yaml.safe_load(text)[workload.removeprefix("rlhf-")]["ranks"] == nodes * processes
        (spec,) = [found[kind, workload]["spec"] for kind in ("StatefulSet", "Job") if (kind, workload) in found]
        assert {spec[key] for key in ("replicas", "completions", "parallelism") if key in spec} == {nodes}
        pod = spec["template"]["spec"]
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == str(processes)
        assert pod["terminationGracePeriodSeconds"] > option(command, "shutdown-timeout")
        service = spec.get("serviceName") or pod["subdomain"]
        assert f"--rdzv-endpoint={workload}-0.{service}:29400" in command
        # The headless service gives the pods their names, also before they are ready.
        naming = found["Service", service]["spec"]
        assert naming["selector"] == spec["template"]["metadata"]["labels"]
        assert (naming["clusterIP"], naming["publishNotReadyAddresses"]) == ("None", True)


class Nodes:
    """The nodes of one torchrun line, all on this machine, with one rank each."""

    def __init__(self, name, run):
        """Start the nodes in order: node 0 has the rendezvous, and no other node can replace it."""
        self._command, self._environment = LINES[name]
        self._name = name
        self._run = run
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.agents = [self.start(0)]
        wait_for(lambda: is_open(f"127.0.0.1:{self._port}"), *self.agents)
        self.agents += [self.start(node) for node in range(1, option(self._command, "nnodes"))]

    def start(self, node):
        environment = {**self._environment, **ENVIRONMENT, "PET_LOCAL_ADDR": "127.0.0.1"}
        log = self._run.config.run.logs_dir / f"{self._name}-{node}.log"
        return Child(self._name, on_loopback(self._command, self._port, self._run.path), log, environment)

    def rank(self, node):
        """Return the process of the node's rank, which may be about to be replaced."""
        agent = psutil.Process(self.agents[node].process.pid)
        return next(child for child in agent.children() if "--config" in child.cmdline())

    def lose(self, node):
        """Kill the node's agent and rank, as if its machine failed, and start the node again."""
        rank = self.rank(node)
        self.agents[node].process.kill()
        rank.kill()
        self.agents[node].process.wait()
        self.agents[node] = self.start(node)

    def stop(self):
        for agent in self.agents:
            agent.process.terminate()
        return [agent.process.wait(120) for agent in self.agents]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchrun_commands_train_and_replace_dead_ranks_and_nodes(tmp_path, checkpoints):
    """The trainer loses a rank, the actor a node."""
    settings = {"ranks": 2, "steps": STEPS}
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
        assert run.store.manifest(run.store.current()).step == STEPS
        assert json.loads((run.config.run.dir / "actor_summary.json").read_text())["steps"] == STEPS
        assert trainer.stop() == [1, 1], "torchrun's exit code after SIGTERM is another one"
        logs = "".join(agent.log_path.read_text() for agent in trainer.agents)
        assert "forcefully" not in logs, "SIGTERM did not end the ranks, so torchrun killed them"


# ---- Dockerfile.triton, without a Docker engine ----

ROOT = DEPLOY.parent
DOCKERFILE = ROOT / "Dockerfile.triton"
INSTALL = ROOT / "tools" / "install.sh"
TARGETS = ("trainer", "single", "server")
NOWHERE = {"pytriton", "vaderSentiment", "pytest", "benchmarks"}  # in no image
TRAINING = {"peft", "tensorboard", "pyarrow", "matplotlib"}
STAGES = {
    "serving,operating,judge": (
        "import rlhf_triton.rewards.judge, rlhf_triton.tools.render_configs, rlhf_triton.tools.serve",
        NOWHERE | TRAINING,
    ),
    "training": (
        "import rlhf_triton.tools.run, rlhf_triton.actor.loop, matplotlib, peft, pyarrow, tensorboard",
        NOWHERE,
    ),
}


def stages():
    """Return the instructions of each stage, after those of its base stage."""
    found = {}
    for line in DOCKERFILE.read_text().replace("\\\n", " ").splitlines():
        word, _, argument = line.partition(" ")
        if word == "FROM":
            base, _, name = argument.partition(" AS ")
            found[name] = list(found.get(base, []))
        elif word.isupper() and found:
            found[name].append((word, argument))
    return found


def last(target, name):
    """Return the last instruction of that name, which is the effective one."""
    return [argument for word, argument in stages()[target] if word == name][-1]


@pytest.mark.parametrize("target", TARGETS)
def test_image_runs_unprivileged_with_existing_commands(target):
    user, _, group = last(target, "USER").partition(":")
    assert int(user) > 0 < int(group)
    lines = [last(target, "CMD"), last(target, "HEALTHCHECK").partition("CMD ")[2]]
    modules = [re.match(r'\["python3", "-m", "([\w.]+)"', line)[1] for line in lines if line]
    assert len(modules) == (2 if target == "server" else 1)  # the others have nothing that Docker could ask
    for module in [*modules, "rlhf_triton.tools.server.drain"]:  # the last is the preStop hook of a server alone
        script = f"import sys, {module}; print(*sys.modules)"
        loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
        if module.startswith("rlhf_triton.tools.server"):  # the standard library and numpy: started every few seconds
            assert not {"psutil", "tritonclient", "pydantic", "jinja2", "torch"} & set(loaded.stdout.split())


def test_dockerfile_copies_existing_paths_and_no_tests():
    copied = {
        word for stage in stages().values() for name, line in stage if name == "COPY" for word in line.split()[:-1]
    }
    assert all((ROOT / path).exists() for path in copied)
    assert not copied & {"tests", "benchmarks", "deploy", "."}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_install_script_installs_what_each_image_needs(tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    assert str(python) != sys.executable
    (kept := ROOT / "build" / "kept").mkdir(parents=True, exist_ok=True)  # as simulated GPUs are
    for extras, (imports, absent) in STAGES.items():
        done = subprocess.run(
            [str(INSTALL), extras],
            env={**os.environ, "PYTHON": str(python)},  # pip keeps the settings that it has here
            capture_output=True,
            text=True,
            timeout=840,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        code = f"{imports}; import importlib.util as u; print([n for n in {sorted(absent)} if u.find_spec(n)])"
        ran = subprocess.run([str(python), "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr
        script = [str(python.with_name("rlhf-triton")), "serve", "--help"]
        ran = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
    kept.rmdir()
