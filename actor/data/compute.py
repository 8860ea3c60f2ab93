"""Runs torch off the event loop, so that answers are received meanwhile."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import torch

InThread: TypeAlias = Callable[..., Awaitable[Any]]


def in_a_thread_of(threads: int) -> InThread:
    """`await run(function, *args, **kwargs)` gives the result; torch keeps its number of threads per thread."""
    executor = ThreadPoolExecutor(1, "compute", torch.set_num_threads, (threads,))

    async def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(executor, call)

    return run
