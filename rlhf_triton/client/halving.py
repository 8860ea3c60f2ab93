"""Splits refused requests in halves, so that one refused row does not cost the others their reply."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rlhf_triton.client.errors import RequestFailed, RequestRefused

T = TypeVar("T")
R = TypeVar("R")
F = TypeVar("F")


async def halved(
    rows: Sequence[T],
    send: Callable[[Sequence[T]], Awaitable[R]],
    failure: Callable[[RequestFailed], F],
    *,
    unit: int = 1,
) -> list[tuple[Sequence[T], R | F]]:
    """Send one request; if the server refuses it, send its halves, until only the refused rows have no reply.

    A row that the server refuses, such as a text that is too long, thus does not affect the others.

    Args:
        rows: rows of the request.
        send: sends a request with the given rows.
        failure: returns the value that stands for the reply to a failed request.
        unit: number of consecutive rows that must stay in one request.

    Returns:
        Rows and reply of each request, in the order of the rows.
    """
    try:
        return [(rows, await send(rows))]
    except RequestFailed as error:
        failed = failure(error)
        is_refused = isinstance(error, RequestRefused)
    num_units = len(rows) // unit  # outside `except`, where the error would keep the encoded request in memory
    if num_units < 2 or not is_refused:
        return [(rows, failed)]
    middle = num_units // 2 * unit
    parts = await asyncio.gather(*(halved(half, send, failure, unit=unit) for half in (rows[:middle], rows[middle:])))
    return [*parts[0], *parts[1]]
