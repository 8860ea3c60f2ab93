"""The parts of a reply's text: where a stop string ends it, its thought and its tool calls."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

THOUGHT_BEGIN = "<think>\n"
THOUGHT_END = "</think>"
HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def first_stop(text: str, early: str, stops: Iterable[str]) -> tuple[int, str] | None:
    """Return where the first stop string that ends a turn starts in its text, and the string; None if none does.

    `early`: the text of the turn's first `min_new_tokens` tokens; a stop string that ends within it is ordinary text,
    as in vLLM.
    """
    # rstrip: a character whose bytes are incomplete here may still complete a stop string.
    ignored = len(early.rstrip("\ufffd"))
    starts = ((text.find(stop, max(0, ignored - len(stop) + 1)), stop) for stop in stops)
    return min((found for found in starts if found[0] >= 0), default=None)


def split_thought(text: str) -> tuple[str, str]:
    """Return a reply's thought, with its end, and what follows it; a tool call in a thought is only considered."""
    before, end, after = text.partition(THOUGHT_END)
    # Otherwise the end is part of an argument of a call.
    is_thought = THOUGHT_BEGIN.strip() in before or before.count("<tool_call>") == before.count("</tool_call>")
    return (before + end, after) if end and is_thought else ("", text)


@dataclass(frozen=True)
class ToolCall:
    """A tool call in a reply, possibly malformed."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    error: str = ""  # what is wrong with the call, as the policy reads it


def tool_calls(text: str) -> list[ToolCall]:
    """Return the calls `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen) in a reply."""
    return [_parse_hermes_call(content.strip()) for content in HERMES.findall(text)]


def _parse_hermes_call(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the tool call is not valid JSON: {error}")
    return tool_call_of(call)


def tool_call_of(call: Any) -> ToolCall:
    """Return the call in an object that should have a name and arguments."""
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        return ToolCall(error='a tool call must be an object with "name", a text, and "arguments", an object')
    try:
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:  # lone surrogates, NaN
        return ToolCall(error=f"the tool call cannot be written as JSON in UTF-8: {error}")
    return ToolCall(call["name"], arguments)
