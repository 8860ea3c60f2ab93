"""Bounds of the gateway's connections: their number, the size of a request's head, and the time that it may take."""

from __future__ import annotations

import asyncio
import resource
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


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP with h11, which bounds the size of heads; this bounds how long a connection waits for one.

    At the limit, a new connection closes a silent one, the one that would be closed next, instead of being refused: so
    silent connections, however many, keep no client out.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for the connection."""
        super().connection_made(transport)
        if len(self.connections) >= (self.limit_concurrency or MAX_CONNECTIONS):
            ours = [one for one in self.connections if isinstance(one, BoundedProtocol)]
            silent = [(one.timeout_keep_alive_task.when(), id(one), one) for one in ours if one.timeout_keep_alive_task]
            for _, _, first in sorted(silent)[: 1 + len(silent) // 20]:  # several, as sorting takes a millisecond
                self.connections.discard(first)  # at once, as uvicorn counts them
                first.transport.abort()
        self.timeout_keep_alive_task = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; uvicorn would keep the timer of one that broke."""
        super().connection_lost(None)

    def _unset_keepalive_if_required(self) -> None:
        is_under_way = self.conn.their_state is not h11.IDLE and self.conn.our_state is not h11.DONE
        if is_under_way or self.transport.is_closing():  # else a part of a head came, or more of a refused body
            super()._unset_keepalive_if_required()


def bounded(app: ASGIApp, settings: GatewaySection, **options: Any) -> uvicorn.Config:
    """Return the configuration that serves `app` within the bounds, with further options of uvicorn.

    This process may then open as many files as the system allows it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = min(MAX_CONNECTIONS, hard // 2) if hard > 0 else MAX_CONNECTIONS  # the others are for Triton
    return uvicorn.Config(
        app,
        settings.host,
        settings.port,
        log_level="warning",
        http=BoundedProtocol,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        limit_concurrency=most,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        **options,
    )
