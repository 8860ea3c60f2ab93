"""Reward functions: their arguments, how they are imported and configured, and which return values are valid.

Imports only the standard library, so that worker processes start fast.
"""

import collections
import functools
import importlib
import importlib.util
import inspect
import math
import re
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_triton.errors import FunctionError, RlhfError

NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_counts: dict[str, float] = collections.defaultdict(float)
_lock = threading.Lock()  # a function may use its own threads


def count(name: str, amount: float = 1) -> None:
    """Add to the counter `name` of this function: `rlhf_reward_function_total{counter="name"}` in the metrics.

    The server receives the count with the result of the sample being scored. If a worker process is killed while it
    scores a sample, that sample's counts are lost.

    Raises ValueError if `name` is not 1 to 40 characters of a-z, 0-9 and _, or `amount` is negative or not finite.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r}: a counter's name has 1 to 40 characters from a-z, 0-9 and _")
    if not (math.isfinite(amount) and amount >= 0):
        raise ValueError(f"counter {name}: {amount}, must be finite and at least 0")
    with _lock:
        _counts[name] += amount


def take_counts() -> dict[str, float]:
    """Return the counts since the last call."""
    with _lock:
        counts = dict(_counts)
        _counts.clear()
    return counts


PROMPT_KEY = "prompt"  # reserved metadata keys: the actor stores prompt (or a chat's messages) and response there
RESPONSE_KEY = "response"
MESSAGES_KEY = "messages"
REPLY_KEY = "reply_messages"  # the reply with all its keys; with an environment, all messages after the prompt
FILE_SPEC = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")
MODULE_SPEC = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)")
MAX_ERROR_CHARACTERS = 500  # longer messages are truncated before they are sent
COMPLETIONS = "completions"  # parameter by which a function with TRL's signature is recognised
TRL_ARGUMENTS = ("prompts", COMPLETIONS)
# Arguments that TRL's trainer passes but this project cannot: the server does not know the response's tokens.
OF_THE_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments", "completion_ids")
TIMEOUT_OPTION = "timeout_s"  # parameter through which a class receives the time limit of its calls
KEY_OPTION = "api_key_env"  # option of a judge, and of any function that needs a key: the key's environment variable
NOT_APPLICABLE = object()  # score of a sample to which the function does not apply
UserFunction = Callable[..., Any]
ScoreFunction = Callable[[Any], Any]  # receives a `Sample`; a groupwise function receives a list of samples


class BadScore(RlhfError, ValueError):
    """A user's function or environment returned an invalid value."""


@dataclass(frozen=True)
class Sample:
    """One response to score."""

    text: str
    """Prompt and response as one text; for a chat prompt only the response."""
    tokens: list[int] | None = field(default_factory=list)
    """Token ids as sent; for a sentence, ids from the reward's tokenizer without added special tokens, at most 32768.

    None if the server has no tokenizer, which is possible if another trainer sends texts to functions only.
    """
    metadata: dict[str, Any] = field(default_factory=dict)
    """Columns of the prompt's row. The actor adds `response`, and `prompt` or (chats) `messages`.

    `reply_messages` contains a chat's messages from the first reply on, if there is an environment, or the reply's
    message, if it has more than content.
    """

    @property
    def prompt(self) -> str | None:
        """Text of the prompt, or content of a chat's last message; None if the caller did not send it."""
        messages = self.metadata.get(MESSAGES_KEY)
        if not isinstance(messages, list):
            return self.metadata.get(PROMPT_KEY)
        return (messages[-1].get("content") or "") if messages else ""

    @property
    def response(self) -> str | None:
        """Text of the response; None if the caller did not send it."""
        return self.metadata.get(RESPONSE_KEY)


def reply_start(messages: list[Any]) -> int:
    """Return the index of the first message of a chat's last reply; the number of messages if there is no reply."""
    end = len(messages)
    while end and isinstance(messages[end - 1], dict) and messages[end - 1].get("role") in ("assistant", "tool"):
        end -= 1
    return end


def split_reply(messages: list[Any], text: str, metadata: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any] | None]:
    """Return a chat's messages before its reply, and the reply's message or None.

    A client sends the reply as the row's text (an empty reply as `response` in the metadata) and other keys of its
    message, such as tool calls, in `reply_messages`. Alternatively, it sends the reply as the last of the messages,
    with no text or the same one.
    """
    response = metadata.get(RESPONSE_KEY)
    last = messages[-1] if messages and _has_role(messages[-1], "assistant") else None
    content = last and (last.get("content") or "")
    if last is not None and (text == content or (not text and response in (None, content))):
        return messages[:-1], last
    if not text and not isinstance(response, str):
        return messages, None
    text = text or str(response)
    sent = metadata.get(REPLY_KEY)
    replies = [message for message in sent if _has_role(message, "assistant")] if isinstance(sent, list) else []
    said = replies[-1] if replies else {}
    return messages, said if said and (said.get("content") or "") == text else {"role": "assistant", "content": text}


