"""The APIs that agents use: requests and replies of OpenAI's chat completions and of Anthropic's messages."""

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, field_validator

from rlhf_triton.actor.capture.http import Body, HttpError
from rlhf_triton.actor.capture.sessions import Sampling
from rlhf_triton.actor.data.chat import HERMES, ChatMessage, tool_calls
from rlhf_triton.actor.data.recorded import PolicyTurn
from rlhf_triton.checkpoints.tokenization import reply_text
from rlhf_triton.config.fields import Fraction

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class AgentRequest:
    """An agent's request, in the form that the chat template and the sampler need."""

    model: str
    messages: list[ChatMessage]
    tools: list[Json]
    sampling: Sampling
    calls_tools: bool  # whether tool calls in the reply are parsed
    stream: bool
    stream_usage: bool = False


@dataclass(frozen=True, kw_only=True)
class PolicyReply:
    """A reply, independent of the API that renders it."""

    id: str
    text: str
    calls: list[Json]  # tool calls of a message: id, type, and function with name and arguments (an object)
    stopped_by: str | None  # the stop string that ended the reply
    prompt_tokens: int
    sampled: PolicyTurn

    @property
    def message(self) -> ChatMessage:
        """The reply as a message of the conversation."""
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"role": "assistant", "content": self.text, **calls}


@dataclass(frozen=True)
class ChatApi:
    """The request and reply formats of one API."""

    read: Callable[[Any, int], AgentRequest]
    """Parses a request's body; the number is the limit of a reply if the request sets none. Raises HttpError."""
    body: Callable[[PolicyReply, AgentRequest], Json]
    """Returns the body of a reply."""
    events: Callable[[Json, AgentRequest], Iterator[str]]
    """Yields the server-sent events of a reply's body."""


def reply_to(
    agent_request: AgentRequest, name: str, prompt_tokens: int, sampled: PolicyTurn, tokenizer: Any
) -> PolicyReply:
    """Return the reply for sampled tokens: its text up to the stop string, and the well-formed tool calls in it."""
    text = reply_text(tokenizer, sampled.tokens)
    calls = list[Json]()
    stops = [(text.index(stop), stop) for stop in agent_request.sampling.stop if stop in text]
    end, stopped_by = min(stops, default=(len(text), None))

    def take_call(match: re.Match[str]) -> str:
        call = tool_calls(match[0])[0]
        if call.error:
            return match[0]
        function = {"name": call.name, "arguments": call.arguments or {}}
        calls.append({"id": f"call_{name}_{len(calls)}", "type": "function", "function": function})
        return ""

    plain_text = HERMES.sub(take_call, text[:end]) if agent_request.calls_tools else text[:end]
    return PolicyReply(
        id=name,
        text=plain_text.strip() if calls else plain_text,
        calls=calls,
        stopped_by=stopped_by,
        prompt_tokens=prompt_tokens,
        sampled=sampled,
    )


# Request bodies. A field is refused if it would change the reply in an unsupported way.


MAX_ID = 200  # characters of a name or id
Id = Annotated[str, Field(max_length=MAX_ID)]
Nothing = Annotated[float, Field(ge=0, le=0)]
NumTokens = Annotated[int, Field(ge=1, le=1_000_000_000)]
MAX_STOPS = 64  # each is searched for in the reply; OpenAI's API allows 4
Texts = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda one: [one] if isinstance(one, str) else one),
]


class Text(Body):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str
    cache_control: Any = None
    citations: Any = None


T = TypeVar("T")
FailFastList = Annotated[list[T], Field(fail_fast=True)]


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Content = Annotated[FailFastList[Text], BeforeValidator(_parts)]


def _joined(content: list[Text]) -> str:
    return "".join(part.text for part in content)


def _check_last_message(messages: list[ChatMessage]) -> list[ChatMessage]:
    if not messages or messages[-1]["role"] == "assistant":
        raise HttpError(400, "messages: must end with a message that the policy answers", "messages")
    return messages


# OpenAI's chat completions.


class Function(Body):
    """A tool's declaration."""

    name: Id
    description: str = ""
    parameters: dict[str, Any] = Field(default={})
    strict: bool = False


class Tool(Body):
    """A tool that the policy may call."""

    type: Literal["function"]
    function: Function


