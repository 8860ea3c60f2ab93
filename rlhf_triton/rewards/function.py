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

# Counters of a reward function, which the server adds to its Prometheus metrics.


NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_counts: dict[str, float] = collections.defaultdict(float)
_lock = threading.Lock()  # a function may have threads of its own


def count(name: str, amount: float = 1) -> None:
    """Add to the counter `name` of this function: `rlhf_reward_function_total{counter="name"}` in the metrics.

    The server receives it with the result of the sample that is being scored; counts of a worker process that is killed
    while it scores a sample are lost.

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
        taken = dict(_counts)
        _counts.clear()
    return taken


PROMPT_KEY = "prompt"  # reserved metadata keys: the actor stores both texts there, of a chat its messages
RESPONSE_KEY = "response"
MESSAGES_KEY = "messages"
REPLY_KEY = "reply_messages"  # the reply with all its keys; with an environment, what followed the prompt
FILE_SPEC = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")
MODULE_SPEC = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)")
LONGEST_ERROR = 500  # in characters; longer messages are truncated before they are sent
COMPLETIONS = "completions"  # parameter by which a function with TRL's signature is recognised
TRL_ARGUMENTS = ("prompts", COMPLETIONS)
OF_THE_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments")  # further arguments in TRL, not here
TIMEOUT_OPTION = "timeout_s"  # parameter by which a class receives the time limit of its calls
KEY_OPTION = "api_key_env"  # option of a judge, and of any function that needs a key: the variable that has it


NOT_APPLICABLE = object()  # a function's score of a sample that it leaves out of the sum
Function = Callable[[Any], Any]  # of a `Sample`; a groupwise function, of a list of them


class BadScore(RlhfError, ValueError):
    """A function's return value is not a valid score."""


@dataclass(frozen=True)
class Sample:
    """One response to score."""

    text: str
    """Prompt and response as one text; for a chat prompt only the response."""
    tokens: list[int] = field(default_factory=list)
    """Token ids as sent. For a sentence: ids from the reward's tokenizer, no special tokens added, at most 32768.

    None if the server has no tokenizer, which may be where another trainer sends texts to functions alone.
    """
    metadata: dict[str, Any] = field(default_factory=dict)
    """Columns of the prompt's line in the prompt file. The actor adds `response`, and `prompt` or (chats) `messages`.

    `reply_messages` are those of a chat with an environment, from the first reply on; or the reply's message, if it has
    more than its content.
    """

    @property
    def prompt(self) -> str | None:
        """The prompt's text; for a chat, the content of its last message; None if the caller did not send it."""
        messages = self.metadata.get(MESSAGES_KEY)
        if not isinstance(messages, list):
            return self.metadata.get(PROMPT_KEY)
        return (messages[-1].get("content") or "") if messages else ""

    @property
    def response(self) -> str | None:
        """The response's text; None if the caller did not send it."""
        return self.metadata.get(RESPONSE_KEY)


def reply_start(messages: list[Any]) -> int:
    """Return the index at which the messages of a chat's last reply begin, the length if there is no reply."""
    end = len(messages)
    while end and isinstance(messages[end - 1], dict) and messages[end - 1].get("role") in ("assistant", "tool"):
        end -= 1
    return end


