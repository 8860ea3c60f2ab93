"""Anthropic's messages: requests, replies and streams."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rlhf_triton.actor.capture.chat_apis import (
    AgentRequest,
    ChatApi,
    Content,
    FailFastList,
    Id,
    Json,
    NumTokens,
    PolicyReply,
    Text,
    Texts,
    as_parts,
    checked_messages,
    text_of_parts,
)
from rlhf_triton.actor.capture.http import Body, HttpError
from rlhf_triton.actor.capture.sessions import Sampling
from rlhf_triton.actor.data.chat import ChatMessage
from rlhf_triton.config.fields import Fraction


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
    content: Annotated[FailFastList[Block], BeforeValidator(as_parts)]

    def messages(self) -> list[ChatMessage]:
        """Return the messages that the chat template expects: one for each tool result, then the message itself."""
        texts = [block for block in self.content if isinstance(block, Text)]
        results = [block for block in self.content if isinstance(block, ToolResult)]
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            for block in self.content
            if isinstance(block, ToolUse)
        ]
        if (calls and self.role == "user") or (results and self.role == "assistant"):
            raise HttpError(400, "messages: a user has no tool_use, an assistant has no tool_result", "messages")
        message = {"role": self.role, "content": text_of_parts(texts), **({"tool_calls": calls} if calls else {})}
        answers = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of_parts(block.content)}
            for block in results
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


def _read(body: Any, default: int) -> AgentRequest:
    request = AnthropicRequest.read(body)
    system = text_of_parts(request.system)
    messages = [{"role": "system", "content": system}] if system else []
    for message in request.messages:
        messages += message.messages()
    limit = request.max_tokens or default
    return AgentRequest(
        model=request.model,
        messages=checked_messages(messages),
        tools=[tool.tool() for tool in request.tools],
        sampling=Sampling(limit, request.temperature, request.top_p, tuple(request.stop_sequences)),
        calls_tools=bool(request.tools) and request.tool_choice.type != "none",
        stream=request.stream,
    )


def _body(reply: PolicyReply, agent_request: AgentRequest) -> Json:
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


def _events(body: Json, agent_request: AgentRequest) -> Iterator[str]:
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


ANTHROPIC_MESSAGES = ChatApi(_read, _body, _events)
