"""`rlhf-triton serve`: renders the repository, starts tritonserver on it, and serves until SIGINT or SIGTERM.

It then drains the server, so that no request fails if the clients have another one; a second signal skips the wait.
Other commands and tests start their servers with `start_server`.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlhf_triton.config.command_line import limit_access, log_to_stderr, report, reporting, run_parser
from rlhf_triton.config.live_models import live_models
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.without_effect import effect_line
from rlhf_triton.errors import RlhfError
from rlhf_triton.monitoring.log_lines import say
from rlhf_triton.process import RUN_MODULE, StopRequested, StopSignals
from rlhf_triton.store.control_key import control_key
from rlhf_triton.store.run_lock import make_folder, only_server
from rlhf_triton.tools.arguments import parse
from rlhf_triton.tools.checks import preflight
from rlhf_triton.tools.checks.findings import Level, found_by
from rlhf_triton.tools.server.child import WaitCheck
from rlhf_triton.tools.server.health import ServerHealth
from rlhf_triton.tools.server.ports import bind_address, check_ports, with_free_ports
from rlhf_triton.tools.server.server_log import Log
from rlhf_triton.tools.server.shell_command import shell_command
from rlhf_triton.tools.server.supervisor import Supervisor
from rlhf_triton.tools.server.triton_home import ServerStartError, find_tritonserver, lay_out_backends
from rlhf_triton.tools.server.tritonserver import TritonServer

WATCH_INTERVAL_S = 0.2
SAFE_VERSION = (2, 69)  # version in the 26.05 container; older releases have published vulnerabilities


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM, then return 0; return 2 if the server cannot start."""
    parser = run_parser("Render the model repository and serve it.")
    parser.add_argument("--tritonserver", type=Path, help="the executable; default: the one in the wheel, else on PATH")
    parser.add_argument("--print-command", action="store_true", help="print how to start a plain tritonserver instead")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what the models hold on each device, start nothing; exit 1 if the free memory is less",
    )
    arguments = parse(parser, argv)
    overrides = list(arguments.overrides)
    if arguments.tritonserver is not None:
        overrides.append(f"server.tritonserver={arguments.tritonserver}")
    if arguments.dry_run:
        return print_memory(load_config(arguments.config, overrides), served_only=True)
    stop = StopSignals()
    supervisor = None
    try:
        if arguments.print_command:
            from rlhf_triton.tools.render_configs import render_repository  # as in `start_server`

            with stop.raising(), contextlib.redirect_stdout(sys.stderr):
                config = _prepared(arguments.config, overrides)
                render_repository(config, repository_of(config))
            print(shell_command(config, repository_of(config)))
            return 0
        with stop.raising():
            config = _prepared(arguments.config, overrides, is_starting=True)
        supervisor = supervised(config, log=say, check=stop.check)
        say("serving; Ctrl-C drains and stops it")
        while True:
            stop.check()
            supervisor.restart_if_down()
            time.sleep(WATCH_INTERVAL_S)
    except StopRequested:
        if supervisor is not None:
            say("draining: further requests are refused; Ctrl-C again does not wait for those in flight")
            if supervisor.stop_watching():
                supervisor.server.drain(give_up=lambda: stop.count > 1)
        return 0
    finally:
        if supervisor is not None:
            supervisor.stop()
            say("stopped")


def print_memory(config: RunConfig, *, served_only: bool = False) -> int:
    """Print the table of `memory_table`, and the settings without effect.

    Return 1 if a file is unusable, or if a device has less free memory than its models need.
    """
    from rlhf_triton.tools.memory_table import memory_lines  # torch: slow to import

    command = "serve --dry-run" if served_only else "run --dry-run"
    memory = preflight.findings(config, command, found_by)
    refused = [finding.text for finding in memory if finding.level is Level.FAILED]
    lines, problems = memory_lines(config, served_only=served_only)
    problems = [*refused, *problems]
    if line := effect_line(config):
        lines.append(line)
    print("\n".join(lines))
    return report(RlhfError("\n".join(problems)), 1) if problems else 0


def _prepared(path: Path, overrides: list[str], *, is_starting: bool = False) -> RunConfig:
    """Return the configuration with fixed ports, once the files that it names exist.

    `is_starting`: the ports must be free, too.
    """
    config = load_config(path, overrides)
    section = with_free_ports(config.server)
    if is_starting:
        check_ports(section)
    limit_access(config.run)
    if config.run.log_format == "json":
        log_to_stderr("server", config.run)
    preflight.check(config, "serve")
    if config.gpu_precisions:
        say(f"on GPUs: {config.gpu_precisions}")
    if not config.has_actor and (line := effect_line(config)):
        say(line)
    make_folder(config.run.dir)
    make_folder(config.server_dir, "server.dir")
    ensure_first_version(config, path, overrides)
    return config.model_copy(update={"server": section})


def ensure_first_version(config: RunConfig, path: Path, overrides: Sequence[str]) -> None:
    """Run the trainer to write version 0 of each live model (critic, reward model) that has no version yet.

    Args:
        config: the configuration loaded from `path` with `overrides`.

    Raises:
        ServerStartError: the trainer failed; its output says why.
    """
    missing = [f"the {model.name}'s" for model in live_models(config) if not (model.store / "CURRENT").exists()]
    if not missing:
        return
    what = f"creating version 0 of {' and '.join(missing)} weights"
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
    lock = only_server(config.server_dir, "server.dir" if config.server.dir else "run.dir")
    return Supervisor(lambda: start_server(config, log=log, check=check), log=log, lock=lock, watch=ServerHealth)


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
