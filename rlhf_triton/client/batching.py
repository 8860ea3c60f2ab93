"""Requests of several rows: one that is refused is halved."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rlhf_triton.client.errors import RequestFailed, RequestRefused

T = TypeVar("T")
R = TypeVar("R")
F = TypeVar("F")


async def halved(
    rows: Sequence[T],
    ask: Callable[[Sequence[T]], Awaitable[R]],
    failure: Callable[[RequestFailed], F],
    *,
    unit: int = 1,
) -> list[tuple[Sequence[T], R | F]]:
    """Send one request; if the server refuses it, send its halves, until only the refused rows have no answer.

    So one row that it refuses, such as a text that is too long for its template, does not cost the others.

    Args:
        rows: of the request.
        ask: sends a request.
        failure: stands for the answer to a request that failed.
        unit: number of consecutive rows that only make sense together.

    Returns: rows and answer of each request, in the order of the rows.
    """
    try:
        return [(rows, await ask(rows))]
    except RequestFailed as error:
        failed, is_refused = failure(error), isinstance(error, RequestRefused)
    num_units = len(rows) // unit  # not within `except`, where the error would keep the encoded request in memory
    if num_units < 2 or not is_refused:
        return [(rows, failed)]
    middle = num_units // 2 * unit
    parts = await asyncio.gather(*(halved(half, ask, failure, unit=unit) for half in (rows[:middle], rows[middle:])))
    return [*parts[0], *parts[1]]
