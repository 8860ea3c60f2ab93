"""Starts a run's tritonserver: its critic's first version, the rendered repository, the server, its supervisor."""

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_triton.config.live_models import live_models
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.monitoring.log_lines import say
from rlhf_triton.process import RUN_MODULE
from rlhf_triton.store.control_key import control_key
from rlhf_triton.store.run_lock import only_server
from rlhf_triton.tools.server.child import WaitCheck
from rlhf_triton.tools.server.health import ServerHealth
from rlhf_triton.tools.server.ports import bind_address
from rlhf_triton.tools.server.server_log import Log
from rlhf_triton.tools.server.supervisor import Supervisor
from rlhf_triton.tools.server.triton_home import ServerStartError, find_tritonserver, lay_out_backends
from rlhf_triton.tools.server.tritonserver import TritonServer

SAFE_VERSION = (2, 69)  # version in the 26.05 container; older releases have published vulnerabilities


def missing_versions(config: RunConfig) -> str:
    """Return "version 0 of the critic's and the reward's weights", of the live models that have no version; or ""."""
    names = [f"the {model.name}'s" for model in live_models(config) if not (model.store / "CURRENT").exists()]
    return f"version 0 of {' and '.join(names)} weights" if names else ""


def ensure_first_version(config: RunConfig, path: Path, overrides: Sequence[str]) -> None:
    """Run the trainer to write version 0 of each live model that has no version yet.

    Args:
        config: the configuration loaded from `path` with `overrides`.

    Raises:
        ServerStartError: the trainer failed; its output says why.
    """
    missing = missing_versions(config)
    if not missing:
        return
    what = f"creating {missing}"
    say(what)
    # The child has its own session, so Ctrl-C reaches only this process; its exception makes `run` kill the child.
    command = [
        sys.executable,
        "-u",
        RUN_MODULE,
        "rlhf_triton.trainer",
        "--config",
        str(path),
        "--init-only",
        *overrides,
    ]
    output = sys.stdout if sys.stdout is sys.stderr else None  # as `say`
    code = subprocess.run(command, check=False, start_new_session=True, stdout=output).returncode
    if code != 0:
        raise ServerStartError(
            f"{what} failed: `python -m rlhf_triton.trainer` ended with exit code {code}; its output above says why"
        )


def start_server(config: RunConfig, *, log: Log = print, check: WaitCheck = lambda: None) -> TritonServer:
    """Render the run's model repository, start a server on it, and return it once every model has answered a request.

    The caller must stop the server. `section` of the server has the actual ports where the configuration has 0. `log`
    receives progress messages and the readable lines of the server's log; the full log is in `logs/` of the server's
    folder. `check` is called repeatedly; an exception that it raises ends the start.

    Raises:
        ConfigError: the repository cannot be rendered.
        ServerStartError: the server cannot start; nothing is left running.
    """
    from rlhf_triton.tools.render_configs import (
        render_repository,  # imports jinja2 and protobuf, which --help does not need
    )

    render_repository(config, repository_of(config))
    home = find_tritonserver(config.server.tritonserver)
    server = TritonServer(
        home,
        repository_of(config),
        config.server,
        config.server_dir / config.run.logs_dir.name / "tritonserver.log",
        backends=lay_out_backends(home, config.server_dir / "backends"),
        control_key=control_key(config.run.weights_dir),
        log=log,
        trace_endpoint=config.run.trace_endpoint,
    )
    try:
        server.start()
        server.wait_ready(config.server_file, check)
        _warn_if_exposed(server, log)
    except BaseException:  # also that of `check`, since the caller has no server to stop yet
        server.stop()
        raise
    at = server.section
    log(f"ready: inference http://{at.http_url}, model control grpc {at.grpc_url}, metrics {at.metrics_url}")
    return server


def supervised(config: RunConfig, *, log: Log, check: WaitCheck) -> Supervisor[TritonServer]:
    """Start the run's server as `start_server` does, and supervise it; holds the lock of its folder."""
    lock = server_lock(config)
    return Supervisor(lambda: start_server(config, log=log, check=check), log=log, lock=lock, watch=ServerHealth)


def server_lock(config: RunConfig) -> contextlib.AbstractContextManager[None]:
    """Hold the lock of the server's folder. Raises RlhfError if it is taken."""
    return only_server(config.server_dir, "server.dir" if config.server.dir else "run.dir")


def repository_of(config: RunConfig) -> Path:
    """Return the folder of the model repository that this server renders and loads."""
    return config.server_dir / config.run.repository_dir.name


def _warn_if_exposed(server: TritonServer, log: Log) -> None:
    host = server.section.host
    if bind_address(host).startswith("127."):
        return
    log(
        f"warning: server.host is {host}: every client that can reach it can send scoring requests and, unless "
        "server.training_key_env is set, training requests"
    )
    with server.control() as control:
        version = control.server_version()
    if version < SAFE_VERSION:
        release = ".".join(map(str, version))
        log(
            f"warning: tritonserver {release} has known vulnerabilities; beyond loopback, use 2.69 (NGC 26.05) or later"
        )
