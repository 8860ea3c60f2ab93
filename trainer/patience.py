"""Retries disk operations until they succeed or a stop is requested; logs the trouble and shows it to callers."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from python_backend.errors import RlhfError

logger = logging.getLogger(__name__)
T = TypeVar("T")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
REMIND_EVERY_S = 60.0
# What a person or time can cure; a file that is missing, say, stays an error.
CURABLE = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ESTALE, errno.ENODEV,
    errno.ENXIO, errno.EBUSY, errno.EMFILE, errno.ENFILE,
})  # fmt: skip


class StoppedWaiting(RlhfError):
    """A stop came while a server or the disk was waited for; nothing is lost, the journal holds the step."""


class Patience:
    """Repeats what the disk refused."""

    def __init__(self, stop: threading.Event, show: Callable[[str, str | None], None]) -> None:
        """`show` gets what is being done and the trouble with it, None when that is over; it must not raise."""
        self._stop = stop
        self._show = show

    def until_done(self, what: str, action: Callable[[], T]) -> T:
        """The result of `action`, which is called again for as long as the disk refuses.

        Args:
            what: is being done, for messages: "publishing step 3".
            action: may be called again after an OSError, and leaves nothing behind that then would count twice.

        Raises:
            StoppedWaiting: a stop was asked for; the message names the trouble.
            OSError: one that waiting does not cure.
        """
        pause_s, remind_at, refused = FIRST_PAUSE_S, 0.0, False
        while True:
            try:
                result = action()
            except OSError as error:
                if error.errno not in CURABLE:
                    raise
                refused, trouble = True, str(error)
            else:
                if refused:
                    logger.warning("%s: done, the disk takes it again", what)
                    self._show(what, None)
                return result
            if time.monotonic() >= remind_at:
                logger.error("%s: the disk refuses, trying again until it does not: %s", what, trouble)
                remind_at = time.monotonic() + REMIND_EVERY_S
            self._show(what, trouble)
            if self._stop.wait(pause_s):
                raise StoppedWaiting(
                    f"stopped while {what}: the disk refuses: {trouble}; nothing is lost: the journal holds what was "
                    "accepted, and the next start goes on from there"
                )
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
