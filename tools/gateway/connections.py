"""Bounds of the gateway's connections: their number, the size of a request's head, and the time that it may take."""

from __future__ import annotations

import asyncio
import functools
import math
import resource
import ssl
from asyncio import sslproto
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from python_backend.config import GatewaySection

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

    This process may then open as many files as the system allows it. Raises OSError if the certificate cannot be used.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    protocol: Any = BoundedProtocol
    most = MAX_CONNECTIONS
    if settings.tls_certificate:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(settings.tls_certificate, settings.tls_key)
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
