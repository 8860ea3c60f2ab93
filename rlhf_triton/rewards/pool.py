"""Pool of worker processes for one reward function; killing a worker loses only the group that it was scoring.

A group is the list of samples that the function receives at once: one, unless the function is groupwise.

Unlike multiprocessing's pools and queues, workers share no locks: each has its own thread, process and socket, so any
of them can be killed at any time.
"""

import collections
import functools
import queue
import select
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_triton.python_backend.workers.child import receive_frame, send_frame
from rlhf_triton.python_backend.workers.process import START_LIMIT_S, WorkerDied, WorkerProcess, inherited_environment
from rlhf_triton.rewards.function import KEY_OPTION, FunctionError, Sample

MEMORY_MIB = 4096
LOOK_INTERVAL_S = 0.1  # how often to check that the worker is alive and the pool is not closed


@dataclass(frozen=True)
class ScoreOutcome:
    """Result of one sample: a score with an empty `error`, or NaN with the reason in `error`.

    NaN without a reason: the function does not apply to the sample.
    """

    score: float = float("nan")
    error: str = ""


@dataclass(frozen=True)
class FunctionCall:
    """How a function is called."""

    spec: str
    timeout_s: float
    """Time limit for one group, counted from when a worker starts to score it."""
    groupwise: bool = False
    """Whether it receives all samples of a group as one list."""
    options: Mapping[str, Any] = field(default_factory=dict)
    hidden_variables: Sequence[str] = ()
    """Environment variables that its processes do not inherit, besides the secrets of every run."""
    columns: Sequence[str] | None = None
    """Columns that rows may have; a function with TRL's signature takes its arguments from them. None: any."""


class PoolClosed(RuntimeError):
    """The pool was closed while a worker was starting or scoring."""


