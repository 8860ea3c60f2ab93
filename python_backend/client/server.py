"""State of one server as the pool sees it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from python_backend.errors import RlhfError


class Connection(Protocol):
    """Interface of a connection to one server."""

    async def why_not_ready(self, model: str) -> str | None:
        """Return why the model gets no requests there; None: it is ready. Raises Trouble if the probe fails."""

    async def close(self) -> None:
        """Close the connection; requests in flight fail."""


C = TypeVar("C", bound=Connection)


@dataclass
class Suspension:
    """A model whose process has died on one server.

    Triton still reports the model as ready, so probes do not show its recovery. Instead, after a pause, one request
    at a time tries it.
    """

    losses: int
    until: float  # on the monotonic clock
    cause: str
    on_trial: bool = False


@dataclass(eq=False)
class Server(Generic[C]):
    """State of one server."""

    url: str
    connection: C
    in_flight: int = 0
    last_turns: dict[str, int] = field(default_factory=dict)  # by model: when this server was last chosen
    losses: int = 0  # times that it was lost or not ready since its last response
    down: str | None = None  # why the server is set aside; None: it receives requests
    unusable: RlhfError | None = None  # what a probe raised: the server gets no more requests
    suspended: dict[str, Suspension] = field(default_factory=dict)  # by model
    probe: asyncio.Task[str | None] | None = None

    def takes(self, model: str) -> bool:
        """Return whether a request for this model may be sent to this server."""
        suspended = self.suspended.get(model)
        is_free = suspended is None or (not suspended.on_trial and time.monotonic() >= suspended.until)
        return self.down is None and is_free
