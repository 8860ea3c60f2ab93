"""Rows to score, as every protocol of the gateway builds them, and their results."""

from __future__ import annotations

from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from python_backend.errors import RlhfError
from python_backend.rewards.function import PROMPT_KEY, RESPONSE_KEY, with_reply
from python_backend.wire.messages import plain_messages, text_of

MAX_ROWS = 4096  # of one request
Message = dict[str, Any]


class GatewayError(RlhfError):
    """A request that gets an HTTP error; `status` is its code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = HTTPStatus(status)


@dataclass(frozen=True)
class Row:
    """One row to score: token ids, or a text that the reward model tokenises itself.

    Of a chat, the text is the reply and `metadata` has the messages before it.
    """

    parts: tuple[str, ...] = ()
    """The text: prompt and response are joined only when they are sent, as many rows may share one of them."""
    tokens: list[int] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    prompt_length: int = 0
    """Leading `tokens` that belong to the prompt, in which a process reward looks for no steps."""

    @property
    def num_characters(self) -> int:
        """Length of the text."""
        return sum(map(len, self.parts))

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.parts)

    @property
    def pair(self) -> tuple[str, str]:
        """Prompt and response, for a reward model of text pairs; a text without a response is the first of them."""
        response = self.metadata.get(RESPONSE_KEY, "")
        prompt = self.metadata.get(PROMPT_KEY, "" if response else self.text)
        return prompt, response


def text_row(prompt: str, response: str, metadata: dict[str, Any]) -> Row:
    """Return the row of a prompt and its response, which reward functions receive as two texts."""
    return Row((prompt, response), metadata={**metadata, PROMPT_KEY: prompt, RESPONSE_KEY: response})


def chat_row(messages: list[Message], metadata: dict[str, Any]) -> Row:
    """Return the row of a conversation; a final message of the assistant is the reply, as in a row of a run."""
    text, known = with_reply(messages, "", metadata)
    return Row((text,), metadata=known)


def reply_row(prompt: str | list[Message], response: str, metadata: dict[str, Any]) -> Row:
    """Return the row of a response to a prompt, which is a text or the messages of a chat."""
    if isinstance(prompt, str):
        return text_row(prompt, response, metadata)
    return chat_row([*prompt, {"role": "assistant", "content": response}], metadata)


@dataclass(frozen=True)
class RowResult:
    """The rewards of one row, or why it has none."""

    rewards: tuple[float, ...] = ()
    """One value, or one per attribute if the reward model does not merge them; empty if there is an error."""
    components: tuple[float | None, ...] = ()
    """Terms of a weighted sum of rewards, in the order of their names; None where one failed."""
    weights_version: int | None = None
    """Version of the reward model's weights, if the server names one."""
    probabilities: tuple[float, ...] = ()
    """Of the labels, if requested."""
    times_us: tuple[int, int] | None = None
    """In the server's queue and in the forward pass, if requested."""
    error: str | None = None
    status: HTTPStatus = HTTPStatus.OK
    """Status of the HTTP error if the protocol has no place for the error of a single row."""


def sequence_rewards(results: list[RowResult], name: str) -> list[float]:
    """Return the one reward of every row. `name` is the field of the request that holds the rows.

    Raises GatewayError if a row has none, as the protocol cannot express that, or if it has one per attribute.
    """
    check_all(results, name)
    several = next((len(result.rewards) for result in results if len(result.rewards) != 1), None)
    if several:
        raise GatewayError(
            501,
            f"the reward model returns {several} rewards per row, this protocol has one: set reward.merge_attributes",
        )
    return [result.rewards[0] for result in results]


def check_number(number: int) -> None:
    """Raise GatewayError unless a request of this number of rows may be scored."""
    if not 1 <= number <= MAX_ROWS:
        raise GatewayError(413 if number else 400, f"{number} rows, must be 1 to {MAX_ROWS} per request")


def check_all(results: list[RowResult], name: str) -> None:
    """Raise GatewayError with the first row's error, if any row has no reward."""
    for i, result in enumerate(results):
        if result.error is not None:
            where = f"{name}[{i}]: " if len(results) > 1 else ""
            raise GatewayError(result.status, where + result.error)


# What the bodies of all protocols share: strict types, unknown fields refused, token ids and messages.


MAX_FIELDS = 64  # of an object; each unknown one is an error message
T = TypeVar("T")


def _few(value: Any) -> Any:
    if isinstance(value, list) and value:
        check_number(len(value))
    return value


# A list stops at its first invalid item: the errors of millions would need gigabytes.
Rows = Annotated[list[T], Field(fail_fast=True), BeforeValidator(_few)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


class Body(BaseModel):
    """Base class of request bodies. A number in a string is no number, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise ValueError(f"{len(data)} fields, must be at most {MAX_FIELDS}")
        return data


class ChatMessage(BaseModel):
    """One message of a chat; other fields, such as `tool_calls`, reach the reward model's chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None

    @field_validator("content")
    @classmethod
    def _joined(cls, content: str | list[dict[str, Any]] | None) -> str | None:
        return text_of(content)

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and not (self.model_extra or {}).get("tool_calls"):
            raise ValueError("content: missing or null, must be a text")
        return self


Chat = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


def plain(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages as sent, with the parts of a content joined, and without keys that are null."""
    return plain_messages([message.model_dump(exclude_unset=True) for message in messages])
