"""Rows to score, as every protocol of the gateway builds them, and their results."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rlhf_triton.errors import RlhfError
from rlhf_triton.rewards.function import PROMPT_KEY, RESPONSE_KEY, with_reply
from rlhf_triton.wire.messages import plain_messages

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
            f"the reward model returns {several} rewards per row, this protocol has one: set reward.attribute_weights",
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
    not_honoured: ClassVar[Mapping[str, str]] = {}
    """Known fields that would change a score and cannot -> why; they may only be null or false."""

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = [name for field, info in cls.model_fields.items() for name in _names(field, info.validation_alias)]
        fields = {}
        for name, value in data.items():
            if name in cls.not_honoured:
                if value is not None and value is not False:
                    raise ValueError(f"{name} is {reprlib.repr(value)}, but {cls.not_honoured[name]}; leave it out")
            elif name in known:
                fields[name] = value
            else:
                near = difflib.get_close_matches(name[:100], known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
                raise ValueError(f"unknown field {reprlib.repr(name)}; {hint}")
        return fields


def _names(field: str, alias: Any) -> list[str]:
    return [str(name) for name in alias.choices] if isinstance(alias, AliasChoices) else [field]


# Other keys of a message, such as `tool_calls`, reach the reward model's chat template.
Chat = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True), AfterValidator(plain_messages)]
