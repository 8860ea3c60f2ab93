"""Environments on one event loop: worker processes, each of which holds many instances of a class."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_triton.config.environment import EnvironmentSection
from rlhf_triton.errors import FunctionError, RlhfError
from rlhf_triton.user_code import KEY_OPTION
from rlhf_triton.workers.pool import START_LIMIT_S, Worker, Workers

AGENT = "rlhf_triton.actor.environments.agent:AgentRun"
SEED = "seed"  # column that environments receive, equal for all responses to a prompt


class EnvironmentFailed(RlhfError):
    """A call of an environment has failed; the message names the environment, the call and the cause.

    `is_lost`: the environment's worker died, or the call raised EnvironmentLost, as the OpenEnv client does. Other
    exceptions may result from the policy's action, such as opening a missing file; a retry would hide that failure.
    `is_misused`: the environment broke its contract, e.g. with a return value of the wrong type, or has a defect.
    """

    is_lost = False
    is_misused = False


@dataclass(frozen=True)
class StepResult:
    """An environment's reply to an action."""

    observation: str
    reward: float | None
    """None if the step has no reward."""
    done: bool


class Environments:
    """Starts the workers and opens instances of the environment. All methods must be called on one event loop."""

    tools: list[dict[str, Any]] | None = None
    """After `start`: JSON schemas of the tools; None for a class with `step`."""

    def __init__(self, settings: EnvironmentSection, *, hidden_variables: Sequence[str] = ()) -> None:
        self.name = settings.class_ or settings.agent
        self.limit_s = settings.timeout_s
        self._kind = "class" if settings.class_ else "agent"
        agent_options = {} if settings.class_ else {"run": settings.agent}
        self._workers = Workers(
            "rlhf_triton.actor.environments.worker",
            settings.class_ or AGENT,
            {"options": {**settings.options, **agent_options}, "reward": settings.reward, "timeout_s": self.limit_s},
            number=settings.workers,
            others=filter(None, (settings.agent, settings.reward)),
            hidden_variables=hidden_variables,
            own_variable=settings.options.get(KEY_OPTION),
        )
        self._numbers = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the workers and import the class in each.

        Raises:
            FunctionError: the class cannot be imported, refuses its options or does not fit the contract; no process
                is left running.
        """
        try:
            worker = await self._workers.least_loaded()
            answer = await worker.ask(_message("describe", next(self._numbers)), START_LIMIT_S)
            if "error" in answer:
                raise FunctionError(answer["error"])
        except BaseException as error:
            await self.close()
            if isinstance(error, FunctionError):
                raise FunctionError(f"environment.{self._kind} {self.name}: {error}") from error
            raise
        self.tools = answer["tools"]

    async def open(self, row: Mapping[str, Any]) -> "Instance":
        """Create an instance, reset it with `row`, a prompt's columns, and return it. Raises EnvironmentFailed."""
        try:
            worker = await self._workers.least_loaded()
        except FunctionError as error:
            raise EnvironmentFailed(f"environment.{self._kind} {self.name}: {error}") from error
        instance = Instance(self, worker, next(self._numbers))
        try:
            instance.observation = (await instance.ask("reset", "reset", row=row))["observation"]
        except BaseException:
            closing = asyncio.create_task(instance.close())  # in the background, as `reset` may hang
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            raise
        return instance

    async def close(self) -> None:
        """Kill all workers."""
        await self._workers.close()
        if self._closing:
            await asyncio.wait(self._closing)


def _message(op: str, instance: int, **arguments: Any) -> dict[str, Any]:
    return {"op": op, "instance": instance, "arguments": arguments}


class Instance:
    """One instance of the environment, for one conversation."""

    observation: str | None = None
    """The first observation, from `reset`; None if it adds nothing to the prompt."""

    def __init__(self, environments: Environments, worker: Worker, number: int) -> None:
        self._worker = worker
        self._number = number
        self._environments = environments
        worker.load += 1

    async def ask(
        self, call: str, op: str, clock: Callable[[], float] | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Call operation `op` and return its answer; errors name the call `call`. Raises EnvironmentFailed."""
        message = _message(op, self._number, **arguments)
        limit_s = self._environments.limit_s
        answer = await self._worker.ask(message, limit_s, clock, limit_key="environment.timeout_s")
        if "error" in answer:
            failure = EnvironmentFailed(f"{self._environments.name}: {call}: {answer['error']}")
            failure.is_lost = answer.get("lost", False)
            failure.is_misused = answer.get("is_misused", False)
            raise failure
        return answer

    async def step(self, action: str, clock: Callable[[], float] | None = None) -> StepResult:
        """Take one step with `action`; `clock` measures the time limit of the call. Raises EnvironmentFailed."""
        answer = await self.ask("step", "step", clock, action=action)
        return StepResult(answer["observation"], answer["reward"], answer["done"])

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a tool's result as text, or "error: …" for the model if the tool raises or is called wrongly.

        Raises EnvironmentFailed if the worker dies or the call takes too long.
        """
        return (await self.ask(f"tool {name}", "call", name=name, arguments=arguments))["text"]

    async def reward(self) -> float | None:
        """Return the sum of the class's `get_reward` and `environment.reward`; None if there is neither.

        Raises EnvironmentFailed.
        """
        return (await self.ask("get_reward", "reward"))["reward"]

    async def close(self) -> None:
        """Call the `close` of the class, if it has one, ignoring failures, and forget the instance."""
        try:
            with contextlib.suppress(EnvironmentFailed):
                await self.ask("close", "close")
        finally:
            self._worker.load -= 1
