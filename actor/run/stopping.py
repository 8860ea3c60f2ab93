"""Handles SIGTERM and Ctrl-C: the first signal stops the run with a checkpoint, the second exits at once."""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

from rlhf_triton.training_engine.launch import ended

T = TypeVar("T")
STOP_GRACE_S = 25.0
"""Time limit after SIGTERM or Ctrl-C for finishing the update and writing a checkpoint."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # exit code, as a shell reports Ctrl-C
RESUMES = "the next start resumes from the newest checkpoint"
ENDED = "ended: step {} is the last; raise actor.steps ({}) to continue training, or start over with --fresh"

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """The run was stopped on request; the message says after which step."""


class Stop:
    """A request to stop the run, which cancels the work that `or_done` waits for."""

    def __init__(self, saved: Callable[[], int] = lambda: 0) -> None:
        """`saved`: returns the last complete step if its checkpoint exists, else 0."""
        self._requested = asyncio.Event()
        self.saved = saved

    def request(self) -> None:
        """Request the run to stop. Call from the event loop's thread."""
        self._requested.set()

    async def or_done(self, work: Awaitable[T]) -> T:
        """Wait for `work` and return its result; on a stop request, cancel `work` and raise Stopped."""
        task = asyncio.ensure_future(work)
        requested = asyncio.ensure_future(self._requested.wait())
        try:
            await asyncio.wait([task, requested], return_when=asyncio.FIRST_COMPLETED)
            if not requested.done():
                return await task
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise Stopped
        finally:
            requested.cancel()
            task.cancel()


@dataclass
class TimeLimit:
    """The time limit `actor.max_minutes`, measured from the creation of this object."""

    max_minutes: float | None
    _started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def is_over(self, step: int, last_step: int) -> bool:
        """Return whether the limit is reached after `step` of `last_step` steps; if so, log it."""
        if self.max_minutes is None or self.seconds < 60 * self.max_minutes:
            return False
        logger.info(
            "ended: actor.max_minutes (%g) reached at step %d of %d; the next start resumes from here",
            self.max_minutes,
            step,
            last_step,
        )
        return True


def stop_on_signals(stop: Stop, grace_s: float, numbers: Iterable[signal.Signals] = SIGNALS) -> None:
    """Request `stop` at the first of these signals; end the process at the second, or `grace_s` after the first.

    Call in the main thread, with the event loop running. The loop's own handler is used because it wakes the loop even
    if the signal arrives just before it waits. The handler of `signal.signal` only restores the default action for
    the second signal: it may interrupt the main thread anywhere, even while it holds a lock, so it must not do more.
    """
    loop = asyncio.get_running_loop()

    def begin() -> None:
        logger.info("stopping: writing a checkpoint of the last complete step (at most %g s)", grace_s)
        stop.request()
        timer = threading.Timer(grace_s, _give_up, (stop, grace_s))  # not loop.call_later: the loop may be busy writing
        timer.daemon = True
        timer.start()

    def restore_default_handlers(_: int, __: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)

    for number in numbers:
        loop.add_signal_handler(number, begin)
        signal.signal(number, restore_default_handlers)


def end_forwards(*models: Any) -> None:
    """Make all later forward passes of these models raise, so that threads of a cancelled rollout end soon."""

    def refuse(*_: Any) -> None:
        raise asyncio.CancelledError

    for model in models:
        model.get_input_embeddings().register_forward_pre_hook(refuse)


def _give_up(stop: Stop, grace_s: float) -> None:
    """Exit at once; a regular exit would wait for the compute threads."""
    saved = stop.saved()
    how = f"after step {saved}, whose checkpoint is written" if saved else "without a new checkpoint"
    logger.warning("stopped %s: the grace period of %g s expired; %s", how, grace_s, RESUMES)
    os._exit(ended(INTERRUPTED))
