"""`python -m tools serve`: renders the repository, starts tritonserver on it, and serves until a signal.

Other commands and tests start their servers with `start_server`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from python_backend.config import RunConfig, load_config
from python_backend.config.command_line import report, run_parser
from python_backend.config.required_files import check_files
from python_backend.errors import REPORTED
from python_backend.store.control_key import control_key
from tools.calibrate.calibration import settle
from tools.demo.pretrained import PRETRAINED
from tools.server.ports import with_free_ports
from tools.server.supervisor import Supervisor
from tools.server.triton_home import ServerStartError, find_tritonserver, lay_out_backends
from tools.server.tritonserver import TritonServer

WATCH_INTERVAL_S = 0.2
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MADE_FOR_ACTOR = {
    "actor.policy.checkpoint": "policy",
    "actor.prompts.path": "prompts.jsonl",
    "actor.validation.prompts": "validation.jsonl",
}
SAFE_VERSION = (2, 69)  # of the 26.05 container; older releases have published vulnerabilities


class ServeStopped(BaseException):
    """SIGINT or SIGTERM was received; not an error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; return 0 then, 1 if the server cannot start."""
    parser = run_parser("python -m tools serve", "Serve the models.")
    parser.add_argument("--tritonserver", type=Path, help="the executable; default: the wheel's, then PATH")
    arguments = parser.parse_args(argv)
    overrides = list(arguments.overrides)
    if arguments.tritonserver is not None:
        overrides.append(f"server.tritonserver={arguments.tritonserver}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop_once)
    supervisor = None
    try:
        config = load_config(arguments.config, overrides)
        preparation, made = demo_preparation(config)
        if preparation:
            _run_module("preparing the demo", preparation)
            overrides = [*made, *overrides]
            config = load_config(arguments.config, overrides)
        check_files(config, server=True)
        overrides += settle(config, _say)
        config = load_config(arguments.config, overrides)
        ensure_first_version(config, arguments.config, overrides)
        config = with_fixed_ports(config)
        supervisor = Supervisor(lambda: start_server(config, log=_say), log=_say)
        _say("serving; Ctrl-C stops it")
        while True:
            supervisor.look()
            time.sleep(WATCH_INTERVAL_S)
    except ServeStopped:
        return 0
    except REPORTED as error:
        return report(error, 1)
    finally:
        if supervisor is not None:
            supervisor.stop()
            _say("stopped")


def demo_preparation(config: RunConfig) -> tuple[list[str], list[str]]:
    """Return arguments of `python -m` that prepare the demo, and overrides for its files; none without a demo."""
    if config.demo is None:
        return [], []
    if config.demo.recipe == "reasoning":
        out = config.demo.cache_dir / "reasoning"
        made = [f"{key}={out / file}" for key, file in MADE_FOR_ACTOR.items()]
        return ["tools.demo.prepare", "--recipe", "reasoning", "--out", str(out)], made
    is_llm = config.demo.recipe == "chat"
    name = f"{'chat-' if is_llm else ''}seed-{config.run.seed}{'-quick' if config.demo.quick else ''}"
    out = config.demo.cache_dir / name
    recipe = ["--recipe", config.demo.recipe]
    arguments = ["tools.demo.prepare", *recipe, "--out", str(out), "--seed", str(config.run.seed)]
    shared = config.demo.cache_dir / PRETRAINED if is_llm else out
    paths = {
        "reward.checkpoint": out / "reward",
        "critic.checkpoint": shared / "critic",
        **{key: out / file for key, file in MADE_FOR_ACTOR.items()},
        "actor.policy.checkpoint": shared / "policy",
    }
    quick = ["--quick"] if config.demo.quick else []
    return [*arguments, *quick], [f"{key}={path}" for key, path in paths.items()]


def ensure_first_version(config: RunConfig, path: Path, overrides: Sequence[str]) -> None:
    """Have the trainer write version 0 of the critic's weights if a critic is served and there is none.

    Args:
        config: the configuration that `path` and `overrides` give.

    Raises:
        ServerStartError: the trainer failed; its output says why.
    """
    if not config.actor.algorithm.uses_critic or (config.run.weights_dir / "CURRENT").exists():
        return
    _run_module(
        "creating version 0 of the critic's weights",
        ["trainer", "--config", str(path), "--init-only", *overrides],
    )


def _run_module(what: str, arguments: Sequence[str]) -> None:
    _say(what)
    # In a session of its own: Ctrl-C reaches this process alone, where the exception makes `run` kill the child.
    command = [sys.executable, "-u", "-m", *arguments]
    code = subprocess.run(command, check=False, start_new_session=True).returncode
    if code != 0:
        raise ServerStartError(
            f"{what} failed: `python -m {arguments[0]}` ended with exit code {code}; the reason is above"
        )


def with_fixed_ports(config: RunConfig) -> RunConfig:
    """Return the configuration with ports of 0 replaced by free ones, so that a restarted server keeps its ports."""
    return config.model_copy(update={"server": with_free_ports(config.server)})


def start_server(config: RunConfig, *, log: Callable[[str], None] = print) -> TritonServer:
    """Render the run's repository and start a server on it: see `serve_rendered`.

    Raises:
        ConfigError: the repository cannot be rendered.
    """
    from tools.render_configs import render_repository  # imports jinja2 and protobuf, which --help does not need

    render_repository(config, config.run.repository_dir)
    return serve_rendered(config, log=log)


def serve_rendered(config: RunConfig, *, log: Callable[[str], None] = print) -> TritonServer:
    """Start a server on the run's repository and wait until every model has answered.

    The caller stops the server. Its `section` has the real ports where the configuration had 0. `log` receives
    the progress and the readable lines of the server's log; the full log is in `run.logs_dir`.

    Raises:
        ServerStartError: the server cannot start; nothing is left running.
    """
    home = find_tritonserver(config.server.tritonserver)
    server = TritonServer(
        home,
        config.run.repository_dir,
        config.server,
        config.run.logs_dir / "tritonserver.log",
        backends=lay_out_backends(home, config.run.dir / "backends"),
        control_key=control_key(config.run.weights_dir),
        log=log,
    )
    try:
        server.start()
        server.wait_ready(config.run.dir / "server.json")
        _warn_if_exposed(server, log)
    except BaseException:  # signals included: the caller has no server to stop yet
        server.stop()
        raise
    at = server.section
    log(f"ready: inference http://{at.http_url}, model control grpc {at.grpc_url}, metrics {at.metrics_url}")
    return server


def _warn_if_exposed(server: TritonServer, log: Callable[[str], None]) -> None:
    host = server.section.host
    if host in LOOPBACK:
        return
    log(f"warning: server.host is {host}: anyone who can reach it can score, and train unless a key is set")
    with server.control() as control:
        version = control.server_version()
    if version < SAFE_VERSION:
        release = ".".join(map(str, version))
        log(f"warning: tritonserver {release} has known vulnerabilities; beyond loopback use 2.69 (26.05) or later")


def _say(line: str) -> None:
    print(line, flush=True)


def _stop_once(number: int, frame: FrameType | None) -> None:
    for again in (signal.SIGINT, signal.SIGTERM):
        signal.signal(again, signal.SIG_IGN)  # already stopping, within a bounded time
    raise ServeStopped


if __name__ == "__main__":
    sys.exit(main())
