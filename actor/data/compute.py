"""Runs torch in threads, so that the event loop processes server responses meanwhile; cancels tasks."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import torch

InThread: TypeAlias = Callable[..., Awaitable[Any]]


def in_a_thread_of(threads: int) -> InThread:
    """Return an async function `run(function, *args, **kwargs)` that calls `function` in one dedicated thread.

    Args:
        threads: number of threads for torch, which keeps this setting per thread: it is set when the thread starts.
    """
    executor = ThreadPoolExecutor(1, "compute", torch.set_num_threads, (threads,))

    async def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(executor, call)

    return run


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these tasks and wait until they have ended; ignore their errors."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
