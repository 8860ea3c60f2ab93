"""Environments of agents, used on one event loop: worker processes that hold the instances of a class.

A call that takes too long fails its instance. The worker that holds it is retired, since a thread cannot be killed: it
takes no new instances, and is killed once its other instances are closed. A worker that dies fails all that it holds.
In both cases the next `open` starts another one.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_triton.actor.environments.worker import read_frame
from rlhf_triton.config.environment import EnvironmentSection
from rlhf_triton.errors import RlhfError
from rlhf_triton.python_backend.workers.child import frame
from rlhf_triton.python_backend.workers.process import START_LIMIT_S, WorkerProcess, inherited_environment
from rlhf_triton.rewards.function import KEY_OPTION, FunctionError

SHORTEST_WAIT_S = 0.05  # for an answer, if `clock` does not advance meanwhile
OPENENV, AGENT = "rlhf_triton.actor.environments.openenv:OpenEnv", "rlhf_triton.actor.environments.agent:AgentRun"
SEED = "seed"  # column that environments receive, equal for all responses to a prompt


class EnvironmentFailed(RlhfError):
    """A call of an environment has failed; the message names the environment, what was called, and the cause.

    `is_lost`: not by itself, but because its worker has died, or with a ConnectionError, as when its server hangs up.
    Other OSErrors may be the policy's doing, such as a file that is not there: tried again, they would never count.
    `is_misused`: it has returned what no environment may.
    """

    is_lost = False
    is_misused = False


@dataclass(frozen=True)
class StepResult:
    """What an environment returns for one action."""

    observation: str
    reward: float | None
    """None if the step has none."""
    done: bool


class EnvironmentWorker:
    """One worker process, the instances that it holds, and the calls that wait for its answers."""

    def __init__(self, process: WorkerProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.instances: set[int] = set()
        self.takes_instances = False  # once it has imported the class, until it is retired
        self._process, self._reader, self._writer = process, reader, writer
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._obituary: str | None = None
        self._reading = asyncio.create_task(self._read())

    def is_usable(self) -> bool:
        """Return whether it can take another instance."""
        return self.takes_instances and self._obituary is None and self._process.is_alive()

    async def ask(
        self, message: dict[str, Any], limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> dict[str, Any]:
        """Send a message and return its answer: with `error` if the process ends, also with `hung` after `limit_s`.

        `clock`: returns the time in seconds; it need not advance all the time.
        """
        if self._obituary is not None:
            return {"error": self._obituary, "lost": True}
        number = next(self._numbers)
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(frame({**message, "number": number}))
            end = clock() + limit_s
            while not future.done() and (left := end - clock()) > 0:
                await asyncio.wait([future], timeout=max(left, SHORTEST_WAIT_S))
        finally:
            del self._pending[number]
        return future.result() if future.done() else {"error": f"took longer than {limit_s:g} s", "hung": True}

    async def kill(self) -> None:
        """Kill the process and everything it started, and wait until it has ended."""
        self._writer.transport.abort()
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        """Deliver answers until the socket is closed, or the data is invalid; then end the process."""
        with contextlib.suppress(Exception):  # user code can write to the socket: whatever it sends ends the worker
            while True:
                answer = await read_frame(self._reader)
                if answer["number"] in self._pending:  # otherwise its caller has given up
                    self._pending[answer["number"]].set_result(answer)
        self._writer.transport.abort()
        self._obituary = await asyncio.to_thread(self._process.obituary)
        for future in self._pending.values():
            if not future.done():
                future.set_result({"error": self._obituary, "lost": True})
        await asyncio.to_thread(self._process.kill)


class Environments:
    """Starts the workers and opens instances of the environment. All methods must be called on one event loop."""

    tools: list[dict[str, Any]] | None = None
    """After `start`: JSON schemas of the tools; None for a class with `step`."""

    def __init__(self, settings: EnvironmentSection, *, hidden_variables: Sequence[str] = ()) -> None:
        self._settings, self._hidden = settings, hidden_variables
        self._name = settings.class_ or settings.url or settings.agent
        self._kind = "class" if settings.class_ else "url" if settings.url else "agent"
        self._more = {"class": {}, "url": {"url": settings.url}, "agent": {"run": settings.agent}}[self._kind]
        self._limit_s = settings.step_timeout_s if settings.agent is None else settings.timeout_s
        self._workers: list[EnvironmentWorker] = []  # those that have ended, too
        self._starting = asyncio.Lock()
        self._is_closed = False
        self._numbers = itertools.count()
        self._background: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the workers and import the class in each.

        Raises:
            FunctionError: the class cannot be imported, refuses its options or does not fit the contract; no process
                is left running.
        """
        try:
            await self._least_loaded()
        except BaseException:
            await self.close()
            raise

    async def open(self, row: Mapping[str, Any]) -> "Instance":
        """Make an instance and reset it with `row`, a prompt's columns. Raises EnvironmentFailed."""
        try:
            worker = await self._least_loaded()
        except FunctionError as error:
            raise EnvironmentFailed(str(error)) from error
        instance = Instance(self, worker, next(self._numbers))
        try:
            instance.observation = (await self.ask(instance, "reset", "reset", row=row))["observation"]
        except BaseException:
            self._in_background(instance.close())  # not awaited, since `reset` may hang if this was cancelled
            raise
        return instance

    async def close(self) -> None:
        """Kill all workers."""
        self._is_closed = True
        for worker in self._workers:
            self._in_background(worker.kill())
        while self._background:
            await asyncio.wait(self._background)

    async def ask(
        self, instance: "Instance", what: str, op: str, clock: Callable[[], float] = time.monotonic, **arguments: Any
    ) -> dict[str, Any]:
        """Return the answer to a call of an instance, named `what` in errors. Raises EnvironmentFailed."""
        answer: dict[str, Any] = {"error": "the instance is closed, or an earlier call of it took too long"}
        if instance.number in instance.worker.instances:
            message = {"op": op, "instance": instance.number, "arguments": arguments}
            answer = await instance.worker.ask(message, self._limit_s, clock)
        if "hung" in answer:
            instance.worker.takes_instances = False
            self.release(instance)
        if "error" in answer:
            failure = EnvironmentFailed(f"{self._name}: {what}: {answer['error']}")
            failure.is_lost = answer.get("lost", False)
            failure.is_misused = answer.get("is_misused", False)
            raise failure
        return answer

    def release(self, instance: "Instance") -> None:
        """Forget an instance; kill its worker if that is retired and holds no other."""
        worker = instance.worker
        worker.instances.discard(instance.number)
        if not worker.takes_instances and not worker.instances:
            self._in_background(worker.kill())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _least_loaded(self) -> EnvironmentWorker:
        """Start missing workers, then return the one with the fewest instances."""
        async with self._starting:
            missing = self._settings.workers - sum(worker.is_usable() for worker in self._workers)
            await asyncio.gather(*(self._start_worker() for _ in range(missing)))
            usable = [worker for worker in self._workers if worker.is_usable()]
        # If they have died since, the last one is chosen, which says how.
        return min(usable or self._workers[-1:], key=lambda worker: len(worker.instances))

    async def _start_worker(self) -> None:
        if self._is_closed:
            raise FunctionError(f"environment {self._name}: its workers have been killed")
        settings = self._settings
        process = WorkerProcess(
            "rlhf_triton.actor.environments.worker",
            settings.class_ or (OPENENV if settings.url else AGENT),
            memory_mib=settings.memory_mib,
            environment=inherited_environment(self._hidden, settings.options.get(KEY_OPTION)),
        )
        worker = EnvironmentWorker(process, *await asyncio.open_connection(sock=process.channel))
        self._workers.append(worker)
        message = {
            "options": {**settings.options, **self._more},
            "reward": settings.reward,
            "timeout_s": self._limit_s,
            "max_chars": settings.max_observation_chars,
            "describe": worker is self._workers[0],
        }
        try:
            answer = await worker.ask(message, START_LIMIT_S)
            worker.takes_instances = "error" not in answer
        finally:
            if not worker.takes_instances:  # also if this was cancelled
                self._in_background(worker.kill())
        if "error" in answer:
            raise FunctionError(f"environment.{self._kind} {self._name}: {answer['error']}")
        if "tools" in answer:
            self.tools = answer["tools"]


