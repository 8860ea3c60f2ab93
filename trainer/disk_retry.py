"""Retries disk operations until they succeed or a stop is requested; logs the error and reports it to callers."""

import errno
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from rlhf_triton.errors import RlhfError, reason_of

logger = logging.getLogger(__name__)
T = TypeVar("T")
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 5.0
REMIND_EVERY_S = 60.0
# Errors that time or an operator may fix; others, such as a missing file, are raised at once.
CURABLE = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EIO,
        errno.EACCES,
        errno.EPERM,
        errno.ESTALE,
        errno.ENODEV,
        errno.ENXIO,
        errno.EBUSY,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOTEMPTY,
        errno.ETIMEDOUT,
    }
)


def until_done(
    operation: str,
    action: Callable[[], T],
    stop: threading.Event,
    show: Callable[[str, str | None], None] = lambda *_: None,
) -> T:
    """Call `action`, with growing pauses while it fails with an error in `CURABLE`; return its result.

    Args:
        operation: for messages, such as "publishing step 3".
        action: must be safe to repeat after an OSError.
        stop: ends the retries when set.
        show: called with the operation and its error, or None as the error once a retry succeeds; must not raise.

    Raises:
        RlhfError: a stop was requested during the retries; the message names the error.
        OSError: `action` failed with an error that is not in `CURABLE`.
    """
    pause_s = FIRST_PAUSE_S
    remind_at = 0.0
    has_failed = False
    while True:
        try:
            result = action()
        except OSError as error:
            if error.errno not in CURABLE:
                raise
            has_failed = True
            reason = reason_of(error)
        else:
            if has_failed:
                logger.warning("%s: succeeded; the disk is writable again", operation)
                show(operation, None)
            return result
        if time.monotonic() >= remind_at:
            logger.error("%s: disk error, retrying: %s", operation, reason)
            remind_at = time.monotonic() + REMIND_EVERY_S
        show(operation, reason)
        if stop.wait(pause_s):
            raise RlhfError(
                f"stopped while {operation}, after a disk error: {reason}; nothing is lost, because the journal has "
                "every accepted request: make the disk writable, and start again"
            )
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
