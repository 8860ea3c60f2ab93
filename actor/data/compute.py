"""Runs torch outside the event loop, so that responses from servers are processed while it computes; ends tasks."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import torch

InThread: TypeAlias = Callable[..., Awaitable[Any]]


def in_a_thread_of(threads: int) -> InThread:
    """Return `run`: `await run(function, *args, **kwargs)` calls the function in a thread of its own.

    Args:
        threads: torch threads. torch holds this setting per thread, so it is set when the thread starts.
    """
    executor = ThreadPoolExecutor(1, "compute", torch.set_num_threads, (threads,))

    async def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(executor, call)

    return run


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these tasks and wait until they have ended; their errors are dropped."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
