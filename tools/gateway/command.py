"""`python -m tools gateway`: serves the gateway until SIGINT or SIGTERM; requests in flight are still answered."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Sequence

from python_backend.client.client import TritonClient
from python_backend.config import ConfigError, GatewaySection, RunConfig, load_config
from python_backend.config.command_line import log_to_stderr, report, run_parser
from python_backend.errors import REPORTED
from python_backend.monitoring.log_lines import is_json, say
from python_backend.wire.contract import REWARD_MODEL
from tools.arguments import parse_or_complete
from tools.render.rewards import reward_parameters

M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 65_536  # of glibc's malloc.h


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM, then return 0; return 2 if the gateway cannot start."""
    parser = run_parser("Serve rewards to other trainers over HTTP.")
    arguments = parse_or_complete(parser, argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        log_to_stderr("gateway", config.run)
        asyncio.run(serve(config))
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "starlette", "uvicorn"):
            raise
        return report(RuntimeError(f"the gateway needs {error.name}: pip install '.[gateway]'"))
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


async def serve(config: RunConfig) -> None:
    """Serve until a signal arrives. Raises OSError if the port or a certificate cannot be used."""
    import uvicorn

    from tools.gateway.app import create_app
    from tools.gateway.connections import bounded

    settings = config.gateway
    expected = {REWARD_MODEL: reward_parameters(config)}
    client = TritonClient(config.server.http_url, config.actor.client, expected=expected)
    log_config = None if is_json() else uvicorn.config.LOGGING_CONFIG  # None: its loggers use the root's handler
    app = create_app(client, settings, check_key(settings))
    server = uvicorn.Server(bounded(app, settings, log_config=log_config))
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn handles them, and raises them again when it has stopped
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    bound = server.config.bind_socket()
    bound.listen(server.config.backlog)  # so that clients can connect as soon as the line is printed
    servers = ", ".join(config.actor.client.servers) or config.server.http_url
    scheme, port = "https" if settings.tls_certificate else "http", bound.getsockname()[1]
    say(f"gateway: {scheme}://{settings.host}:{port}, rewards from {servers}")
    free_memory_at_once()
    await server.serve([bound])


def free_memory_at_once() -> None:
    """Let the memory of large bodies return to the system as soon as they are answered.

    Otherwise, the first of them raises the size from which glibc maps memory, and 30 to 60 MB stay after it.
    """
    gc.freeze()  # what was imported: collecting the garbage of a body then takes some 10 ms instead of 50
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)


if __name__ == "__main__":
    sys.exit(main())
