"""Pool of worker processes for one reward function; a killed worker loses only the group that it was scoring.

A group is the list of samples that the function receives in one call: a single one, unless the function is groupwise.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rlhf_triton.rewards.sample import Sample
from rlhf_triton.user_code import KEY_OPTION
from rlhf_triton.workers.pool import Workers


@dataclass(frozen=True)
class ScoreOutcome:
    """Result of one sample: a score with an empty `error`, or NaN with the reason in `error`.

    NaN without an error means that the function does not apply to the sample.
    """

    score: float = float("nan")
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class FunctionCall:
    """A function and the settings with which it is called."""

    spec: str
    timeout_s: float
    """Time limit for one group, from when a worker starts to score it."""
    timeout_key: str = ""
    """The configuration key of the time limit, for messages."""
    groupwise: bool = False
    """Whether the function receives all samples of a group as one list."""
    options: Mapping[str, Any] = field(default_factory=dict)
    hidden_variables: Sequence[str] = ()
    """Environment variables that the workers do not inherit, in addition to the secrets of every run."""
    columns: Sequence[str] | None = None
    """Columns that rows may have, which a function with TRL's signature receives as arguments. None: any."""


class WorkerPool:
    """A fixed number of workers for one function, on an event loop in a separate thread."""

    def __init__(
        self,
        call: FunctionCall,
        *,
        num_workers: int,
        max_waiting: float = float("inf"),
        counted: Callable[[Mapping[str, float]], None] = lambda counts: None,
    ) -> None:
        """Start the workers; return once each has imported the function.

        Args:
            max_waiting: maximum number of samples that wait for a worker.
            counted: called in the pool's thread with the function's counts for a group, before the request's outcomes
                are reported.

        Raises:
            FunctionError: the function cannot be imported or refuses its options; no process is left running.
        """
        self._call = call
        self._counted = counted
        self._num_workers = num_workers
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-function", daemon=True)
        self._thread.start()
        self._free = asyncio.Semaphore(num_workers)
        self._workers = Workers(
            "rlhf_triton.rewards.worker",
            call.spec,
            {name: value for name, value in vars(call).items() if name not in ("spec", "hidden_variables")},
            number=num_workers,
            hidden_variables=call.hidden_variables,
            own_variable=call.options.get(KEY_OPTION),
        )
        try:
            self._run(self._workers.least_loaded())
        except BaseException:
            self.close()
            raise

    def submit(self, groups: Sequence[list[Sample]]) -> Future[list[list[ScoreOutcome]]]:
        """Score the groups of one request, interleaved with other requests' groups; return the outcomes of each group.

        The future raises RuntimeError if too many samples would wait.
        """
        return asyncio.run_coroutine_threadsafe(self._score(groups), self._loop)

    def close(self) -> None:
        """Kill all workers; groups without scores get errors. No effect if the pool is already closed."""
        if self._loop.is_closed():
            return
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, object]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _close(self) -> None:
        await self._workers.close()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)

    async def _score(self, groups: Sequence[list[Sample]]) -> list[list[ScoreOutcome]]:
        size = sum(map(len, groups))
        if self._num_waiting + size > self._max_waiting:
            raise RuntimeError(
                f"{self._num_waiting} samples are waiting, {size} more exceed the limit of {self._max_waiting}; send "
                "fewer rows per request, or retry later"
            )
        self._num_waiting += size
        outcomes: dict[int, list[ScoreOutcome]] = {}
        waiting = iter(enumerate(groups))

        async def score_in_turn() -> None:  # not all groups at once, so that other requests' groups run in between
            for i, group in waiting:
                outcomes[i] = await self._score_group(group)

        await asyncio.gather(*(score_in_turn() for _ in range(min(self._num_workers, len(groups)))))
        return [outcomes[i] for i in range(len(groups))]

    async def _score_group(self, group: list[Sample]) -> list[ScoreOutcome]:
        async with self._free:
            self._num_waiting -= len(group)
            try:
                worker = await self._workers.least_loaded()
                worker.load += 1
                try:
                    message = {"samples": [vars(sample) for sample in group]}
                    answer = await worker.ask(message, self._call.timeout_s, limit_key=self._call.timeout_key)
                finally:
                    worker.load -= 1
            except Exception as error:  # a sample that JSON cannot express, or a worker that does not start
                answer = {"error": str(error) or type(error).__name__}
        if "error" in answer:
            return [ScoreOutcome(error=str(answer["error"]))] * len(group)
        try:
            counts = answer["counts"]
            outcomes = [ScoreOutcome(**result) for _, result in zip(group, answer["results"], strict=True)]
        except (LookupError, TypeError, ValueError):  # user code can write to the socket
            worker.kill()
            return [
                ScoreOutcome(error=f"the worker process did not send one result for each of {len(group)} samples")
            ] * len(group)
        if counts:
            self._counted(counts)
        return outcomes