def split_reply(messages: list[Any], text: str, metadata: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any] | None]:
    """Return the messages of a chat before its reply, and the message of the reply; None if there is none.

    A client sends the reply as the row's text, an empty one as `response` in the metadata, and what else its message
    has, such as tool calls, as `reply_messages`; or as the last of the messages, without a text or with the same one.
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
    known = [message for message in sent if _has_role(message, "assistant")] if isinstance(sent, list) else []
    said = known[-1] if known else {}
    return messages, said if said and (said.get("content") or "") == text else {"role": "assistant", "content": text}


def _has_role(message: Any, role: str) -> bool:
    return isinstance(message, dict) and message.get("role") == role


def with_reply(messages: list[Any], text: str, metadata: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the text and the metadata of a chat as a run sends them, however a client has sent its reply.

    The text is the reply's content, also under `response`; `messages` are those before it. If the reply's message has
    more than its content, `reply_messages` has that message.
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
    """Return a file spec with its path replaced by `place(path)`; return a module spec unchanged."""
    found = FILE_SPEC.fullmatch(spec)
    return f"{place(Path(found['file']))}:{found['name']}" if found else spec


def load_function(
    spec: str,
    options: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = 0.0,
    columns: Collection[str] | None = None,
) -> Function:
    """Import what `spec` names, and return it as a function of one argument.

    A function receives `options` as keyword arguments of every call. Of a class, one instance is created with
    `options`, and called; a parameter `timeout_s` receives the time limit of a call. A function with TRL's signature is
    called as TRL calls it. An awaitable result is awaited.

    Raises FunctionError if that fails for any reason, an option is unknown or missing, or a function with TRL's
    signature needs an argument that is none of `columns`; None: any may be a column.
    """
    return _of_samples(spec, configured(spec, import_function(spec), dict(options or {}), timeout_s), columns)


def import_function(spec: str) -> Callable[..., Any]:
    """Return the function or class that `spec` names. Raises FunctionError if it cannot be imported for any reason."""
    check_spec(spec)
    source, _, name = spec.rpartition(":")
    try:
        module = _import_file(Path(source)) if FILE_SPEC.fullmatch(spec) else importlib.import_module(source)
    except KeyboardInterrupt:  # Ctrl-C while it is imported
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


def configured(spec: str, function: Callable[..., Any], options: dict[str, Any], timeout_s: float) -> Function:
    """Return a function with its options, or one instance of a class. Raises FunctionError as `load_function` does."""
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


def _of_samples(spec: str, function: Callable[..., Any], columns: Collection[str] | None) -> Function:
    """Return a function with TRL's signature as one of samples, and any other as it is; both await what it returns."""
    call = functools.partial(_awaited, function)
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some builtins have no signature
        return call
    needed = [
        name
        for name, each in parameters.items()
        if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    if "completion_ids" in needed:
        raise FunctionError(
            f"{spec}: completion_ids: not available, because the server does not know which tokens are the response; "
            "for a penalty on the length, use actor.rewards.overlong_tokens"
        )
    if COMPLETIONS not in parameters:
        return call
    if trainers := [name for name in needed if name in OF_THE_TRAINER]:
        raise FunctionError(f"{spec}: {trainers[0]}: only TRL's trainer has it; give the parameter a default")
    absent = [name for name in needed if columns is not None and name not in (*columns, *TRL_ARGUMENTS)]
    if absent:
        known = ", ".join(columns or ()) or "none"
        raise FunctionError(
            f"{spec}: {absent[0]}: no column of the prompts, which have {known}; rename the parameter, or give it a "
            "default"
        )
    return TrlFunction(call, parameters, needed)


def _awaited(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Return a function's result; as in TRL, coroutines are awaited on one event loop for all calls."""
    found = function(*arguments, **named)
    return _event_loop().run_until_complete(found) if inspect.isawaitable(found) else found


@functools.cache
def _event_loop() -> Any:
    import asyncio  # slow to import, and rarely needed

    return asyncio.new_event_loop()


class TrlFunction:
    """A function with TRL's signature, `(prompts, completions, **columns)`, called with a sample or a group of them."""

    def __init__(
        self, function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], needed: Sequence[str]
    ) -> None:
        """`needed`: parameters without a default, which are None for a row that lacks the column, as in TRL."""
        self._function, self._needed = function, needed
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        self._names = None if takes_all else parameters.keys()

    def __call__(self, given: Sample | list[Sample]) -> Any:
        """Return the score, or NOT_APPLICABLE for None; for a list of samples, a list of them."""
        samples = given if isinstance(given, list) else [given]
        prompts, completions = zip(*map(_texts, samples), strict=True)
        found = {name for sample in samples for name in sample.metadata}
        columns = {*found, *self._needed} - {PROMPT_KEY, RESPONSE_KEY, MESSAGES_KEY, REPLY_KEY}
        lists = {
            **{name: [sample.metadata.get(name) for sample in samples] for name in columns},
            "prompts": [*prompts],
            COMPLETIONS: [*completions],
        }
        scores = self._function(
            **{name: value for name, value in lists.items() if self._names is None or name in self._names}
        )
        values = [NOT_APPLICABLE if score is None else score for score in group_scores(scores, len(samples))]
        return values if isinstance(given, list) else values[0]


def _texts(sample: Sample) -> tuple[Any, Any]:
    """Return prompt and completion, each a text or the messages of a chat."""
    messages, text = sample.metadata.get(MESSAGES_KEY), sample.text if sample.response is None else sample.response
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
    """Return what a groupwise function returned as a list of `size`; raise BadScore unless it has one item per row."""
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
        raise BadScore(f"returned {number}, must be finite")
    return number


def describe(error: BaseException) -> str:
    """Return the error as one line: type, message (at most `LONGEST_ERROR` characters), file name and line number."""
    if isinstance(error, (BadScore, FunctionError)):
        return str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    line = " ".join(text.encode("utf-8", "replace").decode().split())
    line = line if len(line) <= LONGEST_ERROR else line[:LONGEST_ERROR] + " …"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    return f"{line} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else line


def _import_file(path: Path) -> ModuleType:
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else "reward_function_file"
    found = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or found is None or found.loader is None:
        raise FileNotFoundError(f"{path} does not exist")
    sys.path.insert(0, str(path.parent.absolute()))  # as `python file.py` does, so that it can import its neighbours
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
