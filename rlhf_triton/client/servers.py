"""The servers: their current addresses, and the state of each server as the pool sees it."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from rlhf_triton.client.errors import RequestFailed
from rlhf_triton.config.fields import DNS_PREFIX, resolve
from rlhf_triton.errors import RlhfError, reason_of

logger = logging.getLogger(__name__)


class Connection(Protocol):
    """Interface of a connection to one server."""

    async def get_ready(self, model: str) -> str | None:
        """Probe the server, and load what it lacks for the model; return why it is not ready, or None if it is.

        Raises AttemptFailed if the probe fails.
        """

    async def close(self) -> None:
        """Close the connection; requests in flight fail."""


C = TypeVar("C", bound=Connection)


@dataclass
class Suspension:
    """A model whose process has died on one server.

    Triton still reports the model as ready, so probes cannot detect its recovery. Instead, after a pause, the pool
    sends one request at a time.
    """

    losses: int
    until: float  # end of the pause, on the monotonic clock
    cause: str
    on_trial: bool = False  # a request is in flight that tests the model


@dataclass(eq=False, kw_only=True)
class Server(Generic[C]):
    """State of one server."""

    url: str
    connection: C
    in_flight: int = 0
    # By model: the pool's counter when this server was last chosen.
    last_selected: dict[str, int] = field(default_factory=dict)
    losses: int = 0  # how often the server was lost or not ready since its last reply
    down: str | None = None  # why the server gets no requests; None: it gets requests
    unusable: RlhfError | None = None  # error of a probe after which the server gets no requests
    suspended: dict[str, Suspension] = field(default_factory=dict)  # by model
    probe: asyncio.Task[str | None] | None = None

    def accepts(self, model: str) -> bool:
        """Return whether requests for this model may be sent to this server."""
        suspended = self.suspended.get(model)
        is_free = suspended is None or (not suspended.on_trial and time.monotonic() >= suspended.until)
        return self.down is None and is_free


class ServerNames:
    """Resolves the servers' addresses; a name that can no longer be resolved keeps its last addresses."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._last: dict[str, list[str]] = {}
        self._unresolved: set[str] = set()

    @property
    def may_change(self) -> bool:
        """Whether any address is a DNS name, so that servers may join and leave."""
        return any(address.startswith(DNS_PREFIX) for address in self._addresses)

    async def urls(self) -> list[str]:
        """Return the distinct `host:port` of all servers. Raises RequestFailed if a name has never been resolved."""
        urls = [url for address in self._addresses for url in await self._resolved(address)]
        return list(dict.fromkeys(urls))

    async def _resolved(self, address: str) -> list[str]:
        if not address.startswith(DNS_PREFIX):
            return [address]
        try:
            self._last[address] = await asyncio.to_thread(resolve, address)
            self._unresolved.discard(address)
        except (OSError, ValueError) as error:
            if address not in self._last:
                raise RequestFailed(f"server address {address!r} cannot be resolved: {reason_of(error)}") from error
            if address not in self._unresolved:  # once, not at every attempt
                logger.warning("%s cannot be resolved (%s): keeping its last addresses", address, reason_of(error))
            self._unresolved.add(address)
        return self._last[address]
