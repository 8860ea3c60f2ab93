"""Continuous batching for reward, critic and reference: the rows of all requests share forward passes.

Three functions define a model: `read` returns the rows of a request, `forward` computes on rows, and `reply` makes the
output tensors. `Engine` connects them: `execute` reads token rows and queues them, one thread tokenises sentences,
another runs the forward passes, and a third sends each reply as soon as the last row of its request is done. Imports no
torch.
"""

import contextlib
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rlhf_triton.python_backend.serving.parameters import Parameters
from rlhf_triton.python_backend.serving.pass_cost import fit_pass_cost, overhead_tokens
from rlhf_triton.python_backend.serving.round_robin import RoundRobin
from rlhf_triton.python_backend.serving.scheduling import SWITCH_INTERVAL_S, RowPool
from rlhf_triton.python_backend.serving.triton import Call, MetricCounters, Unavailable, log, log_error
from rlhf_triton.wire.contract import (
    DEMANDED,
    FORWARD_OUTPUTS,
    Arrays,
    ScoringRows,
    TokenRow,
    VersionRange,
)

# Backpressure: while the backlog exceeds this many forward passes, `execute` blocks, so that further requests wait in
# Triton's own queue, where Triton's limits on queue size and time apply.
LINED_UP_FORWARDS = 32
# Hard limit on the backlog in tokens; it bounds memory. It must fit several of the largest requests, because while it
# is exceeded all later requests wait in Triton's queue.
MAX_TOKENS = 32_000_000
MAX_UNREAD_BYTES = 64_000_000  # hard limit on sentences that wait to be tokenised
AWAIT_SWAP_S = 1.0  # how long a request waits for a swap in progress; after that, another server may be faster
PUBLISH_EVERY_S = 0.5  # interval for publishing the counters; each costs a round trip to the server
COUNTERS = {
    "rlhf_forwards_total": "Forward passes of the model",
    "rlhf_forward_rows_total": "Rows scored by the model",
    "rlhf_forward_tokens_total": "Tokens of the scored rows",
    "rlhf_forward_padding_tokens_total": "Padding tokens added to the scored rows",
}


@dataclass(eq=False, kw_only=True)
class Scoring:
    """A request in flight: its rows, their outputs so far, and the model that scores all of them."""

    call: Call
    rows: list[TokenRow]
    width: int  # S, the padded length of the rows in the reply
    received: float  # by time.monotonic()
    deadline: float | None  # the request fails if its first forward pass has not started by then
    demanded: VersionRange | None  # weights versions that may score the request; None: any
    outputs: list[Any]  # one array per row; None until the row is done
    model: Any = None  # set when the first row runs, so that one weights version scores the whole request
    done: int = 0  # number of rows with an output


Reply = Mapping[str, Callable[[Scoring], np.ndarray]]
"""Output name -> function that returns its tensor for a finished request."""
Wait = Callable[[], Sequence[np.ndarray]]
"""Waits for the results of a forward pass: one output array per row."""
Forward = Callable[[Any, Sequence[TokenRow], int], Wait]
"""Launches a forward pass of a model on rows, padded to a width."""


class Versions(Protocol):
    """Holds the version of the model that is served now."""

    version: Any
    changed: Callable[[], None]
    """Called after each change of the version, and after each failed change."""

    def is_arriving(self, demanded: VersionRange) -> bool:
        """Return whether the served version is about to change to one of the demanded versions."""
        ...


class Compute(Protocol):
    """Runs the forward passes of an engine."""

    parameters: Parameters
    passes_in_flight: int
    """Maximum number of launched forward passes whose results have not been waited for."""
    refuse_all: Callable[[Exception], None] | None
    """Fails all requests in flight and all later ones; None before the model serves."""

    def prepare_thread(self) -> None:
        """Prepare the calling thread for forward passes; called once in the thread that runs them."""

    def launch(self, forward: Forward, model: Any, rows: Sequence[TokenRow], width: int) -> Wait:
        """Launch a forward pass of `rows`, padded to `width` tokens; return a function that waits for its results."""
        ...

    def handle_failure(self, error: Exception) -> None:
        """Handle the error of a forward pass; called before its requests fail."""

    def publish(self) -> None:
        """Send metrics to the server, a few times a second."""

    def close(self) -> None:
        """Release all resources; called when no request is left."""


