"""Runs asyncio code in simulated time: when all tasks sleep, the clock jumps to the first one that wakes."""

import asyncio
import contextlib
import selectors


class _Jump(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout=None):
        self.now += timeout or 0.0
        return super().select(0)


def run_simulated(main):
    """Return the result of `main`; `asyncio.get_running_loop().time()` is the simulated time, from 0."""
    selector = _Jump()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    with contextlib.closing(loop):
        return loop.run_until_complete(main)
