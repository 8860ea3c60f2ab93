"""Continuous batching for reward, critic and reference: the rows of all requests share forward passes.

`execute` reads token rows and queues them. One thread tokenises sentences, worker threads run the forward passes, and
another thread sends each reply as soon as the last row of its request is done. Imports no torch.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from python_backend.models.batching import padded_width
from python_backend.serving.round_robin import RoundRobin
from python_backend.serving.scheduling import SWITCH_INTERVAL_S, RowPool
from python_backend.serving.triton import Call, MetricCounters, Parameters, Unavailable, log_error
from python_backend.wire.contract import COMPUTE_US, QUEUE_US, Limits, ScoringRows

# Backpressure: while the backlog exceeds this many forward passes, `execute` blocks, so that further requests wait in
# Triton's own queue, where Triton's limits on queue size and time apply.
LINED_UP_FORWARDS = 32
# Hard limit on the backlog in tokens; it bounds memory. It must fit several of the largest requests, because while it
# is exceeded all later requests wait in Triton's queue.
MAX_TOKENS = 32_000_000
MAX_UNREAD_BYTES = 64_000_000  # hard limit on sentences that wait to be tokenised
PUBLISH_EVERY_S = 0.5  # interval for the counters, each of which costs a round trip to the server
COUNTERS = {
    "rlhf_forwards_total": "Forward passes of the model",
    "rlhf_forward_rows_total": "Rows scored by the model",
    "rlhf_forward_tokens_total": "Tokens of the scored rows",
    "rlhf_forward_padding_tokens_total": "Padding tokens added to the scored rows",
}


@dataclass(eq=False)
class Scoring:
    """A request in flight: its rows, their outputs so far, and the model that scores all of them."""

    call: Call
    rows: ScoringRows
    received: float  # by time.monotonic()
    deadline: float | None  # the request fails if its first forward pass has not started by then
    model: Any = None  # set when the first row runs, so that one weights version scores the whole request
    done: int = 0  # number of rows with an output
    outputs: list[Any] = field(default_factory=list)  # an array per row; None until it is done
    times: np.ndarray | None = None  # float64 [B, 2]: seconds in the queue and in the forward pass; None: not wanted

    def timing(self) -> dict[str, np.ndarray]:
        """Return the outputs `queue_us` and `compute_us`, if wanted."""
        if self.times is None:
            return {}
        microseconds = np.rint(self.times * 1e6).astype(np.int64)
        return {QUEUE_US: microseconds[:, :1], COMPUTE_US: microseconds[:, 1:]}


@dataclass(eq=False)
class _Pass:
    """A forward pass that was launched. Keeps its model, whose memory must not be freed before the pass has ended."""

    model: Any
    batch: list[tuple[Scoring, int]]
    width: int
    begin: float
    outputs: Callable[[], list[np.ndarray]]


class ScoringModel(ABC):
    """Base class of the Triton models reward, critic and reference.

    A subclass sets `limits` and defines `current_model`, `read`, `forward` and `reply`; its `initialize` calls `set_up`
    first and `start` last.
    """

    limits: Limits
    passes_in_flight = 1
    """Forward passes that a worker has launched at most when it waits for the results of the first one."""

    def set_up(self, parameters: Parameters) -> None:
        """Read the parameters that all scoring models share."""
        budget = parameters.number("token_budget")
        self._pool: RowPool[Scoring] = RowPool(
            token_budget=budget,
            max_rows=parameters.number("micro_batch_rows"),
            overhead_tokens=parameters.number("forward_overhead_tokens"),
        )
        self._num_workers = parameters.number("workers")
        self._multiple = parameters.number("strip_sequence_length_to_multiple")
        self._lined_up_tokens = LINED_UP_FORWARDS * budget
        self._timeout_s = float(parameters.text("queue_timeout_s")) or None
        self._counters = MetricCounters(parameters.model, COUNTERS)
        self._changed = threading.Condition(threading.RLock())
        self._done: queue.SimpleQueue[Scoring | None] = queue.SimpleQueue()
        self._unread_bytes = 0
        self._stopping = False
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()  # those in flight, and a few that were just answered
        self._executing = threading.Lock()
        self._started = False
        self._refusal: Exception | None = None

    def start(self) -> None:
        """Start the threads."""
        self._started = True
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._workers = [
            threading.Thread(target=self._work, name=f"forwards-{i}", daemon=True) for i in range(self._num_workers)
        ]
        self._texts = RoundRobin("sentences")
        self._answerer = threading.Thread(target=self._answer, name="answers", daemon=True)
        for thread in (*self._workers, self._answerer):
            thread.start()

    def prepare_worker(self) -> None:  # noqa: B027 - a hook, which a subclass need not define
        """Hook that runs once in each worker thread, before its first forward pass."""

    @abstractmethod
    def current_model(self) -> Any:
        """Return the model for requests whose first forward pass has not started."""

    @abstractmethod
    def read(self, call: Call) -> Generator[int, None, ScoringRows]:
        """Return the request's rows, as a generator. Raises ContractError if the request is invalid.

        A generator with slow work first yields the number of bytes that it will read, and yields again after each part.
        `execute` runs it up to its first yield; the thread "sentences" runs the rest.
        """

    def needs_forward(self, call: Call) -> bool:
        """Return whether any output that the caller requested needs a forward pass."""
        return True

    @abstractmethod
    def launch(self, model: Any, rows: list[np.ndarray], width: int) -> Callable[[], list[np.ndarray]]:
        """Launch a forward pass with rows padded to `width` tokens; return a function that waits for its results.

        The results are one output array per row.
        """

    def failed(self, error: Exception) -> None:  # noqa: B027 - a hook, which a subclass need not define
        """Hook that receives the error of a forward pass before its requests fail."""

    def publish(self) -> None:
        """Send metrics to the server, a few times a second."""
        with self._changed:  # the workers add to the counters
            self._counters.publish()

    @abstractmethod
    def reply(self, scoring: Scoring) -> Mapping[str, np.ndarray]:
        """Return the response tensors of a request whose rows are all done."""

    def execute(self, requests: list[Any]) -> None:
        """Triton's entry point: queue the rows, then block while the backlog is above its limits (backpressure)."""
        with self._executing:
            calls = [Call(request) for request in requests]
            if self._refusal is not None:
                for call in calls:
                    call.fail(self._refusal)
                return
            self._calls.update(calls)
            scorings = []
            for call in calls:
                reading = self._begin(call)
                try:
                    num_bytes = next(reading)
                except StopIteration as read:
                    scorings.append(read.value)
                else:
                    with self._changed:
                        self._unread_bytes += num_bytes
                    self._texts.submit(self._read_later(reading, num_bytes))
            with self._changed:
                self._line_up(scorings)
                self._changed.wait_for(self._has_room)

    def _has_room(self) -> bool:
        full = self._pool.pressing_tokens > self._lined_up_tokens or self._pool.tokens > MAX_TOKENS
        return self._stopping or self._refusal is not None or not (full or self._unread_bytes > MAX_UNREAD_BYTES)

    def _line_up(self, scorings: Sequence[Scoring | None]) -> None:
        """Queue the requests' rows for the workers; None is a refused request. The caller must hold the lock."""
        for scoring in filter(None, scorings):
            try:
                if self.needs_forward(scoring.call):
                    self._pool.add(scoring, [row.size for row in scoring.rows.tokens])
                else:
                    scoring.model = self.current_model()
                    self._done.put(scoring)
            except Exception as error:  # process edge: no exception may leave `execute` (see Call.fail)
                self._fail([(scoring, 0)], error)
        self._changed.notify_all()

    def _read_later(self, reading: Generator[int, None, Scoring | None], num_bytes: int) -> Generator[int, None, None]:
        """Finish reading a request in the thread "sentences", then queue its rows."""
        scoring = yield from reading
        with self._changed:
            self._unread_bytes -= num_bytes
            self._line_up([scoring])

    def refuse_all(self, error: Exception) -> None:
        """Fail all requests in flight, and at once every later one."""
        self._refusal = error
        with self._changed:
            self._changed.notify_all()
        with self._executing:  # what it let in before is among the calls now
            calls = list(self._calls)
        for call in calls:
            call.fail(error)

    def finalize(self) -> None:
        """Triton's entry point at unload: reply to every received request, then stop the threads."""
        self._texts.close()
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.join()
        self._done.put(None)
        self._answerer.join()

    def _begin(self, call: Call) -> Generator[int, None, Scoring | None]:
        received = time.monotonic()
        try:
            rows = yield from self.read(call)
        except Exception as error:  # process edge: an error fails this request only
            call.fail(error)
            return None
        timeout_s = call.timeout_s or self._timeout_s
        deadline = None if timeout_s is None else received + timeout_s
        times = None if call.wanted.isdisjoint((QUEUE_US, COMPUTE_US)) else np.zeros((len(rows.tokens), 2))
        return Scoring(call, rows, received, deadline, outputs=[None] * len(rows.tokens), times=times)

    def _work(self) -> None:
        self.prepare_worker()
        launched: deque[_Pass] = deque()
        while True:
            # No local variable may keep a pass while this waits for rows: its weights version could not be freed.
            is_last = not self._launch_next(launched)
            if is_last and not launched:
                return
            if is_last or len(launched) == self.passes_in_flight:
                self._finish(launched.popleft())

    def _launch_next(self, launched: deque[_Pass]) -> bool:
        """Launch the next forward pass and append it to `launched`; wait for its rows only if there is nothing else.

        Returns False if there are no rows.
        """
        taken = self._next_forward(waits=not launched)
        if taken is None:
            return False
        model, batch = taken
        if not batch:
            return True
        rows = [scoring.rows.tokens[i] for scoring, i in batch]
        width = padded_width(max(row.size for row in rows), self._multiple, self.limits.max_length)
        begin = time.monotonic()
        try:
            launched.append(_Pass(model, batch, width, begin, self.launch(model, rows, width)))
        except Exception as error:  # process edge: only the requests in this forward pass fail
            self.failed(error)
            self._fail(batch, error)
        return True

    def _next_forward(self, *, waits: bool) -> tuple[Any, list[tuple[Scoring, int]]] | None:
        """Return the next forward pass as (model, rows), or None: if there are no rows, and it stops or must not wait.

        A request that has started keeps its model; the others get the current one. Rows share a forward pass only if
        their model is the same.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._pool) > 0 or self._stopping or not waits)
            oldest = self._pool.oldest()
            if oldest is None:
                return None
            current = self.current_model()
            model = oldest.model or current
            batch = self._pool.take(lambda scoring: (scoring.model or current) is model)
            self._refuse_late(batch)
            batch = [(scoring, i) for scoring, i in batch if not scoring.call.answered]
            for scoring, _ in batch:
                scoring.model = model
            self._changed.notify_all()
        return model, batch

    def _refuse_late(self, batch: list[tuple[Scoring, int]]) -> None:
        """Fail requests whose deadline passed before their first row ran."""
        now = time.monotonic()
        late = [(s, i) for s, i in batch if s.deadline is not None and now > s.deadline and s.model is None]
        if late:
            self._fail(late, Unavailable("deadline passed: the request waited too long for its first forward pass"))

    def _finish(self, launched: _Pass) -> None:
        """Wait for the results of a forward pass, and hand over the requests whose rows are all done."""
        batch = launched.batch
        try:
            outputs = launched.outputs()
            assert len(outputs) == len(batch), (len(outputs), len(batch))
        except Exception as error:  # process edge: only the requests in this forward pass fail
            self.failed(error)
            self._fail(batch, error)
            return
        duration = time.monotonic() - launched.begin
        tokens = sum(scoring.rows.tokens[i].size for scoring, i in batch)
        with self._changed:
            self._counters.add((1, len(batch), tokens, len(batch) * launched.width - tokens))
            for (scoring, i), output in zip(batch, outputs, strict=True):
                scoring.outputs[i] = output
                if scoring.times is not None:
                    scoring.times[i] = launched.begin - scoring.received, duration
                scoring.done += 1
                if scoring.done == len(scoring.outputs):
                    self._done.put(scoring)

    def _answer(self) -> None:
        """Send the replies. Runs in its own thread, because sending blocks until tritonserver accepts the response."""
        published = 0.0
        while True:
            with contextlib.suppress(queue.Empty):
                scoring = self._done.get(timeout=PUBLISH_EVERY_S)
                if scoring is None:
                    return
                try:
                    scoring.call.answer({**self.reply(scoring), **scoring.timing()})
                except Exception as error:  # thread edge: if the thread died, no request would ever get a reply
                    log_error(f"scoring: {type(error).__name__}: {error}")
                    scoring.call.fail(error)
                del scoring  # it keeps a weights version alive
            if time.monotonic() - published > PUBLISH_EVERY_S:
                published = time.monotonic()
                self.publish()

    def _fail(self, batch: list[tuple[Scoring, int]], error: Exception) -> None:
        with self._changed:
            for scoring in {id(scoring): scoring for scoring, _ in batch}.values():
                self._pool.discard(scoring)
                scoring.call.fail(error)
