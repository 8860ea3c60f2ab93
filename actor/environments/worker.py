"""Worker process of environments: `python -m rlhf_triton.actor.environments.worker SPEC FD`.

Holds many instances of the class SPEC, each in a thread of its own, so that a slow one delays no other and a library
that is bound to a thread works; coroutine methods run on the one event loop. Receives settings over the socket `FD`,
then calls of instances by number. Each is answered when it ends, with `{"error": …}` or the operation's result.
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

from rlhf_triton.errors import FunctionError
from rlhf_triton.rewards.function import BadScore, checked, configured, describe, group_scores, import_function
from rlhf_triton.workers.child import Parent, frame, read_frame

NO_TOOLS = ("reset", "get_reward", "close")  # public methods that the model cannot call
MAX_CHARACTERS = 20_000  # of an observation or a tool's result
SURROGATE = re.compile("[\ud800-\udfff]")


class BadEnvironment(BadScore):
    """A class, what it returns, or what it raises (the `__cause__`) does not fit the contract."""


class HostedEnvironment:
    """One instance of the user's class, and its thread. The operations raise BadEnvironment; one runs at a time."""

    def __init__(self, parent: Parent, made: Callable[..., Any], score: Callable[..., Any] | None) -> None:
        self.lock = asyncio.Lock()
        self._parent, self._settings, self._made, self._score = parent, parent.settings, made, score
        self._thread = ThreadPoolExecutor(1)
        self._target: Any = None
        self._tools: dict[str, Callable[..., Any]] | None = None
        self._row: dict[str, Any] = {}

    async def describe(self) -> dict[str, Any]:
        """Return the JSON schemas of the tools; None for a class with `step`. Closes the instance."""
        await self._call(self._construct)
        schemas = None
        if self._tools is not None:
            from transformers.utils import get_json_schema  # slow, and only some environments need it

            schemas = [get_json_schema(tool) for tool in self._tools.values()]
        await self.close()
        return {"tools": schemas}

    async def reset(self, row: dict[str, Any]) -> dict[str, Any]:
        """Make the instance and return its first observation, which may be None."""
        self._row = row
        await self._call(self._construct)
        observation = await self._call(self._reset)
        return {"observation": None if observation is None else self._text(observation, "the observation")}

    async def step(self, action: str) -> dict[str, Any]:
        """Return observation, reward and whether the episode has ended."""
        result = await self._call(self._target.step, action)
        if not isinstance(result, tuple) or len(result) not in (3, 5):
            raise BadEnvironment(f"returned {result!r:.80}; return a tuple (observation, reward, done)")
        observation, reward, *ends = result[:4]  # of Gymnasium's five: terminated and truncated, without info
        if not all(isinstance(end, bool) or getattr(end, "dtype", None) == "bool" for end in ends):
            raise BadEnvironment(f"done is {ends[0]!r:.80}; return True or False")
        text = self._text(observation, "the observation")
        return {"observation": text, "reward": _reward(reward), "done": any(map(bool, ends))}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return a tool's result as text for the model; an error in the call is also returned as text."""
        tools = self._tools or {}
        try:
            if name not in tools:
                raise BadEnvironment(f"there is no tool {name}; the tools: {', '.join(tools) or 'none'}")
            if not isinstance(arguments, dict):
                raise BadEnvironment(f"the arguments are {arguments!r:.80}; write an object with a value for each name")
            result = await self._call(tools[name], **arguments)
            return {"text": self._text(await self._call(str, result), "the result")}
        except BadEnvironment as error:
            cause = error.__cause__ or error  # without the place in the code, which is not for the model
            text = f"error: {describe(cause.with_traceback(None))}"
            return {"text": text.encode(errors="backslashreplace").decode()}

    async def reward(self) -> dict[str, Any]:
        """Return the sum of `get_reward` and the reward function; None where there is neither, or both return None."""
        rewards = []
        if callable(getattr(self._target, "get_reward", None)):
            rewards.append(_reward(await self._call(self._target.get_reward)))
        if self._score is not None:
            columns = {**{name: [value] for name, value in self._row.items()}, "environments": [self._target]}
            scores = await self._call(self._score, **_accepted(self._score, columns))
            rewards.append(_reward(group_scores(scores, 1)[0]))
        known = [reward for reward in rewards if reward is not None]
        return {"reward": sum(known) if known else None}

    async def close(self) -> dict[str, Any]:
        """Call the instance's `close`, if it has one, and end its thread."""
        try:
            if callable(close := getattr(self._target, "close", None)):
                await self._call(close)
        finally:
            self._thread.shutdown(wait=False)
        return {}

    async def _call(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        """Call user code in the instance's thread, and await what it returns on the loop. Raises BadEnvironment."""

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
            raise BadEnvironment(describe(error)) from error
        finally:
            self._parent.end_forks()

    def _construct(self) -> None:
        """Make the instance, and find its tools as TRL does; a class that has `step` with a parameter has none."""
        settings = self._settings
        self._target = configured(self._parent.spec, self._made, dict(settings["options"]), settings["timeout_s"])
        if not callable(getattr(self._target, "reset", None)):
            raise BadEnvironment("it has no method reset, which begins an episode")
        step = getattr(self._target, "step", None)
        if not callable(step) or not inspect.signature(step).parameters:
            found = inspect.getmembers(self._target, inspect.ismethod)
            self._tools = {name: tool for name, tool in found if name not in NO_TOOLS and not name.startswith("_")}

    def _reset(self) -> Any:
        """Call `reset` with the row as one argument, or with its columns as keyword arguments, as TRL does."""
        reset = self._target.reset
        parameters = inspect.signature(reset).parameters
        needed = [each for each in parameters.values() if each.default is each.empty and each.kind != each.VAR_KEYWORD]
        takes_one = self._tools is None and len(parameters) == len(needed) == 1
        return reset(self._row) if takes_one or "row" in parameters else reset(**_accepted(reset, self._row))

    def _text(self, value: Any, what: str) -> str:
        if not isinstance(value, str):
            raise BadEnvironment(f"{what} is {value!r:.80}; return a str")
        if len(value) > MAX_CHARACTERS:
            raise BadEnvironment(f"{what} has {len(value)} characters, must have at most {MAX_CHARACTERS}")
        if SURROGATE.search(value):
            raise BadEnvironment(f"{what} has a lone surrogate, which UTF-8 cannot express; decode with errors=replace")
        return value


def _accepted(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `values` that the function takes as keyword arguments."""
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in values.items() if takes_all or name in parameters}


def _reward(value: Any) -> float | None:
    try:
        return None if value is None else checked(value)
    except (BadScore, ArithmeticError) as error:
        raise BadEnvironment(f"the reward is {value!r:.80}; return a finite number or None") from error


async def serve(parent: Parent, host: Callable[[], HostedEnvironment]) -> None:
    """Answer calls until the socket is closed."""
    reader, writer = await asyncio.open_connection(sock=parent.channel)
    instances = collections.defaultdict[int, HostedEnvironment](host)
    tasks = set()

    async def answer(message: dict[str, Any]) -> None:
        hosted = instances[message["instance"]]
        try:
            async with hosted.lock:
                result = await getattr(hosted, message["op"])(**message["arguments"])
        except Exception as error:  # process edge: every call must get an answer
            own = error.__cause__  # of the user's code
            result = {
                "error": describe(error),
                "lost": isinstance(own, ConnectionError),
                "is_misused": own is None or isinstance(own, BadScore),
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
    """Host environments until the parent ends; return 1 if the class cannot be used."""
    parent = Parent(argv)
    settings = parent.settings
    threading.stack_size(2 << 20)  # 8 MiB by default, which count towards the worker's memory limit
    try:
        made = import_function(parent.spec)
        score = settings["reward"] and import_function(settings["reward"])
    except FunctionError as error:
        parent.reply(settings, {"refused": str(error)})
        return 1
    parent.reply(settings, {"ready": True})
    asyncio.run(serve(parent, lambda: HostedEnvironment(parent, made, score)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
