"""Logs each outage (no server is healthy) when it starts, every 30 s, and when it ends."""

import asyncio
import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)
REMIND_EVERY_S = 30.0


class Outage:
    """One outage, from the first request without a healthy server until a server is healthy again."""

    def __init__(self, causes: Callable[[], str]) -> None:
        self.models: set[str] = set()  # models with waiting requests
        self._began = time.monotonic()
        self._causes = causes
        logger.warning("no healthy server; requests wait for one: %s", causes())

    @property
    def seconds(self) -> float:
        """Duration so far."""
        return time.monotonic() - self._began

    async def remind(self) -> None:
        """Log every `REMIND_EVERY_S` seconds that the outage continues, until cancelled."""
        while True:
            await asyncio.sleep(REMIND_EVERY_S)
            logger.warning("no healthy server for %.0f s: %s", self.seconds, self._causes())

    def end(self) -> None:
        """Log the end of the outage."""
        logger.warning("a server is healthy again after %.1f s", self.seconds)
