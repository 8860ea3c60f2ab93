"""`python -m tools gateway`: serves the gateway until SIGINT or SIGTERM; requests in flight are still answered."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import math
import os
import resource
import signal
import socket
import ssl
import sys
from asyncio import sslproto
from collections.abc import Sequence
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from python_backend.client.client import TritonClient
from python_backend.config import ConfigError, GatewaySection, RunConfig, load_config
from python_backend.config.command_line import log_to_stderr, report, run_parser
from python_backend.errors import REPORTED
from python_backend.monitoring.log_lines import is_json, say
from python_backend.wire.contract import REWARD_MODEL
from tools.arguments import parse_or_complete
from tools.render import reward_parameters
from tools.server.health import is_triton
from tools.server.ports import cannot_bind, server_urls

# Bounds of the gateway's connections: their number, the size of a request's head, and the time that it may take.


KEEP_ALIVE_S = 75  # longer than clients pool idle connections, which would otherwise break under their next request
HEAD_S = 30.0  # for the head of a connection's first request
MAX_HEAD_BYTES = 65_536
MAX_CONNECTIONS = 2000
MAX_TLS_CONNECTIONS = 1000  # each takes 210 kB while its client sends the longest greeting that OpenSSL reads
TLS_BUFFER_BYTES = 16_384


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP with h11, which bounds the size of heads; this bounds how long a connection waits for one.

    At the limit, a new connection closes a silent one, the one that would be closed next, instead of being refused: so
    silent connections, however many, keep no client out.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection; TLS calls this again after the handshake, with its own transport."""
        is_accepted = self.transport is None
        super().connection_made(transport)
        if is_accepted:
            self._accept()

    def _accept(self) -> None:
        if len(self.connections) >= (self.limit_concurrency or MAX_CONNECTIONS):
            others = [one for one in self.connections if isinstance(one, BoundedProtocol) and one is not self]
            silent = sorted((one for one in others if one._closes_at() < math.inf), key=BoundedProtocol._closes_at)
            for first in silent[: 1 + len(silent) // 20]:  # several, as sorting takes a millisecond
                self.connections.discard(first)  # at once, as uvicorn counts them
                first.transport.abort()
        self.timeout_keep_alive_task = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def _closes_at(self) -> float:
        if self.transport.is_closing():  # with TLS, until the client confirms that
            return 0.0
        return self.timeout_keep_alive_task.when() if self.timeout_keep_alive_task else math.inf

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; uvicorn would keep the timer of one that broke."""
        super().connection_lost(None)

    def _unset_keepalive_if_required(self) -> None:
        is_under_way = self.conn.their_state is not h11.IDLE and self.conn.our_state is not h11.DONE
        if is_under_way or self.transport.is_closing():  # else a part of a head came, or more of a refused body
            super()._unset_keepalive_if_required()


class Tls(sslproto.SSLProtocol):
    """asyncio's TLS with a smaller buffer than its 256 KiB, which also reports the end of an unfinished handshake."""

    max_size = TLS_BUFFER_BYTES

    def connection_lost(self, exc: BaseException | None) -> None:
        """Tell HTTP."""
        http = self._app_protocol
        super().connection_lost(exc)
        if isinstance(http, BoundedProtocol) and http.scheme == "http":
            http.connection_lost(None)


class BoundedTlsProtocol(BoundedProtocol):
    """BoundedProtocol over TLS: its bounds hold from accept on.

    With the TLS of `loop.create_server`, they would hold after the handshake, for which that waits a minute.
    """

    def __init__(self, context: ssl.SSLContext, **options: Any) -> None:
        super().__init__(**options)
        self.context = context

    def _accept(self) -> None:
        super()._accept()
        self.loop.call_soon(self._start_handshake)  # after all that are accepted at once have made room

    def _start_handshake(self) -> None:
        if not self.transport.is_closing():
            no_waiter: Any = None  # asyncio's own type allows none
            tls = Tls(self.loop, self, self.context, no_waiter, server_side=True)
            self.transport.set_protocol(tls)
            tls.connection_made(self.transport)


def bounded(app: ASGIApp, settings: GatewaySection, **options: Any) -> uvicorn.Config:
    """Return the configuration that serves `app` within the bounds, with further options of uvicorn.

    This process may then open as many files as the system allows it. Raises ConfigError if the certificate cannot be
    used.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    protocol: Any = BoundedProtocol
    most = MAX_CONNECTIONS
    if settings.tls_certificate:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        for key, path in {"tls_certificate": settings.tls_certificate, "tls_key": settings.tls_key}.items():
            if path is not None and not path.is_file():
                raise ConfigError(f"gateway.{key}: {path} does not exist; give a PEM file")
        try:
            context.load_cert_chain(settings.tls_certificate, settings.tls_key)
        except OSError as error:
            raise ConfigError(
                f"gateway.tls_certificate: {settings.tls_certificate} cannot be used ({error.strerror}); give a PEM "
                "file with the certificate chain, and its private key there or as gateway.tls_key"
            ) from error
        protocol, most = functools.partial(BoundedTlsProtocol, context), MAX_TLS_CONNECTIONS
    return uvicorn.Config(
        app,
        settings.host,
        settings.port,
        log_level="warning",
        http=protocol,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        limit_concurrency=min(most, hard // 2) if hard > 0 else most,  # the other files are for Triton
        **options,
    )


M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 65_536  # of glibc's malloc.h


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM, then return 0; return 2 if the gateway cannot start."""
    parser = run_parser("Serve rewards to other trainers over HTTP.")
    arguments = parse_or_complete(parser, argv)
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
    if config.server.http_port or config.actor.client.servers:
        return config.server.http_url
    url = server_urls(config)["http"]
    if url == config.server.http_url or not is_triton(url):
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
    """Serve until a signal arrives. Raises ConfigError if the port or a certificate cannot be used."""
    from tools.gateway.app import create_app
    from tools.gateway.policy import policy_router

    settings, client, sources = config.gateway, None, list[str]()
    if settings.policy:
        sources.append(f"the policy for agents from {', '.join(settings.policy.servers)}")
    if not settings.policy or config.rewards or "reward.model" in config.written:
        url = server_url(config)
        sources.insert(0, f"rewards from {', '.join(config.actor.client.servers) or url}")
        client = TritonClient(url, config.actor.client, expected={REWARD_MODEL: reward_parameters(config)})
    log_config = None if is_json() else uvicorn.config.LOGGING_CONFIG  # None: its loggers use the root's handler
    async with contextlib.AsyncExitStack() as closing:
        more = [policy_router(settings.policy, closing)] if settings.policy else []
        app = create_app(client, settings, check_key(settings), more=more)
        server = uvicorn.Server(bounded(app, settings, log_config=log_config))
        for number in (signal.SIGINT, signal.SIGTERM):
            # uvicorn handles them, and raises them again when it has stopped
            signal.signal(number, lambda *_: setattr(server, "should_exit", True))
        bound = listening_socket(settings, server.config.backlog)  # clients can connect as soon as the line is printed
        scheme, port = "https" if settings.tls_certificate else "http", bound.getsockname()[1]
        say(f"gateway: {scheme}://{settings.host}:{port}, {', '.join(sources)}")
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
