"""Runs torch in threads, so that the event loop stays free for server responses; runs and cancels tasks in bulk."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import torch

from rlhf_triton.models.gpu import use_gpu

InThread: TypeAlias = Callable[..., Awaitable[Any]]
MAX_CONCURRENT = 16  # tasks that may start in one iteration of the event loop, which takes a few milliseconds
R = TypeVar("R")


def make_compute_thread(threads: int, device: torch.device) -> InThread:
    """Return an async function `run(function, *args, **kwargs)` that calls `function` in a new, dedicated thread.

    Args:
        threads: number of torch threads; torch keeps this setting per thread, so the new thread sets it.
        device: the current device of the new thread.
    """

    def begin() -> None:
        torch.set_num_threads(threads)
        use_gpu(device)

    executor = ThreadPoolExecutor(1, "compute", begin)

    async def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(executor, call)

    return run


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