class CalledFunction(Body):
    """A called function; `arguments` is a JSON object as a string."""

    name: Id
    arguments: str
    parsed_arguments: Any = None  # OpenAI's client adds it if the tool is strict

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, arguments: str) -> str:
        if not isinstance(json.loads(arguments or "{}"), dict):
            raise ValueError("must be a JSON object")
        return arguments or "{}"


class CalledTool(Body):
    """A call of a tool in the history."""

    id: Id = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int = 0  # OpenAI's client sends it

    def message(self) -> Json:
        """Return the call in the form of `PolicyReply.calls`."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {**({"id": self.id} if self.id else {}), "type": "function", "function": function}


class OpenAIMessage(Body):
    """A message of the history."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: Content = Field(default=[])
    name: Id = ""
    tool_calls: FailFastList[CalledTool] = Field(default=[])
    tool_call_id: Id = ""
    annotations: Annotated[list[Any], Field(max_length=0)] = Field(default=[])

    def message(self) -> ChatMessage:
        """Return the message as the chat template expects it."""
        role = "system" if self.role == "developer" else self.role
        optional = {
            "name": self.name,
            "tool_calls": [call.message() for call in self.tool_calls],
            "tool_call_id": self.tool_call_id,
        }
        present = {key: value for key, value in optional.items() if value}
        return {"role": role, "content": _joined(self.content), **present}


class TextFormat(Body):
    """The only supported format of a reply."""

    type: Literal["text"]


class OpenAIRequest(Body):
    """A request to the chat completions API; the fields after `stream_options` have one allowed value, or no effect."""

    model: str = ""
    messages: FailFastList[OpenAIMessage]
    tools: FailFastList[Tool] = Field(default=[])
    tool_choice: Literal["auto", "none"] = "auto"
    stop: Texts = Field(default=[])
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Fraction = 1.0
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    stream: bool = False
    stream_options: dict[str, Any] = Field(default={})
    logprobs: Literal[False] = False
    parallel_tool_calls: Literal[True] = True
    n: Literal[1] = 1
    frequency_penalty: Nothing = 0
    presence_penalty: Nothing = 0
    response_format: TextFormat | None = None
    user: Any = None
    metadata: Any = None


def _read_openai(body: Any, default: int) -> AgentRequest:
    request = OpenAIRequest.read(body)
    limit = request.max_completion_tokens or request.max_tokens or default
    return AgentRequest(
        model=request.model,
        messages=_check_last_message([message.message() for message in request.messages]),
        tools=[tool.model_dump(exclude_unset=True) for tool in request.tools],
        sampling=Sampling(limit, request.temperature, request.top_p, tuple(request.stop)),
        calls_tools=bool(request.tools) and request.tool_choice != "none",
        stream=request.stream,
        stream_usage=bool(request.stream_options.get("include_usage")),
    )


def _openai_body(reply: PolicyReply, agent_request: AgentRequest) -> Json:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in reply.calls
    ]
    message = {"role": "assistant", "content": None if calls and not reply.text else reply.text, "refusal": None}
    choice = {
        "index": 0,
        "message": {**message, **({"tool_calls": calls} if calls else {})},
        "logprobs": None,
        "finish_reason": "tool_calls" if calls else "stop" if reply.sampled.ended else "length",
    }
    before = reply.prompt_tokens
    sampled = len(reply.sampled.tokens)
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": agent_request.model,
        "choices": [choice],
        "usage": {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled},
    }


def _openai_events(body: Json, agent_request: AgentRequest) -> Iterator[str]:
    choice = body["choices"][0]
    chunk = {**body, "object": "chat.completion.chunk", "usage": None}
    delta = {**choice["message"]}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    first = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
    usage = [{**chunk, "choices": [], "usage": body["usage"]}] if agent_request.stream_usage else []
    for event in ({**chunk, "choices": [first]}, {**chunk, "choices": [last]}, *usage):
        yield f"data: {json.dumps(event)}\n\n"
    yield "data: [DONE]\n\n"


# Anthropic's messages.


class ToolUse(Body):
    """A call of a tool in the history."""

    type: Literal["tool_use"]
    id: Id
    name: Id
    input: dict[str, Any]
    cache_control: Any = None


class ToolResult(Body):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Id
    content: Content = Field(default=[])
    is_error: bool = False
    cache_control: Any = None


