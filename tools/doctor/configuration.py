"""Checks of a configuration, and of the server that runs with it."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

from python_backend.checkpoints.tokenization import encode_prompt, load_tokenizer
from python_backend.config import ConfigError, RunConfig
from python_backend.store.durable import read_json, refusal
from python_backend.store.run_lock import in_progress
from tools.doctor.finding import Finding, failed, warning
from tools.preflight import check_run
from tools.render_configs import render_configs
from tools.server.health import is_triton
from tools.server.model_loading import probe
from tools.server.ports import PORT_KEYS, check_ports, is_open, with_free_ports
from tools.server.triton_home import ServerStartError
from trainer.control_plane import ControlPlane, ControlPlaneError

PROBE_S = 30.0
COPIES = 6  # of a trained model on the disk: two versions, and a checkpoint of weights and two moments twice as large


def files(config: RunConfig) -> Iterator[Finding]:
    """Check the checkpoints, prompts and reward functions that the configuration names, a line for each problem."""
    try:
        check_run(config)
    except ConfigError as error:
        for line in str(error).splitlines():
            yield failed("files", line)
    else:
        yield Finding("files", "checkpoints, prompts and reward functions are there")
        if config.has_actor:
            yield _text_prompts(config)


def _text_prompts(config: RunConfig) -> Finding:
    """Return what plain-text prompts begin with."""
    tokenizer = load_tokenizer(config.actor.policy.checkpoint.absolute())
    before = tokenizer.convert_ids_to_tokens(encode_prompt(tokenizer, "text")[0])
    if before and not config.actor.prompts.add_special_tokens:
        return warning(
            "prompts",
            f"text prompts lack {' '.join(before)}, with which the policy's tokenizer begins a text; set "
            "actor.prompts.add_special_tokens to true, unless the policy was trained without",
        )
    return Finding("prompts", f"text prompts begin with {' '.join(before) or 'no special token'}")


def devices(config: RunConfig) -> Iterator[Finding]:
    """Check that torch can use the GPUs that the configuration names."""
    on_gpus = [place for place in config.places if place.cards]
    if not on_gpus:
        return
    torch = importlib.import_module("torch")
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cuda = torch.version.cuda
    for place in on_gpus:
        last = place.cards[-1]
        needed = int(last.partition(":")[2]) + 1
        if needed > usable:
            found = (
                f"torch, built for CUDA {cuda}, can use {usable}: update the driver if nvidia-smi shows a lower version"
                if cuda
                else "this torch is built for the CPU: install one that is built for CUDA"
            )
            yield failed(
                "devices", f"{place.key}: {last} needs {needed} GPU{'s'[: needed > 1]}; {found}, or set it to cpu"
            )


def rendering(config: RunConfig) -> Iterator[Finding]:
    """Check that the model repository can be rendered."""
    yield Finding("rendering", ", ".join(sorted(render_configs(config))))


def ports(config: RunConfig) -> Iterator[Finding]:
    """Check that the server's ports are free, or are those of this run's server."""
    if is_running(config):
        yield Finding("ports", "used by this run's server")
        return
    section = with_free_ports(config.server)
    check_ports(section)
    numbers = ", ".join(str(getattr(section, key)) for key in PORT_KEYS)
    yield Finding("ports", f"{numbers} are free" if section == config.server else "chosen when the server starts")


def monitoring(config: RunConfig) -> Iterator[Finding]:
    """Check that the ports of actor and sidecar for Prometheus are free, and no others of the run."""
    section, used = config.monitoring, {getattr(config.server, key): f"server.{key}" for key in PORT_KEYS}
    for key in ("actor_port", "trainer_port"):
        port = getattr(section, key)
        if not port:
            continue
        if port in used:
            yield failed("monitoring", f"monitoring.{key}: {port} is {used[port]}, too; choose another port")
        elif not in_progress(config.run.dir) and is_open(f"{section.host}:{port}"):
            yield warning(
                "monitoring", f"monitoring.{key}: {port} is taken, so there would be no metrics; choose another port"
            )
        elif importlib.util.find_spec("prometheus_client") is None:
            yield warning("monitoring", f"monitoring.{key} needs prometheus-client: install it, or remove the key")
        else:
            yield Finding("monitoring", f"monitoring.{key}: {port}")
        used[port] = f"monitoring.{key}"


def server_dir(config: RunConfig) -> Iterator[Finding]:
    """Check that files can be written in `server.dir`, if it is set; `run.dir` is checked as part of the disk."""
    folder = config.server_dir.absolute()
    if folder.is_relative_to(config.run.dir.absolute()):
        return
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if error := refusal(place):
        yield failed("server.dir", f"{folder} cannot be written: {error.strerror}; set it to another folder")


def is_running(config: RunConfig) -> bool:
    """Return whether the run's own server answers: another run's, or another program, may use the configured ports."""
    return (config.server_dir / "server.json").is_file() and is_triton(server_urls(config)["http"])


def server_urls(config: RunConfig) -> dict[str, str]:
    """Return the URLs `http` and `grpc` of the run's server: those that it wrote, else those configured."""
    written = read_json(config.server_dir / "server.json") or {}
    return {"http": config.server.http_url, "grpc": config.server.grpc_url, **written}


def server(config: RunConfig) -> Iterator[Finding]:
    """Send a request to every model of the run's server, if it is up."""
    if not is_running(config):
        yield Finding("server", "not running")
        return
    with ControlPlane(server_urls(config)["grpc"]) as control:
        for model in sorted(render_configs(config)):
            start = time.monotonic()
            try:
                probe(control, model, PROBE_S)
            except (ControlPlaneError, ServerStartError) as error:
                text = str(error).removeprefix(f"{model}: ")
                yield failed(model, f"{text}; the log is {config.server_dir / 'logs' / 'tritonserver.log'}")
            else:
                yield Finding(model, f"answers in {(time.monotonic() - start) * 1000:.0f} ms")


def disk_bytes(config: RunConfig) -> int:
    """Return the bytes that a run keeps on its disk, about: of the models that it trains."""
    trained = [config.actor.policy.checkpoint] if config.has_actor else []
    trained += [config.critic.checkpoint] if config.serves_critic else []
    return COPIES * sum(_weights_bytes(folder) for folder in trained)


def _weights_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.exists())  # a link may dangle


CHECKS = {
    "files": files,
    "devices": devices,
    "rendering": rendering,
    "server.dir": server_dir,
    "ports": ports,
    "monitoring": monitoring,
    "server": server,
}
"""The checks of a configuration by name, in the order in which they run."""
