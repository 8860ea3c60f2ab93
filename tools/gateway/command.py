"""`rlhf-triton gateway`: serves the gateway until SIGINT or SIGTERM; requests in flight are still answered."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from rlhf_triton.client.client import TritonClient
from rlhf_triton.config.command_line import log_to_stderr, report, run_parser
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.config.sections import GatewaySection
from rlhf_triton.errors import REPORTED
from rlhf_triton.monitoring.log_lines import is_json, say
from rlhf_triton.tools.arguments import parse
from rlhf_triton.tools.served_rewards import reward_parameters
from rlhf_triton.tools.server.health import is_triton
from rlhf_triton.tools.server.ports import cannot_bind
from rlhf_triton.wire.contract import REWARD_MODEL

KEEP_ALIVE_S = 75  # longer than clients pool idle connections, which would otherwise break under their next request
MAX_CONNECTIONS = 2000  # beyond it, requests get 503


def bounded(app: ASGIApp, settings: GatewaySection, **options: Any) -> uvicorn.Config:
    """Return the configuration that serves `app` within the bounds, with further options of uvicorn."""
    return uvicorn.Config(
        app,
        settings.host,
        settings.port,
        log_level="warning",
        http="h11",  # which bounds a head, to 16 KB
        timeout_keep_alive=KEEP_ALIVE_S,
        limit_concurrency=MAX_CONNECTIONS,
        **options,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM, then return 0; return 2 if the gateway cannot start."""
    parser = run_parser("Serve rewards to other trainers over HTTP.")
    arguments = parse(parser, argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        log_to_stderr("gateway", config.run)
        asyncio.run(serve(config))
    except REPORTED as error:
        return report(error)
    return 0


def check_key(settings: GatewaySection) -> str | None:
    """Return the key that requests must carry, None if there is none. Raises ConfigError if it cannot be used."""
    if settings.key_env is None:
        return None
    key = os.environ.get(settings.key_env)
    if not key:
        raise ConfigError(f"gateway.key_env: the environment variable {settings.key_env} is not set or empty")
    if not (key.isascii() and key.isprintable()):  # HTTP headers have no encoding that all clients agree on
        raise ConfigError(f"gateway.key_env: the key in {settings.key_env} must be printable ASCII")
    return key


def server_url(config: RunConfig) -> str:
    """Return the address of the run's server. Raises ConfigError if it has a port of its choice and is not up."""
    url = config.server_url("http")
    if config.server.http_port or config.actor.client.servers:
        return url
    if url.endswith(":0") or not is_triton(url):
        raise ConfigError(
            f"server.http_port is 0, a port that the server of {config.server_dir} chooses when it starts, but it is "
            "not up; start it first, or set a port"
        )
    return url


def listening_socket(settings: GatewaySection, backlog: int) -> socket.socket:
    """Return a socket that listens at the gateway's address. Raises ConfigError if it cannot be used."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=backlog)
    except OSError as error:
        raise ConfigError(cannot_bind("gateway", "port", settings.host, settings.port, error)) from error


async def serve(config: RunConfig) -> None:
    """Serve until a signal arrives. Raises ConfigError if the port cannot be used."""
    from rlhf_triton.tools.gateway.app import create_app
    from rlhf_triton.tools.gateway.policy import policy_routes

    settings = config.gateway
    client = None
    sources = list[str]()
    if settings.policy:
        sources.append(f"the policy for agents from {', '.join(settings.policy.servers)}")
    if not settings.policy or config.rewards or "reward.model" in config.written:
        url = server_url(config)
        sources.insert(0, f"rewards from {', '.join(config.actor.client.servers) or url}")
        client = TritonClient(url, config.actor.client, expected={REWARD_MODEL: reward_parameters(config)})
    log_config = None if is_json() else uvicorn.config.LOGGING_CONFIG  # None: its loggers use the root's handler
    async with contextlib.AsyncExitStack() as closing:
        more = policy_routes(settings.policy, closing) if settings.policy else []
        app = create_app(client, check_key(settings), more=more)
        server = uvicorn.Server(bounded(app, settings, log_config=log_config))
        for number in (signal.SIGINT, signal.SIGTERM):
            # uvicorn handles them, and raises them again when it has stopped
            signal.signal(number, lambda *_: setattr(server, "should_exit", True))
        gc.freeze()  # so that `gc.collect` in the application passes over the libraries' objects
        bound = listening_socket(settings, server.config.backlog)  # clients can connect as soon as the line is printed
        say(f"gateway: http://{settings.host}:{bound.getsockname()[1]}, {', '.join(sources)}")
        await server.serve([bound])


if __name__ == "__main__":
    sys.exit(main())
