"""An outage, while no server answers: logged when it begins, every 30 s, and when it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)
REMIND_EVERY_S = 30.0


class Outage:
    """From the first request that found no server until there is one again."""

    def __init__(self, causes: Callable[[], str], longest_s: float) -> None:
        self.models: set[str] = set()  # waited for
        self._began = time.monotonic()
        self._causes = causes
        logger.warning("no server answers; requests wait up to %g s for one: %s", longest_s, causes())

    @property
    def seconds(self) -> float:
        """How long it lasts by now."""
        return time.monotonic() - self._began

    async def remind(self) -> None:
        """Say every half minute that it goes on; to be cancelled."""
        while True:
            await asyncio.sleep(REMIND_EVERY_S)
            logger.warning("no server answers for %.0f s: %s", self.seconds, self._causes())

    def end(self) -> None:
        """There is a server again."""
        logger.warning("a server answers again after %.1f s, the run goes on", self.seconds)