@dataclass(eq=False)
class _Pass:
    """A launched forward pass. References its model, whose memory must not be freed before the pass has ended."""

    model: Any
    batch: list[tuple[Scoring, int]]
    width: int
    outputs: Wait


class Engine:
    """Serves a model defined by `read`, `forward` and `reply`."""

    def __init__(
        self,
        compute: Compute,
        *,
        read: Callable[[Call], ScoringRows],
        versions: Versions,
        forward: Forward,
        reply: Reply,
        max_length: int | None,
    ) -> None:
        """Start the threads.

        Args:
            read: returns the rows of a request, or raises ContractError. Rows with `unread_bytes` are slow to iterate;
                the thread "sentences" iterates them.
            versions: its current version scores requests whose first forward pass has not started.
            max_length: maximum width of a forward pass; None: unlimited.
        """
        parameters = compute.parameters
        budget = parameters.number("token_budget")
        self._lined_up_tokens = LINED_UP_FORWARDS * budget
        self._timeout_s = float(parameters.text("queue_timeout_s")) or None
        self._counters = MetricCounters(parameters.model, COUNTERS)
        self.compute = compute
        self.versions = versions
        self.forward = forward
        overhead = self._overhead_tokens(budget, max_length)
        self._pool: RowPool[Scoring] = RowPool(token_budget=budget, overhead_tokens=overhead)
        self._read = read
        self._reply = reply
        self._changed = threading.Condition(threading.RLock())
        self._done: queue.SimpleQueue[Scoring | None] = queue.SimpleQueue()
        self._unread_bytes = 0
        self._awaiting: list[Scoring] = []  # requests that wait for a swap in progress
        self._stopping = False
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()  # requests in flight, and a few that were just answered
        self._executing = threading.Lock()
        self._refusal: Exception | None = None
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._texts = RoundRobin("sentences")
        self._worker = threading.Thread(target=self._work, name="forwards", daemon=True)
        self._answerer = threading.Thread(target=self._answer, name="answers", daemon=True)
        self._worker.start()
        self._answerer.start()
        compute.refuse_all = self.refuse_all
        versions.changed = self._enqueue_awaiting

    def _overhead_tokens(self, token_budget: int, longest: int | None) -> int:
        """Measure the fixed cost of a forward pass, and return it in tokens."""

        def run(num_rows: int, width: int) -> None:
            rows = [TokenRow(np.arange(width, dtype=np.int64) % 7)] * num_rows  # ids that every vocabulary has
            self.compute.launch(self.forward, self.versions.version, rows, width)()

        cost = fit_pass_cost(run, token_budget=token_budget, longest=longest, clock=time.perf_counter)
        overhead = overhead_tokens(cost, token_budget)
        measured = "takes a time that is not measured"
        if cost is not None:
            measured = f"takes {cost[0] * 1e3:.2f} ms + {cost[1] * 1e6:.2f} us per token"
        log(
            f"{self.compute.parameters.model}: a forward pass {measured}; a row joins one if it adds at most "
            f"{overhead} tokens of padding"
        )
        return overhead

    def execute(self, calls: Sequence[Call]) -> None:
        """Queue the rows of the requests, then block while the backlog is above its limits (backpressure)."""
        with self._executing:
            if self._refusal is not None:
                for call in calls:
                    call.fail(self._refusal)
                return
            self._calls.update(calls)
            scorings = [self._begin(call) for call in calls]
            with self._changed:
                self._enqueue(scorings)
                self._changed.wait_for(self._has_room)

    def _has_room(self) -> bool:
        full = self._pool.pressing_tokens > self._lined_up_tokens or self._pool.tokens > MAX_TOKENS
        return self._stopping or self._refusal is not None or not (full or self._unread_bytes > MAX_UNREAD_BYTES)

    def _begin(self, call: Call) -> Scoring | None:
        """Read a request; return None if it was refused, or if its sentences must be tokenised first."""
        received = time.monotonic()
        try:
            read = self._read(call)
            if not read.unread_bytes:
                return self._scoring(call, list(read.rows), read.width, received)
        except Exception as error:  # process edge: an error fails this request only
            call.fail(error)
            return None
        with self._changed:
            self._unread_bytes += read.unread_bytes
        self._texts.submit(self._read_later(call, read, received))
        return None

    def _read_later(self, call: Call, read: ScoringRows, received: float) -> Iterator[None]:
        """Tokenise the sentences of a request in the thread "sentences", then queue its rows."""
        rows = []
        scoring = None
        try:
            for row in read.rows:
                rows.append(row)
                yield
            scoring = self._scoring(call, rows, read.width, received)
        except Exception as error:  # thread edge: an error fails this request only
            call.fail(error)
        with self._changed:
            self._unread_bytes -= read.unread_bytes
            self._enqueue([scoring])

    def _scoring(self, call: Call, rows: list[TokenRow], width: int | None, received: float) -> Scoring:
        timeout_s = call.timeout_s or self._timeout_s
        deadline = None if timeout_s is None else received + timeout_s
        width = width or max(row.tokens.size for row in rows)
        return Scoring(
            call=call,
            rows=rows,
            width=width,
            received=received,
            deadline=deadline,
            demanded=call.versions(),
            outputs=[None] * len(rows),
        )

    def _enqueue(self, scorings: Sequence[Scoring | None]) -> None:
        """Queue the requests' rows; None is a refused request. The caller must hold the lock."""
        for scoring in filter(None, scorings):
            served = self.versions.version
            try:
                if (demanded := _unmet_demand(scoring, served)) is not None:
                    is_patient = not self._stopping and time.monotonic() - scoring.received < AWAIT_SWAP_S
                    if not is_patient or not self.versions.is_arriving(demanded):
                        raise self._other_version(demanded, served)
                    self._awaiting.append(scoring)
                elif scoring.call.wanted.isdisjoint(FORWARD_OUTPUTS):
                    scoring.model = served
                    self._done.put(scoring)
                else:
                    self._pool.add(scoring, [row.tokens.size for row in scoring.rows])
            except Exception as error:  # process edge: no exception may leave `execute` (see Call.fail)
                self._fail([(scoring, 0)], error)
        self._changed.notify_all()

    def _enqueue_awaiting(self) -> None:
        """Queue requests whose demanded version is now served; refuse requests that have waited too long for it."""
        with self._changed:
            awaiting = self._awaiting
            self._awaiting = []
            self._enqueue(awaiting)

    def _other_version(self, demanded: VersionRange, served: Any) -> Unavailable:
        return Unavailable(f"{self.compute.parameters.model} serves version {served.number}, {DEMANDED} {demanded}")

    def refuse_all(self, error: Exception) -> None:
        """Fail all requests in flight, and every later request immediately."""
        self._refusal = error
        with self._changed:
            self._changed.notify_all()
        with self._executing:  # earlier calls of `execute` have registered their requests by now
            calls = list(self._calls)
        for call in calls:
            call.fail(error)

    def finalize(self) -> None:
        """Reply to every received request, then stop the threads."""
        if self._refusal is None:  # otherwise the threads may hang
            self._texts.close()
            with self._changed:
                self._stopping = True
                self._enqueue_awaiting()  # refuses them, and wakes the worker
            self._worker.join()
            self._done.put(None)
            self._answerer.join()
        self.compute.close()

    def _work(self) -> None:
        self.compute.prepare_thread()
        launched: deque[_Pass] = deque()
        while True:
            # No local variable may reference a pass while this waits for rows: its weights version could not be freed.
            is_last = not self._launch_next(launched)
            if is_last and not launched:
                return
            if is_last or len(launched) == self.compute.passes_in_flight:
                self._finish(launched.popleft())

    def _launch_next(self, launched: deque[_Pass]) -> bool:
        """Launch the next forward pass and append it to `launched`; wait for rows only if `launched` is empty.

        Returns False if there are no rows.
        """
        forward = self._next_forward(waits=not launched)
        if forward is None:
            return False
        model, batch = forward
        if not batch:
            return True
        rows = [scoring.rows[i] for scoring, i in batch]
        width = max(row.tokens.size for row in rows)
        try:
            outputs = self.compute.launch(self.forward, model, rows, width)
            launched.append(_Pass(model, batch, width, outputs))
        except Exception as error:  # process edge: only the requests in this forward pass fail
            self.compute.handle_failure(error)
            self._fail(batch, error)
        return True

    def _next_forward(self, *, waits: bool) -> tuple[Any, list[tuple[Scoring, int]]] | None:
        """Return the next forward pass as (model, rows); None if there are no rows and the engine stops or not `waits`.

        A request that has started keeps its model; other requests get the current one. Rows share a forward pass only
        if they have the same model.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._pool) > 0 or self._stopping or not waits)
            oldest = self._pool.oldest()
            if oldest is None:
                return None
            current = self.versions.version
            model = oldest.model or current
            batch = self._pool.take(lambda scoring: (scoring.model or current) is model)
            self._refuse_late(batch)
            for scoring, i in batch:  # the version has changed since the request was queued
                if scoring.model is None and (demanded := _unmet_demand(scoring, model)) is not None:
                    self._fail([(scoring, i)], self._other_version(demanded, model))
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
        """Wait for the results of a forward pass; pass finished requests to the answering thread."""
        batch = launched.batch
        try:
            outputs = launched.outputs()
            assert len(outputs) == len(batch), (len(outputs), len(batch))
        except Exception as error:  # process edge: only the requests in this forward pass fail
            self.compute.handle_failure(error)
            self._fail(batch, error)
            return
        tokens = sum(scoring.rows[i].tokens.size for scoring, i in batch)
        padding = len(batch) * launched.width - tokens
        with self._changed:
            self._counters.add((1, len(batch), tokens, padding))
            for (scoring, i), output in zip(batch, outputs, strict=True):
                scoring.outputs[i] = output
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
                    scoring.call.answer(self._tensors(scoring))
                except Exception as error:  # thread edge: if the thread died, no request would ever get a reply
                    log_error(f"scoring: {type(error).__name__}: {error}")
                    scoring.call.fail(error)
                del scoring  # it keeps a weights version alive
            if time.monotonic() - published > PUBLISH_EVERY_S:
                published = time.monotonic()
                self._enqueue_awaiting()
                with self._changed:  # the worker adds to the counters
                    self._counters.publish()
                self.compute.publish()

    def _tensors(self, scoring: Scoring) -> Arrays:
        """Return the requested outputs."""
        return {name: make(scoring) for name, make in self._reply.items() if name in scoring.call.wanted}

    def _fail(self, batch: list[tuple[Scoring, int]], error: Exception) -> None:
        with self._changed:
            for scoring in {id(scoring): scoring for scoring, _ in batch}.values():
                self._pool.discard(scoring)
                scoring.call.fail(error)


def _unmet_demand(scoring: Scoring, served: Any) -> VersionRange | None:
    """Return the versions that a request demands if `served` is not one of them, otherwise None."""
    demanded = scoring.demanded
    return None if demanded is None or demanded.includes(served.number) else demanded
