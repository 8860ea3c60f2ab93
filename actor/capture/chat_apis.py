"""What the APIs of agents, OpenAI's and Anthropic's, have in common."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field

from rlhf_triton.actor.capture.http import Body, HttpError
from rlhf_triton.actor.capture.sessions import Sampling
from rlhf_triton.actor.data.chat import ChatMessage
from rlhf_triton.actor.data.recorded import PolicyTurn
from rlhf_triton.actor.data.reply_parts import HERMES, first_stop, split_thought, tool_calls
from rlhf_triton.checkpoints.special_tokens import reply_text
from rlhf_triton.wire.messages import joined

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
    agent_request: AgentRequest, name: str, prompt_tokens: int, sampled: PolicyTurn, tokenizer: Any, min_tokens: int
) -> PolicyReply:
    """Return the reply for sampled tokens: its text up to the stop string, and the well-formed tool calls in it.

    `min_tokens`: first tokens of the reply within which stop strings are ordinary text.
    """
    text = reply_text(tokenizer, sampled.tokens)
    calls = list[Json]()
    early = reply_text(tokenizer, sampled.tokens[:min_tokens])
    end, stopped_by = first_stop(text, early, agent_request.sampling.stop) or (len(text), None)

    def take_call(match: re.Match[str]) -> str:
        call = tool_calls(match[0])[0]
        if call.error:
            return match[0]
        function = {"name": call.name, "arguments": call.arguments or {}}
        calls.append({"id": f"call_{name}_{len(calls)}", "type": "function", "function": function})
        return ""

    thought, answer = split_thought(text[:end])
    plain_text = thought + (HERMES.sub(take_call, answer) if agent_request.calls_tools else answer)
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


def as_parts(content: Any) -> Any:
    """Return a text as a list of one part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Content = Annotated[FailFastList[Text], BeforeValidator(as_parts)]


def text_of_parts(content: list[Text]) -> str:
    """Return the text of all parts, as the reward reads them."""
    return joined([part.text for part in content])


def checked_messages(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return the messages. Raises HttpError unless the policy is to answer the last one."""
    if not messages or messages[-1]["role"] == "assistant":
        raise HttpError(400, "messages: must end with a message that the policy answers", "messages")
    return messages
