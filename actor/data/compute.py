"""Runs torch in threads, so that the event loop processes server responses meanwhile; cancels tasks."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import torch

from rlhf_triton.python_backend.models.card import use_card

InThread: TypeAlias = Callable[..., Awaitable[Any]]
AT_ONCE = 16  # tasks that may start in one iteration of the event loop, which then takes a few milliseconds
R = TypeVar("R")


def in_a_thread_of(threads: int, device: torch.device) -> InThread:
    """Return an async function `run(function, *args, **kwargs)` that calls `function` in one dedicated thread.

    Args:
        threads: number of threads for torch, which keeps this setting per thread: it is set when the thread starts.
        device: the thread's current GPU.
    """

    def begin() -> None:
        torch.set_num_threads(threads)
        use_card(device)

    executor = ThreadPoolExecutor(1, "compute", begin)

    async def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(executor, call)

    return run


async def each(function: Callable[[Any], Awaitable[R]], items: Sequence[Any]) -> list[R]:
    """Return the results for all items, in their order; at most `AT_ONCE` are in progress at a time.

    Thousands that start together would block the event loop, which looks for responses and signals only in between.
    """
    starting = asyncio.Semaphore(AT_ONCE)

    async def one(item: Any) -> R:
        async with starting:
            return await function(item)

    return await asyncio.gather(*map(one, items))


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these tasks and wait until they have ended; ignore their errors."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