class Instance:
    """One instance of the environment, for one trajectory."""

    observation: str | None = None
    """What `reset` has returned; None if the prompt stands as it is."""

    def __init__(self, environments: Environments, worker: EnvironmentWorker, number: int) -> None:
        self.worker, self.number, self._environments = worker, number, environments
        worker.instances.add(number)

    async def step(self, action: str, clock: Callable[[], float] = time.monotonic) -> StepResult:
        """Act, within a limit that `clock` counts. Raises EnvironmentFailed."""
        answer = await self._environments.ask(self, "step", "step", clock, action=action)
        return StepResult(answer["observation"], answer["reward"], answer["done"])

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a tool's result as text, or "error: …" for the model if it raises or is called wrongly.

        Raises EnvironmentFailed if the worker dies or the call takes too long.
        """
        answer = await self._environments.ask(self, f"tool {name}", "call", name=name, arguments=arguments)
        return answer["text"]

    async def reward(self) -> float | None:
        """Return the sum of `get_reward` of the class and `environment.reward`; None if it has neither.

        Raises EnvironmentFailed.
        """
        answer = await self._environments.ask(self, "get_reward", "reward")
        return answer["reward"]

    async def close(self) -> None:
        """Call the `close` of the class, if it has one, and forget the instance. Failures of it are ignored."""
        try:
            with contextlib.suppress(EnvironmentFailed):
                await self._environments.ask(self, "close", "close")
        finally:
            self._environments.release(self)
