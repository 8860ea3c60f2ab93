"""`rlhf-triton serve`: renders the repository, starts tritonserver on it, and serves until SIGINT or SIGTERM.

It then drains the server, so that no request fails if the clients have another one; a second signal skips the wait.
"""

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlhf_triton.config.command_line import add_dry_run, limit_access, log_to_stderr, reporting, run_parser
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.without_effect import effect_line
from rlhf_triton.monitoring.log_lines import say
from rlhf_triton.process import StopRequested, StopSignals
from rlhf_triton.store.run_lock import make_folder
from rlhf_triton.tools.arguments import parse
from rlhf_triton.tools.checks import preflight
from rlhf_triton.tools.dry_run import print_memory
from rlhf_triton.tools.server.ports import check_ports, with_free_ports
from rlhf_triton.tools.server.shell_command import shell_command
from rlhf_triton.tools.server.starting import ensure_first_version, repository_of, supervised

WATCH_INTERVAL_S = 0.2


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM, then return 0; return 2 if the server cannot start."""
    parser = run_parser("Render the model repository and serve it.")
    parser.add_argument("--tritonserver", type=Path, help="the executable; default: the one in the wheel, else on PATH")
    parser.add_argument("--print-command", action="store_true", help="print how to start a plain tritonserver instead")
    add_dry_run(parser)
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
