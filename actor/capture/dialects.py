"""What agents speak: requests and replies of OpenAI's chat completions and of Anthropic's messages."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from rlhf_triton.actor.capture.http import HttpError
from rlhf_triton.actor.capture.sessions import Sampled, Sampling
from rlhf_triton.actor.data.chat import HERMES, Message, tool_calls
from rlhf_triton.checkpoints.tokenization import reply_text

Json = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """A request in the form that chat template and sampler take."""

    model: str
    messages: list[Message]
    tools: list[Json]
    sampling: Sampling
    calls_tools: bool  # whether tool calls in the reply are parsed
    stream: bool
    logprobs: bool = False
    stream_usage: bool = False


@dataclass(frozen=True)
class PolicyReply:
    """A reply, independent of the dialect that renders it."""

    id: str
    text: str
    calls: list[Json]  # as in a message: id, type, and function with name and arguments, an object
    stopped_by: str | None  # the stop string
    prompt_tokens: int
    sampled: Sampled
    pieces: list[str]  # text of each token, if the request wants log-probs

    @property
    def message(self) -> Message:
        """The reply as a message of the conversation."""
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"role": "assistant", "content": self.text, **calls}


@dataclass(frozen=True)
class Dialect:
    """One API."""

    read: Callable[[Any, int], Asked]
    """A request from its body, and the most tokens of a reply that sets no limit. Raises HttpError."""
    body: Callable[[PolicyReply, Asked], Json]
    """The body of a reply."""
    events: Callable[[Json, Asked], Iterator[str]]
    """Server-sent events with the content of such a body."""


def reply_to(asked: Asked, name: str, prompt_tokens: int, sampled: Sampled, tokenizer: Any) -> PolicyReply:
    """Return the reply: its text up to the stop string, without the tool calls in it that are well-formed."""
    text, calls = reply_text(tokenizer, sampled.tokens), list[Json]()
    stops = [(text.index(stop), stop) for stop in asked.sampling.stop if stop in text]
    end, stopped_by = min(stops, default=(len(text), None))

    def taken(match: re.Match[str]) -> str:
        call = tool_calls(match[0])[0]
        if call.error:
            return match[0]
        function = {"name": call.name, "arguments": call.arguments or {}}
        calls.append({"id": f"call_{name}_{len(calls)}", "type": "function", "function": function})
        return ""

    rest = HERMES.sub(taken, text[:end]) if asked.calls_tools else text[:end]
    pieces = [tokenizer.decode([token]) for token in sampled.tokens] if asked.logprobs else []
    return PolicyReply(name, rest.strip() if calls else rest, calls, stopped_by, prompt_tokens, sampled, pieces)


# Reading: tables name the fields of each object with their type, or the values that mean what happens anyway. A field
# that would change the reply in a way that is not possible here is refused.


NUMBER, TEXT_OR_LIST, ANYTHING = (int, float), (str, list), (str, int, float, list, dict)
NAMES = {str: "a text", int: "an integer", NUMBER: "a number", bool: "true or false", dict: "an object", list: "a list"}


IDS, MAX_ID = ("id", "name", "tool_call_id", "tool_use_id"), 200  # which no template need write, but all are kept


def refuse(field: str, value: Any, must: str) -> NoReturn:
    """Raise the HttpError of a field."""
    shown = json.dumps(value)
    raise HttpError(400, f"{field}: {shown if len(shown) <= 80 else shown[:80] + '…'} {must}", field)


def checked(body: Any, fields: Mapping[str, Any], required: tuple[str, ...] = (), where: str = "") -> Json:
    """Return the fields of an object that are not null. Raises HttpError unless they are as the table says."""
    if not isinstance(body, dict):
        refuse(where.rstrip(".") or "body", body, "must be an object")
    found = {name: value for name, value in body.items() if value is not None}
    for name, value in found.items():
        kind = fields.get(name, [])
        if isinstance(kind, list) and value not in kind:
            instead = " or ".join(map(json.dumps, kind)) or "absent"
            refuse(where + name, value, f"cannot be honoured, must be {instead}")
        if not isinstance(kind, list) and (
            not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, ANYTHING))
        ):
            refuse(where + name, value, f"must be {NAMES.get(kind, 'a text or a list')}")
        if name in IDS and len(value) > MAX_ID:
            refuse(where + name, value, f"has {len(value)} characters, must have at most {MAX_ID}")
    if missing := [name for name in required if name not in found]:
        raise HttpError(400, f"{where}{missing[0]}: missing, must be given", where + missing[0])
    return found


def number(body: Any, name: str, default: float | None, least: float, most: float) -> float:
    """Return a number of a body. Raises HttpError unless it is finite and within the bounds."""
    value = body.get(name, default)
    if not least <= value <= most:
        refuse(name, value, f"must be between {least:g} and {most:g}")
    return float(value)


def _each(body: Json, name: str, where: str = "") -> list[tuple[Any, str]]:
    """Return the entries of a list, each with its place."""
    return [(entry, f"{where}{name}[{i}].") for i, entry in enumerate(body.get(name, ()))]


def _sampling(body: Json, limit: str, default: int, stop: str, hottest: float) -> Sampling:
    stops = body.get(stop, [])
    stops = [stops] if isinstance(stops, str) else stops
    if not all(isinstance(each, str) and each for each in stops):
        refuse(stop, stops, "must have texts that are not empty")
    tokens = int(number(body, limit, default, 1, 1e9))
    return Sampling(
        tokens, number(body, "temperature", 1.0, 0, hottest), number(body, "top_p", 1.0, 0, 1), tuple(stops)
    )


PART = {"type": ["text"], "text": str, "cache_control": ANYTHING, "citations": ANYTHING}


def _text(body: Json, name: str, where: str = "") -> str:
    """Return the text of a content, a string or a list of text parts; other parts are refused."""
    if not isinstance(body.get(name), list):
        return str(body.get(name, ""))
    return "".join(checked(part, PART, ("type", "text"), place)["text"] for part, place in _each(body, name, where))


def _asked_last(messages: list[Message]) -> list[Message]:
    if not messages or messages[-1]["role"] == "assistant":
        refuse("messages", [each["role"] for each in messages[-1:]], "must end with a message that the policy answers")
    return messages


# OpenAI's chat completions.


OPENAI = {
    **{"model": str, "messages": list, "tools": list, "tool_choice": ["auto", "none"], "stop": TEXT_OR_LIST},
    **{"temperature": NUMBER, "top_p": NUMBER, "max_tokens": int, "max_completion_tokens": int},
    **{"stream": bool, "stream_options": dict, "logprobs": bool, "parallel_tool_calls": [True]},
    **{"n": [1], "top_logprobs": [0], "frequency_penalty": [0], "presence_penalty": [0], "logit_bias": [{}]},
    **{"response_format": [{"type": "text"}], "modalities": [["text"]], "store": [False]},
    **dict.fromkeys(("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier"), ANYTHING),
}
ROLES = {"developer": "system", **{role: role for role in ("system", "user", "assistant", "tool")}}
MESSAGE = {
    **{"role": [*ROLES], "content": TEXT_OR_LIST, "name": str, "tool_calls": list, "tool_call_id": str},
    **{"annotations": [[]]},
}
TOOL = {"type": ["function"], "function": dict}
CALL = {"id": str, "type": ["function"], "function": dict, "index": int}  # OpenAI's client puts the last one in
FUNCTION = {"name": str, "description": str, "parameters": dict, "strict": bool}


def _read_openai(body: Any, default: int) -> Asked:
    found = checked(body, OPENAI, ("messages",))
    tools = [checked(tool, TOOL, ("type", "function"), place) for tool, place in _each(found, "tools")]
    for i, tool in enumerate(tools):
        checked(tool["function"], FUNCTION, ("name",), f"tools[{i}].function.")
    limit = "max_completion_tokens" if "max_completion_tokens" in found else "max_tokens"
    return Asked(
        model=found.get("model", ""),
        messages=_asked_last([_openai_message(*each) for each in _each(found, "messages")]),
        tools=tools,
        sampling=_sampling(found, limit, default, "stop", 2.0),
        calls_tools=bool(tools) and found.get("tool_choice") != "none",
        stream=found.get("stream", False),
        logprobs=found.get("logprobs", False),
        stream_usage=bool(found.get("stream_options", {}).get("include_usage")),
    )


def _openai_message(body: Any, where: str) -> Message:
    found = checked(body, MESSAGE, ("role",), where)
    calls = [_openai_call(*each) for each in _each(found, "tool_calls", where)]
    read = {"role": ROLES[found["role"]], "content": _text(found, "content", where), "tool_calls": calls or None}
    return {name: value for name, value in {**found, **read}.items() if value is not None and name != "annotations"}


def _openai_call(body: Any, where: str) -> Json:
    call = checked(body, CALL, ("function",), where)
    function = checked(call["function"], {"name": str, "arguments": str}, ("name", "arguments"), f"{where}function.")
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        refuse(f"{where}function.arguments", function["arguments"], "must be an object as JSON")
    linked = {"id": call["id"]} if "id" in call else {}
    return {**linked, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _openai_body(reply: PolicyReply, asked: Asked) -> Json:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in reply.calls
    ]
    message = {"role": "assistant", "content": None if calls and not reply.text else reply.text, "refusal": None}
    tokens = [
        {"token": piece, "logprob": logprob, "bytes": [*piece.encode()], "top_logprobs": []}
        for piece, logprob in zip(reply.pieces, reply.sampled.logprobs, strict=False)
    ]
    choice = {
        "index": 0,
        "message": {**message, **({"tool_calls": calls} if calls else {})},
        "logprobs": {"content": tokens, "refusal": None} if asked.logprobs else None,
        "finish_reason": "tool_calls" if calls else "stop" if reply.sampled.ended else "length",
    }
    before, sampled = reply.prompt_tokens, len(reply.sampled.tokens)
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": asked.model,
        "choices": [choice],
        "usage": {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled},
    }


def _openai_events(body: Json, asked: Asked) -> Iterator[str]:
    choice, chunk = body["choices"][0], {**body, "object": "chat.completion.chunk", "usage": None}
    delta = {**choice["message"]}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    first = {"index": 0, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
    last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
    usage = [{**chunk, "choices": [], "usage": body["usage"]}] if asked.stream_usage else []
    for each in ({**chunk, "choices": [first]}, {**chunk, "choices": [last]}, *usage):
        yield f"data: {json.dumps(each)}\n\n"
    yield "data: [DONE]\n\n"


# Anthropic's messages.


ANTHROPIC = {
    **{"model": str, "messages": list, "system": TEXT_OR_LIST, "tools": list, "tool_choice": dict, "max_tokens": int},
    **{"temperature": NUMBER, "top_p": NUMBER, "stop_sequences": list, "stream": bool},
    **{"thinking": [{"type": "disabled"}], "metadata": ANYTHING, "service_tier": ANYTHING},
}
ANTHROPIC_TOOL = {
    **{"name": str, "description": str, "input_schema": dict, "type": ["custom"]},
    **{"cache_control": ANYTHING, "strict": bool},
}
BLOCKS = {  # fields, and those that are required
    "text": (PART, ("text",)),
    "tool_use": (
        {"type": ["tool_use"], "id": str, "name": str, "input": dict, "cache_control": ANYTHING},
        ("id", "name", "input"),
    ),
    "tool_result": (
        {
            **{"type": ["tool_result"], "tool_use_id": str, "content": TEXT_OR_LIST, "is_error": bool},
            **{"cache_control": ANYTHING},
        },
        ("tool_use_id",),
    ),
}
KINDS = {"user": ["text", "tool_result"], "assistant": ["text", "tool_use"]}


def _read_anthropic(body: Any, default: int) -> Asked:
    found = checked(body, ANTHROPIC, ("messages",))
    choices = {"type": ["auto", "none"], "disable_parallel_tool_use": [False]}
    choice = checked(found.get("tool_choice", {}), choices, where="tool_choice.")
    system = _text(found, "system")
    messages = [{"role": "system", "content": system}] if system else []
    for message, place in _each(found, "messages"):
        messages += _anthropic_messages(message, place)
    tools = [checked(tool, ANTHROPIC_TOOL, ("name", "input_schema"), place) for tool, place in _each(found, "tools")]
    functions = [
        {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
        for tool in tools
    ]
    return Asked(
        model=found.get("model", ""),
        messages=_asked_last(messages),
        tools=[{"type": "function", "function": function} for function in functions],
        sampling=_sampling(found, "max_tokens", default, "stop_sequences", 1.0),
        calls_tools=bool(tools) and choice.get("type") != "none",
        stream=found.get("stream", False),
    )


def _anthropic_messages(body: Any, where: str) -> list[Message]:
    """Split a message into one message per tool result, followed by the rest."""
    found = checked(body, {"role": [*KINDS], "content": TEXT_OR_LIST}, ("role", "content"), where)
    role, results, texts, calls = found["role"], list[Message](), list[str](), list[Json]()
    if isinstance(found["content"], str):
        found["content"] = [{"type": "text", "text": found["content"]}]
    for block, place in _each(found, "content", where):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in KINDS[role]:
            refuse(f"{place}type", kind, f"cannot be honoured, must be {' or '.join(KINDS[role])}")
        part = checked(block, *BLOCKS[kind], place)
        if kind == "tool_result":
            content = _text(part, "content", place)
            results.append({"role": "tool", "tool_call_id": part["tool_use_id"], "content": content})
        elif kind == "tool_use":
            function = {"name": part["name"], "arguments": part["input"]}
            calls.append({"id": part["id"], "type": "function", "function": function})
        else:
            texts.append(part["text"])
    own = {"role": role, "content": "".join(texts), **({"tool_calls": calls} if calls else {})}
    return [*results, *([own] if texts or not results else [])]


def _anthropic_body(reply: PolicyReply, asked: Asked) -> Json:
    content: list[Json] = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
    for call in reply.calls:
        function = call["function"]
        content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    ended = "stop_sequence" if reply.stopped_by else "end_turn" if reply.sampled.ended else "max_tokens"
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": content,
        "stop_reason": "tool_use" if reply.calls else ended,
        "stop_sequence": None if reply.calls else reply.stopped_by,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.sampled.tokens)},
    }


def _anthropic_events(body: Json, asked: Asked) -> Iterator[str]:
    """Yield the events of a stream, in which each block is one piece."""
    ends = {name: body[name] for name in ("stop_reason", "stop_sequence")}
    start = {**body, "content": [], **dict.fromkeys(ends)}
    events: list[Json] = [{"type": "message_start", "message": start}]
    for i, block in enumerate(body["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            piece = json.dumps(block["input"])
            empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": piece}
        events += [
            {"type": "content_block_start", "index": i, "content_block": empty},
            {"type": "content_block_delta", "index": i, "delta": delta},
            {"type": "content_block_stop", "index": i},
        ]
    events += [{"type": "message_delta", "delta": ends, "usage": body["usage"]}, {"type": "message_stop"}]
    for event in events:
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


OPENAI_CHAT = Dialect(_read_openai, _openai_body, _openai_events)
ANTHROPIC_MESSAGES = Dialect(_read_anthropic, _anthropic_body, _anthropic_events)
