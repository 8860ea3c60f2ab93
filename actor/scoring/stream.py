"""Streams rows to the server: each response is scored as soon as it ends, while others are still being generated.

If a reward function is groupwise, a response waits for the others to its prompt, and for no other.
"""

import asyncio
import contextvars
import math
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import torch

from rlhf_triton.actor.data.compute import AT_ONCE, cancelled
from rlhf_triton.actor.data.rollout import Rollout, Scores, join_rollouts
from rlhf_triton.actor.scoring.scorer import Scorer, join_scores
from rlhf_triton.client.batching import Gathering
from rlhf_triton.wire.contract import VersionRange

T = TypeVar("T")
# Rows that end in the same decoding step reach the event loop within a few milliseconds. Batching them pays: a request
# of 8 rows takes a third of the CPU time (server and client together) of 8 requests of one row.
GATHER_S = 0.01


class RowStream(Generic[T]):
    """Sends requests for the rows of one rollout. Create it on the event loop."""

    def __init__(
        self,
        ask: Callable[[Rollout], Awaitable[T]],
        *,
        rows_per_request: int,
        ready: Awaitable[object] | None = None,
        group_size: int = 1,
    ) -> None:
        """
        Args:
            ask: sends one request for the rows of a rollout.
            rows_per_request: maximum rows per request; a smaller request is sent after `GATHER_S`.
            ready: requests are not sent before it completes, and fail with its error; None: send at once.
            group_size: number of consecutive prompts whose rows share a request, next to each other and in order.
        """
        self._ask, self._ready = ask, ready
        self._loop, self._starting = asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE)
        self._context = contextvars.copy_context()
        self._group_size = group_size
        self._unfinished: dict[int, dict[int, Rollout]] = {}  # groups that miss a row
        self._gathering = Gathering(self._request, gather_s=GATHER_S, max_rows=rows_per_request)
        self._order: list[int] = []
        self._requests: list[asyncio.Task[T]] = []
        self._is_closed = False
        self.span = (math.inf, 0.0)  # `time.monotonic` of the first request and the last response

    def take(self, index: int, row: Rollout) -> None:
        """Queue `row`, the one-row rollout of prompt `index`. Thread-safe.

        Raises:
            asyncio.CancelledError: the stream is closed, so generation can stop.
        """
        if self._is_closed:
            raise asyncio.CancelledError
        # In the stream's context: the requests belong to its trace.
        self._loop.call_soon_threadsafe(self._add, index, row, context=self._context)

    async def answers(self) -> tuple[list[T], torch.Tensor]:
        """Return the results in sending order, and int64 `[B]`: the row of each prompt in the joined results."""
        self._gathering.flush()
        return await asyncio.gather(*self._requests), torch.tensor(self._order).argsort()

    async def close(self) -> None:
        """Cancel requests in flight; there are none once `answers` has returned."""
        self._is_closed = True
        await cancelled(self._requests)

    def _add(self, index: int, row: Rollout) -> None:
        number = index // self._group_size
        group = self._unfinished.setdefault(number, {})
        group[index] = row
        if len(group) < self._group_size or self._is_closed:
            return
        del self._unfinished[number]
        self._order += sorted(group)
        request, first = self._gathering.add([group[i] for i in sorted(group)])
        if first == 0:
            self._requests.append(request)

    async def _request(self, rows: list[Rollout]) -> T:
        async with self._starting:  # thousands of rows may end together, or wait for `ready`
            if self._ready is not None:
                await asyncio.shield(self._ready)  # shared with other requests: cancelling one must not cancel it
            await asyncio.sleep(0)
        start = time.monotonic()
        answer = await self._ask(join_rollouts(rows, pad_id=0))
        self.span = min(self.span[0], start), time.monotonic()
        return answer


class ScoringStream(RowStream[Scores]):
    """Scores the rows of one rollout; `group_size` is its number of responses per prompt.

    The result of `ready` is the versions of the critic that may score them; None: any.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        ready: asyncio.Future[VersionRange | None],
        rows_per_request: int,
        group_size: int = 1,
    ) -> None:
        size = group_size if scorer.reward.groupwise else 1
        super().__init__(
            lambda rollout: scorer.score(rollout, size, versions=ready.result()),
            ready=ready,
            rows_per_request=rows_per_request,
            group_size=size,
        )

    async def scores(self, width: int) -> Scores:
        """Return the scores of all rows, ordered by prompt index, with values padded to `width` tokens."""
        parts, order = await self.answers()
        return await asyncio.to_thread(lambda: join_scores(parts, width).select(order))
