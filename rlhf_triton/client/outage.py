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
        self._waiting: dict[str, float] = {}  # model -> when the first request for it began to wait
        self._began = time.monotonic()
        self._causes = causes
        logger.warning("no healthy server; requests wait for one: %s", causes())

    @property
    def seconds(self) -> float:
        """Duration so far."""
        return time.monotonic() - self._began

    def begin_wait(self, model: str) -> bool:
        """Record that a request for this model waits; return whether it is the first one."""
        is_first = model not in self._waiting
        self._waiting.setdefault(model, time.monotonic())
        return is_first

    def waited_s(self, model: str) -> float:
        """Return how long ago the first request for this model began to wait."""
        return time.monotonic() - self._waiting[model]

    def forget(self, is_served: Callable[[str], bool]) -> bool:
        """Forget the models that are served again; return whether requests for others wait."""
        self._waiting = {model: since for model, since in self._waiting.items() if not is_served(model)}
        return bool(self._waiting)

    async def remind(self) -> None:
        """Log every `REMIND_EVERY_S` seconds that the outage continues, until cancelled."""
        while True:
            await asyncio.sleep(REMIND_EVERY_S)
            logger.warning("no healthy server for %.0f s: %s", self.seconds, self._causes())

    def end(self) -> None:
        """Log the end of the outage."""
        logger.warning("a server is healthy again after %.1f s", self.seconds)
