"""Runs torch in threads, so that the event loop stays free for server responses; runs and cancels tasks in bulk."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from rlhf_triton.models.gpu import use_gpu

MAX_CONCURRENT = 16  # tasks that may start in one iteration of the event loop, which takes a few milliseconds
R = TypeVar("R")


class ComputeThread:
    """A dedicated thread for torch: `await thread(function, *args, **kwargs)` calls `function` in it."""

    def __init__(self, threads: int, device: torch.device) -> None:
        """
        Args:
            threads: number of torch threads; torch keeps this setting per thread, so the new thread sets it.
            device: the current device of the new thread.
        """
        self._waiting = set[object]()  # calls that have not started
        self.interrupt: Callable[[], None] = lambda: None
        """Called when a call begins to wait, so that the current one can return early."""

        def begin() -> None:
            torch.set_num_threads(threads)
            use_gpu(device)

        self._executor = ThreadPoolExecutor(1, "compute", begin)

    def is_awaited(self) -> bool:
        """Return whether calls wait for the current one to return."""
        return bool(self._waiting)

    async def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        this_call = object()

        def start() -> Any:
            self._waiting.discard(this_call)
            return function(*args, **kwargs)

        self._waiting.add(this_call)
        self.interrupt()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, start)
        finally:  # cancelled before it started
            self._waiting.discard(this_call)


async def map_concurrently(function: Callable[[Any], Awaitable[R]], items: Sequence[Any]) -> list[R]:
    """Return `function(item)` of all items, in order; at most `MAX_CONCURRENT` calls run at a time.

    Thousands of calls that start together would keep the event loop from handling responses and signals.
    """
    slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def one(item: Any) -> R:
        async with slots:
            return await function(item)

    return await asyncio.gather(*map(one, items))


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these tasks and wait for them to end; ignore their errors."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def set_error(future: asyncio.Future[Any], error: BaseException) -> None:
    """Set the error of a future; asyncio does not log it if no task awaits the future."""
    future.set_exception(error)
    future.exception()
