"""A run's YAML on free ports, and its processes: server, sidecar, actor."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from settings import nested
from waiting import wait_for

from rlhf_triton.client.control_plane import ControlPlane
from rlhf_triton.config.actor import ActorSection
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.sections import TrainerSection
from rlhf_triton.digests import digest_of
from rlhf_triton.store.control_key import GRPC_HEADER, control_key
from rlhf_triton.store.journal import Journal
from rlhf_triton.store.jsonl import read_jsonl
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.tools.render_configs import render_repository
from rlhf_triton.tools.server.child import Child
from rlhf_triton.tools.server.ports import PORT_KEYS, with_free_ports
from rlhf_triton.trainer.publish import initialise_stores

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


@dataclasses.dataclass(frozen=True)
class LiveRun:
    """A run's YAML with real ports."""

    path: Path
    config: RunConfig

    @property
    def store(self):
        """The critic's versions."""
        return WeightsStore(self.config.run.weights_dir)

    @property
    def reward_store(self):
        """The versions of a live reward model."""
        return WeightsStore(self.config.run.reward_weights_dir)

    @property
    def journal(self):
        """The journal of accepted requests."""
        return Journal(self.config.run.journal_dir, self.config.run.identity)

    @property
    def url(self):
        """`host:port` of inference."""
        return self.config.server.http_url

    @property
    def run_id(self):
        """The run's identity in the journal."""
        return self.config.run.identity

    def next_step(self):
        """Return the training step to send next."""
        return self.journal.last_step() + 1

    def start(self, name, *arguments, module=None, **env):
        """Start `python -m <module> --config <the YAML> <arguments>`, with its output in the run's logs."""
        module_arguments = (module or f"rlhf_triton.{name}").split()
        log = self.config.run.logs_dir / f"{name}.log"
        return Child(name, [*module_arguments, "--config", str(self.path), *arguments], log, {**ENVIRONMENT, **env})

    def critic_metrics(self):
        """Return the sidecar's metrics of its updates and reloads."""
        return read_jsonl(self.config.run.dir / "critic_metrics.jsonl")

    def metric(self, name, **labels):
        """Return a counter or gauge of the server's; 0 before its first event."""
        with urllib.request.urlopen(f"http://{self.config.server.metrics_url}/metrics", timeout=120) as answer:
            text = answer.read().decode()
        shown = ",".join(f'{label}="{value}"' for label, value in labels.items())
        found = re.search(rf"^rlhf_{name}{{{re.escape(shown)}}} (\S+)", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def critic_updates(self, *, up_to):
        """Return the metrics of updates; wait for that of step `up_to`, which is written after the answer."""

        def lines():
            return [line for line in self.critic_metrics() if "loss_mean" in line]

        wait_for(lambda: any(line["step"] == up_to for line in lines()))
        return lines()


def make_run(folder, checkpoints, **sections):
    """Write and load a run in `folder` on free ports; `sections` are merged over small settings."""
    data = {
        "run": {"dir": str(folder), "run_id": "test"},
        "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
        "reward": {"model": str(checkpoints.reward)},
        "critic": {"model": str(checkpoints.critic)},
        "trainer": {
            "lr": 1e-3,
            "warmup_steps": 0,
            "max_steps": 100,
            "checkpoint_every": 100,
            "publish": {"keep": 12},
        },
        "actor": {
            "model": str(checkpoints.policy),
            "prompts_path": str(checkpoints.prompts),
            "validation_prompts": str(checkpoints.prompts),
            "validation_size": 8,
            "steps": 3,
            "rollout_size": 8,
            "generation_batch_size": 4,
            "max_new_tokens": 8,
            "minibatch_size": 4,
            "checkpoint_every": 2,
            "lr": 1e-3,
            "mask_unfinished": False,
            "prompts_max_tokens": 64,
            "client": {"deadline_s": 120},
        },
    }
    for name, section in sections.items():
        for key, value in section.items():
            old = data.setdefault(name, {}).get(key)
            data[name][key] = {**old, **value} if isinstance(old, dict) else value
    if "model" not in data.get("rewards", data["reward"]):
        data["reward"].pop("model")  # would have no effect, and be refused
    data["actor"], data["trainer"] = nested(ActorSection, data["actor"]), nested(TrainerSection, data["trainer"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    data["server"] |= with_free_ports(load_config(path).server).model_dump(include=set(PORT_KEYS))
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return LiveRun(path, load_config(path))


@dataclasses.dataclass
class System:
    """A run with its processes; tests may stop and start the sidecar."""

    run: LiveRun
    server: Child
    sidecar: Child

    def stop_sidecar(self):
        """Stop the sidecar as Ctrl-C does; return its exit code."""
        return stop_process(self.sidecar)

    def start_sidecar(self, *arguments):
        """Start a new sidecar, which continues where the last one stopped, and wait until it follows the journal."""
        self.sidecar = start_sidecar(self.run, *arguments)
        wait_for(self.run.journal.is_followed, self.sidecar)

    @contextlib.contextmanager
    def without_probes(self, *models):
        """Pause the server's supervisor, whose probes of idle models would disturb a count of their requests."""
        self.server.process.send_signal(signal.SIGSTOP)
        try:
            with ControlPlane(self.run.config.server.grpc_url) as control:
                for model in models:  # wait for the supervisor's last probe
                    control.probe(model, 120.0)
            yield
        finally:
            self.server.process.send_signal(signal.SIGCONT)

    def stop(self):
        """Stop both processes, in parallel."""
        with ThreadPoolExecutor(2) as executor:
            list(executor.map(stop_process, (self.sidecar, self.server)))


def start_system(run):
    """Start server and sidecar of a new run, and wait until both are ready."""
    server = start_server(run)
    system = System(run, server, start_sidecar(run))
    try:
        # Three to five processes import torch: minutes on a busy machine.
        wait_for(lambda: (run.config.run.dir / "server.json").is_file(), server, system.sidecar)
        # A step that is sent before the sidecar follows the journal is refused after a few seconds.
        wait_for(run.journal.is_followed, server, system.sidecar)
    except BaseException:
        system.stop()
        raise
    return system


def start_server(run):
    """Start the server of a new run without waiting.

    Version 0 and the repository are made here, where torch and transformers are loaded already. The server runs under
    a process of its own, because other tests count the servers that the test process has started.
    """
    initialise_stores(run.config)
    render_repository(run.config, run.config.run.repository_dir)
    return run.start("server", module="serve_rendered", PYTHONPATH=str(Path(__file__).parent))


def run_actor(run, name, *overrides):
    """Run `python -m rlhf_triton.actor` to its end; return its exit code and its log."""
    actor = run.start(name, *overrides, module="rlhf_triton.actor")
    try:
        code = actor.process.wait(180)
    finally:
        stop_process(actor)
    log = actor.log_path.read_text()
    print(log)
    return code, log


def start_sidecar(run, *arguments):
    """Start `python -m rlhf_triton.trainer` without waiting: the journal keeps the requests until it reads them."""
    return run.start("sidecar", *arguments, module="rlhf_triton.trainer")


def reload_model(run, model, change):
    """Have the server load `model` with its rendered configuration, changed by `change`.

    Not with its active configuration, so that tests that share a server do not inherit each other's settings.
    """
    from google.protobuf import json_format, text_format
    from tritonclient.grpc import InferenceServerClient as GrpcClient
    from tritonclient.grpc import model_config_pb2

    rendered = (run.config.run.repository_dir / model / "config.pbtxt").read_text()
    message = text_format.Parse(rendered, model_config_pb2.ModelConfig())
    config = json.loads(json_format.MessageToJson(message, preserving_proto_field_name=True))
    change(config)
    with GrpcClient(run.config.server.grpc_url) as control:
        headers = {GRPC_HEADER: control_key(run.config.run.weights_dir)}
        control.load_model(model, headers=headers, config=json.dumps(config), client_timeout=120.0)


def stop_process(child):
    """Stop the process as Ctrl-C does; return its exit code."""
    return child.stop(signal.SIGINT, 120.0)


def validations_of(folder):
    """Return the files of a run's validations without times and values, which depend on when an update is served."""
    lines = [
        {**line, "timers/validation_time": 0, "explained_variance": None}
        for line in read_jsonl(folder / "validations.jsonl")
    ]
    return [
        lines,
        json.loads((folder / "best" / "best.json").read_text()),
        digest_of(folder / "best" / "model.safetensors"),
    ]
