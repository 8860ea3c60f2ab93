"""Worker process of environments: `python -m rlhf_triton.actor.environments.worker SPEC FD`.

Holds many instances of the class SPEC. Each has its own thread, so that a slow instance delays no other and
thread-bound libraries work; coroutine methods run on the single event loop. The worker receives settings over the
socket `FD`, then calls of instances by number. It answers each call with the result or `{"error": …}`.
"""

import asyncio
import collections
import contextlib
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlhf_triton.environment import EnvironmentLost
from rlhf_triton.errors import BadScore, FunctionError
from rlhf_triton.rewards.function import configured
from rlhf_triton.rewards.scores import checked, group_scores
from rlhf_triton.user_code import UserFunction, describe, import_function
from rlhf_triton.workers.child import Parent, WorkerMessage, frame, read_frame

NO_TOOLS = ("reset", "get_reward", "close")  # public methods that are not tools
MAX_CHARACTERS = 20_000  # limit of an observation or a tool's result
SURROGATE = re.compile("[\ud800-\udfff]")


class HostedEnvironment:
    """One instance of the user's class, and its thread. Operations raise BadScore; only one may run at a time."""

    def __init__(self, parent: Parent, environment_class: UserFunction, score: UserFunction | None) -> None:
        self.lock = asyncio.Lock()
        self._parent = parent
        self._settings = parent.settings
        self._class = environment_class
        self._score = score
        self._thread = ThreadPoolExecutor(1)
        self._target: Any = None
        self._tools: dict[str, UserFunction] | None = None
        self.row: dict[str, Any] = {}

    async def describe(self) -> WorkerMessage:
        """Return {"tools": JSON schemas}, None for a class with `step`; close the instance."""
        await self._call(self._construct)
        schemas = None
        if self._tools is not None:
            from transformers.utils import get_json_schema  # slow, and only some environments need it

            schemas = [get_json_schema(tool) for tool in self._tools.values()]
        await self.close()
        return {"tools": schemas}

    async def reset(self, row: dict[str, Any]) -> WorkerMessage:
        """Create the instance and return its first observation, which may be None."""
        self.row = row
        await self._call(self._construct)
        observation = await self._call(self._reset)
        if isinstance(observation, tuple) and len(observation) == 2:
            observation, _ = observation  # Gymnasium's observation and info
        return {"observation": None if observation is None else self._text(observation, "the observation")}

    async def step(self, action: str) -> WorkerMessage:
        """Return observation, reward and whether the episode has ended."""
        result = await self._call(self._target.step, action)
        if not isinstance(result, tuple) or len(result) not in (3, 5):
            raise BadScore(f"returned {result!r:.80}; return a tuple (observation, reward, done)")
        observation, reward, *ends = result[:4]  # `ends`: done, or Gymnasium's terminated and truncated
        if not all(isinstance(end, bool) or getattr(end, "dtype", None) == "bool" for end in ends):
            raise BadScore(f"done is {ends[0]!r:.80}; return True or False")
        text = self._text(observation, "the observation")
        return {"observation": text, "reward": _reward(reward), "done": any(map(bool, ends))}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> WorkerMessage:
        """Return a tool's result as text for the model; an error in the call is also returned as text."""
        tools = self._tools or {}
        try:
            if name not in tools:
                raise BadScore(f"there is no tool {name}; the tools: {', '.join(tools) or 'none'}")
            if not isinstance(arguments, dict):
                raise BadScore(f"the arguments are {arguments!r:.80}; write an object with a value for each name")
            result = await self._call(tools[name], **arguments)
            return {"text": self._text(await self._call(str, result), "the result")}
        except BadScore as error:
            if isinstance(error.__cause__, EnvironmentLost):
                raise
            cause = error.__cause__ or error  # without the traceback, which the model should not see
            text = f"error: {describe(cause.with_traceback(None))}"
            return {"text": text.encode(errors="backslashreplace").decode()}

    async def reward(self) -> WorkerMessage:
        """Return the sum of `get_reward` and the reward function; None if neither exists or both return None."""
        rewards = []
        if callable(getattr(self._target, "get_reward", None)):
            rewards.append(_reward(await self._call(self._target.get_reward)))
        if self._score is not None:
            columns = {**{name: [value] for name, value in self.row.items()}, "environments": [self._target]}
            scores = await self._call(self._score, **_accepted(self._score, columns))
            rewards.append(_reward(group_scores(scores, 1)[0]))
        present = [reward for reward in rewards if reward is not None]
        return {"reward": sum(present) if present else None}

    async def close(self) -> WorkerMessage:
        """Call the instance's `close`, if it has one, and end its thread."""
        try:
            if callable(close := getattr(self._target, "close", None)):
                await self._call(close)
        finally:
            self._thread.shutdown(wait=False)
        return {}

    async def _call(self, function: UserFunction, /, *arguments: Any, **keywords: Any) -> Any:
        """Call user code in the instance's thread, and await the result on the loop if needed. Raises BadScore."""

        def in_thread() -> Any:
            with self._user_code():
                return function(*arguments, **keywords)

        value = await asyncio.get_running_loop().run_in_executor(self._thread, in_thread)
        if inspect.isawaitable(value):
            with self._user_code():
                return await value
        return value

    @contextlib.contextmanager
    def _user_code(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # process edge: anything that user code raises fails this call only
            raise BadScore(describe(error)) from error
        finally:
            self._parent.end_forks()

    def _construct(self) -> None:
        """Create the instance, and find its tools as TRL does; a class whose `step` has a parameter has no tools."""
        settings = self._settings
        self._target = configured(self._parent.spec, self._class, dict(settings["options"]), settings["timeout_s"])
        if not callable(getattr(self._target, "reset", None)):
            raise BadScore("the class has no method reset, which starts an episode")
        step = getattr(self._target, "step", None)
        if not callable(step) or not inspect.signature(step).parameters:
            methods = inspect.getmembers(self._target, inspect.ismethod)
            self._tools = {name: tool for name, tool in methods if name not in NO_TOOLS and not name.startswith("_")}

    def _reset(self) -> Any:
        """Call `reset` with the row as one argument, or with its columns as keyword arguments, as TRL does."""
        reset = self._target.reset
        parameters = inspect.signature(reset).parameters
        needed = [
            parameter
            for parameter in parameters.values()
            if parameter.default is parameter.empty and parameter.kind != parameter.VAR_KEYWORD
        ]
        takes_one = self._tools is None and len(parameters) == len(needed) == 1
        return reset(self.row) if takes_one or "row" in parameters else reset(**_accepted(reset, self.row))

    def _text(self, value: Any, source: str) -> str:
        if not isinstance(value, str):
            raise BadScore(f"{source} is {value!r:.80}; return a str")
        if len(value) > MAX_CHARACTERS:
            raise BadScore(f"{source} has {len(value)} characters, must have at most {MAX_CHARACTERS}")
        if SURROGATE.search(value):
            raise BadScore(f"{source} has a lone surrogate, which UTF-8 cannot express; decode with errors=replace")
        return value


def _accepted(function: UserFunction, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `values` that the function accepts as keyword arguments."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in values.items() if takes_all or name in parameters}


def _reward(value: Any) -> float | None:
    try:
        return None if value is None else checked(value)
    except (BadScore, ArithmeticError) as error:
        raise BadScore(f"the reward is {value!r:.80}; return a finite number or None") from error


def _is_defect(error: BaseException, inputs: str) -> bool:
    """Return whether user code would fail for every policy, not only for the row and the action in `inputs`."""
    if isinstance(error, KeyError):  # such as a missing column; a command of the policy is in its action
        return str(next(iter(error.args), "")) not in inputs
    if isinstance(error, AttributeError):  # `re.match` gives None for an action that does not match
        return error.obj is not None
    return isinstance(error, (BadScore, NameError, ImportError))


async def serve(parent: Parent, host: Callable[[], HostedEnvironment]) -> None:
    """Message calls until the socket is closed."""
    reader, writer = await asyncio.open_connection(sock=parent.channel)
    instances = collections.defaultdict[int, HostedEnvironment](host)
    tasks = set()

    async def answer(message: WorkerMessage) -> None:
        hosted = instances[message["instance"]]
        try:
            async with hosted.lock:
                result = await getattr(hosted, message["op"])(**message["arguments"])
        except Exception as error:  # process edge: every call must get an answer
            cause = error.__cause__  # the error of the user's code
            result = {
                "error": describe(error),
                "lost": isinstance(cause, EnvironmentLost),
                "is_misused": cause is None or _is_defect(cause, f"{hosted.row} {message['arguments']}"),
            }
        if message["op"] in ("close", "describe"):
            del instances[message["instance"]]
        writer.write(frame({"number": message["number"], **result}))

    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            task = asyncio.create_task(answer(await read_frame(reader)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


def main(argv: list[str]) -> int:
    """Host environments until the parent ends; return the exit code, 1 if the class cannot be used."""
    parent = Parent(argv)
    settings = parent.settings
    threading.stack_size(2 << 20)  # 8 MiB by default, which count towards the worker's memory limit
    try:
        environment_class = import_function(parent.spec)
        score = settings["reward"] and import_function(settings["reward"])
    except FunctionError as error:
        parent.reply(settings, {"refused": str(error)})
        return 1
    parent.reply(settings, {"ready": True})
    asyncio.run(serve(parent, lambda: HostedEnvironment(parent, environment_class, score)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