def _has_role(message: Any, role: str) -> bool:
    return isinstance(message, dict) and message.get("role") == role


def with_reply(messages: list[Any], text: str, metadata: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Convert a chat's text and metadata to the form that the actor sends, however the client sent the reply.

    The text is the reply's content, also under `response`; `messages` are the messages before it. If the reply's
    message has more than content, it is in `reply_messages`.
    """
    before, reply = split_reply(messages, text, metadata)
    if reply is None:
        return text, {**metadata, MESSAGES_KEY: before}
    content = str(reply.get("content") or "")
    has_more = REPLY_KEY not in metadata and reply.keys() - {"role", "content"}
    whole = {REPLY_KEY: [reply]} if has_more else {}
    return content, {**metadata, MESSAGES_KEY: before, RESPONSE_KEY: content, **whole}


def check_spec(spec: str) -> str:
    """Return `spec` unchanged. Raises ValueError unless it is `file.py:name` or `package.module:name`."""
    if not FILE_SPEC.fullmatch(spec) and not MODULE_SPEC.fullmatch(spec):
        raise ValueError(f"{spec!r} does not name a function; write path/to/file.py:name or package.module:name")
    return spec


def with_absolute_path(spec: str, place: Callable[[Path], Path]) -> str:
    """Replace the path of a file spec by `place(path)`; return a module spec unchanged."""
    match = FILE_SPEC.fullmatch(spec)
    return f"{place(Path(match['file']))}:{match['name']}" if match else spec


def load_function(
    spec: str,
    options: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = 0.0,
    columns: Collection[str] | None = None,
) -> ScoreFunction:
    """Import the function or class that `spec` names; return it as a function of one argument.

    A function receives `options` as keyword arguments of every call. A class is instantiated once with `options`, and
    the instance is called; its constructor's parameter `timeout_s`, if any, receives the time limit of a call. A
    function with TRL's signature is called as TRL calls it. Awaitable results are awaited.

    Raises FunctionError if any of this fails, an option is unknown or missing, or a function with TRL's signature needs
    an argument that is not in `columns` (None: any column may exist).
    """
    return _of_samples(spec, configured(spec, import_function(spec), dict(options or {}), timeout_s), columns)


def import_function(spec: str) -> UserFunction:
    """Return the function or class that `spec` names. Raises FunctionError if it cannot be imported for any reason."""
    check_spec(spec)
    source, _, name = spec.rpartition(":")
    try:
        module = _import_file(Path(source)) if FILE_SPEC.fullmatch(spec) else importlib.import_module(source)
    except KeyboardInterrupt:  # Ctrl-C during the import
        raise
    except BaseException as error:  # user code may even call sys.exit
        raise FunctionError(f"{spec} cannot be imported: {describe(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        what = (
            f"has no {name!r}" if function is None else f"defines {name!r} as {type(function).__name__}, not a function"
        )
        raise FunctionError(f"{spec} cannot be imported: {source} {what}")
    return function


def configured(spec: str, function: UserFunction, options: dict[str, Any], timeout_s: float) -> ScoreFunction:
    """Bind a function's options, or instantiate a class with them. Raises FunctionError as `load_function`."""
    is_class = isinstance(function, type)
    if not is_class and not options:
        return function  # whatever its signature
    try:
        signature = inspect.signature(function)
        if is_class:
            limit = {TIMEOUT_OPTION: timeout_s} if TIMEOUT_OPTION in signature.parameters else {}
            return function(**options, **limit)
        if COMPLETIONS in signature.parameters:  # its other arguments are columns
            signature.bind_partial(**options)
        else:
            signature.bind(None, **options)
        return functools.partial(function, **options)
    except FunctionError as error:
        raise FunctionError(f"{spec}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code, as above
        raise FunctionError(f"{spec} cannot be used with its options: {describe(error)}") from error


def _of_samples(spec: str, function: UserFunction, columns: Collection[str] | None) -> ScoreFunction:
    """Wrap a function: convert samples to the arguments of TRL's signature, if it has that, and await its results."""
    call = functools.partial(_awaited, function)
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some builtins have no signature
        return call
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    if COMPLETIONS not in parameters and "completion_ids" not in needed:
        return call
    if trainers := [name for name in needed if name in OF_THE_TRAINER]:
        raise FunctionError(f"{spec}: only TRL's trainer can pass {trainers[0]}; give the parameter a default")
    missing = [name for name in needed if columns is not None and name not in (*columns, *TRL_ARGUMENTS)]
    if missing:
        names = ", ".join(columns or ()) or "none"
        raise FunctionError(
            f"{spec}: {missing[0]} is not a column of the prompts (columns: {names}); rename the parameter, or give it "
            "a default"
        )
    return TrlFunction(call, parameters, needed)


def _awaited(function: UserFunction, /, *arguments: Any, **named: Any) -> Any:
    """Call a function and return its result; as in TRL, one event loop awaits the coroutines of all calls."""
    result = function(*arguments, **named)
    return _event_loop().run_until_complete(result) if inspect.isawaitable(result) else result


@functools.cache
def _event_loop() -> Any:
    import asyncio  # slow to import, and rarely needed

    return asyncio.new_event_loop()


class TrlFunction:
    """Adapter that calls a function with TRL's signature, `(prompts, completions, **columns)`, for samples."""

    def __init__(
        self, function: UserFunction, parameters: Mapping[str, inspect.Parameter], needed: Sequence[str]
    ) -> None:
        """`needed`: parameters without a default; as in TRL, they are None for rows without the column."""
        self._function = function
        self._needed = needed
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._names = None if takes_all else parameters.keys()

    def __call__(self, sample_or_group: Sample | list[Sample]) -> Any:
        """Return the score of a sample, or a list of scores for a list of samples; None becomes NOT_APPLICABLE."""
        samples = sample_or_group if isinstance(sample_or_group, list) else [sample_or_group]
        prompts, completions = zip(*map(_texts, samples), strict=True)
        sent = {name for sample in samples for name in sample.metadata}
        columns = {*sent, *self._needed} - {PROMPT_KEY, RESPONSE_KEY, MESSAGES_KEY, REPLY_KEY}
        lists = {
            **{name: [sample.metadata.get(name) for sample in samples] for name in columns},
            "prompts": [*prompts],
            COMPLETIONS: [*completions],
        }
        scores = self._function(
            **{name: value for name, value in lists.items() if self._names is None or name in self._names}
        )
        values = [NOT_APPLICABLE if score is None else score for score in group_scores(scores, len(samples))]
        return values if isinstance(sample_or_group, list) else values[0]


def _texts(sample: Sample) -> tuple[Any, Any]:
    """Return a sample's prompt and completion, each a text or a list of chat messages."""
    messages = sample.metadata.get(MESSAGES_KEY)
    text = sample.text if sample.response is None else sample.response
    if not isinstance(messages, list):
        return sample.prompt, text
    if reply := sample.metadata.get(REPLY_KEY):
        return messages[: len(messages) - last_reply(reply)], reply
    end = reply_start(messages) if sample.response is None else len(messages)
    return messages[:end], messages[end:] or [{"role": "assistant", "content": text}]


def last_reply(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the policy's last message; there must be one."""
    return max(i for i, message in enumerate(messages) if message["role"] == "assistant")


def group_scores(value: Any, size: int) -> list[Any]:
    """Convert the result of a groupwise function to a list. Raises BadScore unless it has `size` items, one per row."""
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise BadScore(f"the function returned {value!r:.80}, but it must return {size} numbers, one per response")
    scores = list(value)
    if len(scores) != size:
        raise BadScore(f"the function returned {len(scores)} scores for a group of {size}")
    return scores


def checked(value: Any) -> float:
    """Return a score as a float. Raises BadScore if it is not a number, or not finite."""
    if isinstance(value, (str, bytes)) or value is None:
        raise BadScore(f"the function returned {value!r:.80}, but it must return a number")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise BadScore(f"the function returned {value!r:.80}, but it must return a number") from error
    if not math.isfinite(number):
        raise BadScore(f"the function returned {number}, but it must return a finite number")
    return number


def describe(error: BaseException) -> str:
    """Return the error as one line: type, message (at most `MAX_ERROR_CHARACTERS`), file name and line number."""
    if isinstance(error, (BadScore, FunctionError)):
        return str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    line = " ".join(text.encode("utf-8", "replace").decode().split())
    line = line if len(line) <= MAX_ERROR_CHARACTERS else line[:MAX_ERROR_CHARACTERS] + " …"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    return f"{line} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else line


def _import_file(path: Path) -> ModuleType:
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else "reward_function_file"
    module_spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or module_spec is None or module_spec.loader is None:
        raise FileNotFoundError(f"{path} does not exist")
    # As `python file.py` does, so that the file can import its neighbours.
    sys.path.insert(0, str(path.parent.absolute()))
    module = sys.modules[name] = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module
