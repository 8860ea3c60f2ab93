"""The addresses of the servers at the moment, from `actor.client.servers`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from python_backend.client.errors import RequestFailed
from python_backend.config.addresses import DNS_PREFIX, resolve

logger = logging.getLogger(__name__)


class ServerNames:
    """Resolves the servers' addresses; a name that cannot be resolved keeps the addresses that it had."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._last: dict[str, list[str]] = {}
        self._unresolved: set[str] = set()

    @property
    def may_change(self) -> bool:
        """Whether any address is a DNS name, so that servers may join and leave."""
        return any(address.startswith(DNS_PREFIX) for address in self._addresses)

    async def urls(self) -> list[str]:
        """Return `host:port` of every server, each once. Raises RequestFailed if a name was never resolved."""
        found = [url for address in self._addresses for url in await self._resolved(address)]
        return list(dict.fromkeys(found))

    async def _resolved(self, address: str) -> list[str]:
        if not address.startswith(DNS_PREFIX):
            return [address]
        try:
            self._last[address] = await asyncio.to_thread(resolve, address)
            self._unresolved.discard(address)
        except (OSError, ValueError) as error:
            if address not in self._last:
                raise RequestFailed(f"server address {address!r} cannot be resolved: {error}") from error
            if address not in self._unresolved:  # once, not at every attempt
                logger.warning("%s cannot be resolved (%s): keeping the servers that it named", address, error)
            self._unresolved.add(address)
        return self._last[address]