Block = Annotated[Text | ToolUse | ToolResult, Field(discriminator="type")]


class AnthropicMessage(Body):
    """A message of the history."""

    role: Literal["user", "assistant"]
    content: Annotated[FailFastList[Block], BeforeValidator(_parts)]

    def messages(self) -> list[ChatMessage]:
        """Return the messages that the chat template expects: one for each tool result, then the message itself."""
        texts = [block.text for block in self.content if isinstance(block, Text)]
        results = [block for block in self.content if isinstance(block, ToolResult)]
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            for block in self.content
            if isinstance(block, ToolUse)
        ]
        if (calls and self.role == "user") or (results and self.role == "assistant"):
            raise HttpError(400, "messages: a user has no tool_use, an assistant has no tool_result", "messages")
        message = {"role": self.role, "content": "".join(texts), **({"tool_calls": calls} if calls else {})}
        answers = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": _joined(block.content)} for block in results
        ]
        return [*answers, *([message] if texts or not results else [])]


class AnthropicTool(Body):
    """A tool that the policy may call."""

    name: Id
    description: str = ""
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    cache_control: Any = None
    strict: bool = False

    def tool(self) -> Json:
        """Return the tool in OpenAI's form, which chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class ToolChoice(Body):
    """Whether tools may be called."""

    type: Literal["auto", "none"] = "auto"
    disable_parallel_tool_use: Literal[False] = False


class Thinking(Body):
    """Anthropic's thinking mode, which is unsupported: only the chat template decides whether the policy thinks."""

    type: Literal["disabled"]


class AnthropicRequest(Body):
    """A request to the messages API."""

    model: str = ""
    messages: FailFastList[AnthropicMessage]
    system: Content = Field(default=[])
    tools: FailFastList[AnthropicTool] = Field(default=[])
    tool_choice: ToolChoice = ToolChoice()
    max_tokens: NumTokens | None = None
    temperature: Fraction = 1.0
    top_p: Fraction = 1.0
    stop_sequences: Texts = Field(default=[])
    stream: bool = False
    thinking: Thinking | None = None
    metadata: Any = None


def _read_anthropic(body: Any, default: int) -> AgentRequest:
    request = AnthropicRequest.read(body)
    system = _joined(request.system)
    messages = [{"role": "system", "content": system}] if system else []
    for message in request.messages:
        messages += message.messages()
    limit = request.max_tokens or default
    return AgentRequest(
        model=request.model,
        messages=_check_last_message(messages),
        tools=[tool.tool() for tool in request.tools],
        sampling=Sampling(limit, request.temperature, request.top_p, tuple(request.stop_sequences)),
        calls_tools=bool(request.tools) and request.tool_choice.type != "none",
        stream=request.stream,
    )


def _anthropic_body(reply: PolicyReply, agent_request: AgentRequest) -> Json:
    content: list[Json] = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
    for call in reply.calls:
        function = call["function"]
        content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    ended = "stop_sequence" if reply.stopped_by else "end_turn" if reply.sampled.ended else "max_tokens"
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": agent_request.model,
        "content": content,
        "stop_reason": "tool_use" if reply.calls else ended,
        "stop_sequence": None if reply.calls else reply.stopped_by,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.sampled.tokens)},
    }


def _anthropic_events(body: Json, agent_request: AgentRequest) -> Iterator[str]:
    """Yield the events of a stream, with one delta for each content block."""
    ends = {name: body[name] for name in ("stop_reason", "stop_sequence")}
    start = {**body, "content": [], **dict.fromkeys(ends)}
    events: list[Json] = [{"type": "message_start", "message": start}]
    for i, block in enumerate(body["content"]):
        if block["type"] == "text":
            empty = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            piece = json.dumps(block["input"])
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": piece}
        events += [
            {"type": "content_block_start", "index": i, "content_block": empty},
            {"type": "content_block_delta", "index": i, "delta": delta},
            {"type": "content_block_stop", "index": i},
        ]
    events += [{"type": "message_delta", "delta": ends, "usage": body["usage"]}, {"type": "message_stop"}]
    for event in events:
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


OPENAI_CHAT = ChatApi(_read_openai, _openai_body, _openai_events)
ANTHROPIC_MESSAGES = ChatApi(_read_anthropic, _anthropic_body, _anthropic_events)
