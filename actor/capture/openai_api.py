"""OpenAI's chat completions: requests, replies and streams."""

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rlhf_triton.actor.capture.chat_apis import (
    AgentRequest,
    ChatApi,
    Content,
    FailFastList,
    Id,
    Json,
    NumTokens,
    PolicyReply,
    Texts,
    checked_messages,
    text_of_parts,
)
from rlhf_triton.actor.capture.http import Body
from rlhf_triton.actor.capture.sessions import Sampling
from rlhf_triton.actor.data.chat import ChatMessage
from rlhf_triton.config.fields import Fraction

Nothing = Annotated[float, Field(ge=0, le=0)]


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
        try:
            is_object = isinstance(json.loads(arguments or "{}"), dict)
        except RecursionError as error:
            raise ValueError("is nested too deeply") from error
        if not is_object:
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
        return {"role": role, "content": text_of_parts(self.content), **present}


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


def _read(body: Any, default: int) -> AgentRequest:
    request = OpenAIRequest.read(body)
    limit = request.max_completion_tokens or request.max_tokens or default
    return AgentRequest(
        model=request.model,
        messages=checked_messages([message.message() for message in request.messages]),
        tools=[tool.model_dump(exclude_unset=True) for tool in request.tools],
        sampling=Sampling(limit, request.temperature, request.top_p, tuple(request.stop)),
        calls_tools=bool(request.tools) and request.tool_choice != "none",
        stream=request.stream,
        stream_usage=bool(request.stream_options.get("include_usage")),
    )


def _body(reply: PolicyReply, agent_request: AgentRequest) -> Json:
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


def _events(body: Json, agent_request: AgentRequest) -> Iterator[str]:
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


OPENAI_CHAT = ChatApi(_read, _body, _events)
