"""Parses messages of conversations, for prompt files, requests to the server, and the gateway."""

import ast
import json
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_triton.errors import RlhfError
from rlhf_triton.monitoring.log_lines import warn_once

A_MESSAGE = '{"role": …, "content": …}'


class BadMessages(RlhfError, ValueError):
    """A value is not a conversation; the error starts with the place in it, such as `[0].content: `."""


def plain_messages(value: Any) -> list[dict[str, Any]]:
    """Validate a conversation; return it with contents as texts, without null keys and empty `tool_calls`.

    Arrow gives every message the union of all keys, and clients write null for absent fields, but templates test
    whether a key is present. A content may be null only if there are tool calls, as in OpenAI's format.

    Raises:
        BadMessages: the value is not a list of messages with a role and a content.
    """
    if not isinstance(value, list):
        raise BadMessages(f": must be a list of {A_MESSAGE}, got {value!r:.80}")
    return [_plain_message(i, message) for i, message in enumerate(value)]


def _plain_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadMessages(f"[{index}]: must be {A_MESSAGE}, got {message!r:.80}")
    try:
        content = text_of(message.get("content"))
    except ValueError as error:
        raise BadMessages(f"[{index}].content: {error}") from error
    if content is None and not message.get("tool_calls"):
        raise BadMessages(f"[{index}].content: missing or null, must be a text")
    plain = {**without_nulls({**message, "content": ""}), "content": content}  # in the order of the message's own keys
    if plain.get("tool_calls"):
        plain["tool_calls"] = with_arguments(plain["tool_calls"], _object_in)
    else:
        plain.pop("tool_calls", None)
    return plain


def with_arguments(calls: Any, change: Callable[[Any], Any]) -> Any:
    """Return tool calls with each function's arguments replaced by `change(arguments)`."""
    if not isinstance(calls, list):
        return calls
    return [
        {**call, "function": {**call["function"], "arguments": change(call["function"]["arguments"])}}
        if isinstance(call, dict) and isinstance(call.get("function"), dict) and "arguments" in call["function"]
        else call
        for call in calls
    ]


def _object_in(arguments: Any) -> Any:
    """Return arguments as an object, also of their JSON text (OpenAI's format), which templates would quote."""
    try:
        parsed = json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def is_text_of_messages(text: str) -> bool:
    """Return whether a text is a conversation or message in JSON or Python notation.

    A model would read its brackets and quotes, so callers reject it.
    """
    if not (text.lstrip().startswith(("[", "{", '"')) and ("role" in text or "from" in text)):
        return False
    for read in (json.loads, ast.literal_eval):
        try:
            return _holds_messages(read(text.strip()))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return False


def _holds_messages(value: Any) -> bool:
    if isinstance(value, str):  # encoded as JSON twice
        return is_text_of_messages(value)
    if isinstance(value, dict):
        inner = (value.get(name) for name in ("messages", "conversations"))
        return {"role", "content"} <= value.keys() or any(map(_is_chat, inner))
    return _is_chat(value)


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict) and ("role" in message or {"from", "value"} <= message.keys())
            for message in value
        )
    )


def text_of(content: Any) -> str | None:
    """Return a content as text: joins a list of text parts with newlines, as vLLM does. None stays None.

    Most templates would write a list of parts in Python notation. Raises ValueError for any other content or part.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"must be a text, got {content!r:.80}")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"has a part of type {kind!r}, must have only text")
    return joined([part["text"] for part in content])


def joined(parts: Sequence[str]) -> str:
    """Return the text parts of a content as one text."""
    if len(parts) > 1:
        warn_once(
            "a content of several text parts is joined with newlines, as in vLLM; a chat template that reads lists "
            "might join them otherwise: send one part"
        )
    return "\n".join(parts)


def without_nulls(value: Any, is_nested: bool = False) -> Any:
    """Return the value without null-valued keys of objects, at any depth; nulls in nested objects are logged once."""
    if isinstance(value, list):
        return [without_nulls(inner, is_nested=True) for inner in value]
    if not isinstance(value, dict):
        return value
    without = {key: without_nulls(inner, is_nested=True) for key, inner in value.items() if inner is not None}
    if is_nested and len(without) < len(value):
        warn_once(
            "null-valued keys inside tool calls and tools are left out, because Arrow gives every object the keys of "
            "all objects; to let the template write a call's nulls, send its arguments as JSON text"
        )
    return without