class Worker:
    """One process that has imported the function."""

    def __init__(
        self, call: FunctionCall, wanted: Callable[[], bool], *, start_limit_s: float, memory_mib: int
    ) -> None:
        """Start the process and wait until it has imported the function.

        Args:
            wanted: returns False once the pool is closed.
            start_limit_s: time limit for the import.
            memory_mib: memory limit of the process.

        Raises:
            FunctionError: the function cannot be imported within `start_limit_s`.
            PoolClosed: the pool was closed while the worker was starting.
        """
        spec, self._wanted, self._limit_s, self._number = call.spec, wanted, call.timeout_s, 0
        self._process = WorkerProcess(
            "rlhf_triton.rewards.worker",
            spec,
            memory_mib=memory_mib,
            environment=inherited_environment(call.hidden_variables, call.options.get(KEY_OPTION)),
        )
        self._channel = self._process.channel
        try:
            answer = self._ask({name: value for name, value in vars(call).items() if name != "spec"}, start_limit_s)
            if "error" in answer:
                raise FunctionError(answer["error"])
        except BaseException as error:
            self.kill()
            if not isinstance(error, (WorkerDied, TimeoutError)):
                raise
            cause = f"took longer than {start_limit_s:g} s" if isinstance(error, TimeoutError) else str(error)
            raise FunctionError(f"{spec} cannot be imported: {cause}") from error

    def is_ready(self) -> bool:
        """Return whether the process is alive and has sent nothing that was not requested."""
        return self._process.is_alive() and not select.select([self._channel], [], [], 0)[0]

    def run(self, group: list[Sample]) -> tuple[list[ScoreOutcome], dict[str, float]]:
        """Score one group; return the outcome of each sample, and the function's counts.

        If this raises, for whatever reason, the worker has been killed: its next reply could belong to this group.

        Raises:
            TimeoutError: scoring took longer than the limit.
            WorkerDied: the process ended, or sent a wrong reply.
            PoolClosed: the pool was closed while the worker was scoring.
        """
        try:
            answer = self._ask({"samples": [vars(sample) for sample in group]}, self._limit_s)
            outcomes = [ScoreOutcome(**result) for result in answer["results"]]
            if len(outcomes) != len(group):
                raise WorkerDied(f"the worker process sent {len(outcomes)} results for {len(group)} samples")
            return outcomes, answer["counts"]
        except BaseException as error:
            self.kill()
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"took longer than {self._limit_s:g} s (its timeout_s) and was killed") from error
            raise

    def kill(self) -> None:
        """Kill the process and everything it started, and wait until it has ended."""
        self._process.kill()

    def _ask(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a message and return the reply, which must repeat the message's number."""
        deadline = time.monotonic() + limit_s
        self._number += 1
        try:
            self._channel.settimeout(limit_s)
            send_frame(self._channel, {"number": self._number, **message})
            self._wait_for_reply(deadline)
            self._channel.settimeout(max(LOOK_INTERVAL_S, deadline - time.monotonic()))
            answer = receive_frame(self._channel)
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise WorkerDied(self._process.obituary()) from error
        if answer.get("number") != self._number:
            raise WorkerDied("the worker process sent a reply that was not requested")
        return answer

    def _wait_for_reply(self, deadline: float) -> None:
        while not select.select([self._channel], [], [], min(LOOK_INTERVAL_S, max(0.0, deadline - time.monotonic())))[
            0
        ]:
            if not self._wanted():
                raise PoolClosed
            # The socket's end of file is not enough: a process that the worker has forked may hold it open.
            if not self._process.is_alive():
                raise WorkerDied(self._process.obituary())
            if time.monotonic() >= deadline:
                raise TimeoutError


Pending = tuple[list[Sample], Callable[[list[ScoreOutcome]], None]]


class FairQueue:
    """Queue that takes one group of each request in turn, so that a large request does not delay small ones."""

    def __init__(self) -> None:
        self.size = 0  # in samples
        self._requests: collections.deque[collections.deque[Pending]] = collections.deque()
        self._closed = False
        self._changed = threading.Condition()

    def put(self, groups: Iterable[Pending]) -> None:
        """Append the groups of one request."""
        with self._changed:
            waiting = collections.deque(groups)
            if waiting:
                self._requests.append(waiting)
                self.size += sum(len(group) for group, _ in waiting)
                self._changed.notify_all()

    def get(self) -> Pending | None:
        """Wait for a group and return it with its callback; return None once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._requests or self._closed)
            if self._closed:
                return None
            waiting = self._requests.popleft()
            group = waiting.popleft()
            if waiting:
                self._requests.append(waiting)
            self.size -= len(group[0])
            return group

    def close(self) -> None:
        """Close the queue; groups that are still waiting are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class WorkerPool:
    """A fixed number of workers for one function."""

    def __init__(
        self,
        call: FunctionCall,
        *,
        num_workers: int,
        memory_mib: int = MEMORY_MIB,
        start_limit_s: float = START_LIMIT_S,
        counted: Callable[[Mapping[str, float]], None] = lambda counts: None,
    ) -> None:
        """Start the workers and return when each has imported the function.

        Args:
            memory_mib: memory limit of a worker.
            start_limit_s: time limit for a worker's start, imports included.
            counted: receives what the function counted while it scored a group, before the group's outcomes are
                reported, from a thread of the pool.

        Raises:
            FunctionError: the function cannot be imported or refuses its options; no process is left running.
        """
        self._counted = counted
        self._closed = threading.Event()
        self._start = functools.partial(
            Worker, call, lambda: not self._closed.is_set(), start_limit_s=start_limit_s, memory_mib=memory_mib
        )
        self._groups = FairQueue()
        self._started: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"worker-{i}", daemon=True) for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()
        for error in [self._started.get() for _ in self._threads]:
            if error is not None:
                self.close()
                raise error

    @property
    def num_waiting(self) -> int:
        """Number of samples that no worker has started to score."""
        return self._groups.size

    def submit(self, groups: Iterable[Pending]) -> None:
        """Queue the groups of one request, to be scored in turn with those of other requests.

        Each group comes with a callback, which is called once with the outcomes, from a thread of the pool. It is not
        called for groups that are dropped because the pool closes.
        """
        self._groups.put(groups)

    def close(self) -> None:
        """Kill all workers immediately; unfinished groups are dropped."""
        self._closed.set()
        self._groups.close()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        """Run one worker, in its thread. If it is not ready when a group arrives, start another."""
        try:
            worker = self._start()
        except Exception as error:  # thread edge: the constructor raises it
            self._started.put(error)
            return
        self._started.put(None)
        try:
            while (item := self._groups.get()) is not None:
                group, done = item
                try:
                    if not worker.is_ready():
                        worker.kill()
                        worker = self._start()
                    outcomes, counts = worker.run(group)
                    if counts:
                        self._counted(counts)
                except PoolClosed:
                    return
                except Exception as error:  # thread edge: if the thread died, its group would have no outcome
                    outcomes = [ScoreOutcome(error=str(error) or type(error).__name__)] * len(group)
                try:
                    done(outcomes)
                except Exception:  # thread edge: if the thread died, the pool would have one worker less
                    traceback.print_exc()
        finally:
            worker.kill()
