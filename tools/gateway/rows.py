"""Rows to score, as every protocol of the gateway builds them, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from rlhf_triton.actor.capture.http import HttpError
from rlhf_triton.rewards.function import PROMPT_KEY, RESPONSE_KEY, with_reply
from rlhf_triton.wire.messages import plain_messages

MAX_ROWS = 4096  # of one request
Message = dict[str, Any]


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


@dataclass(frozen=True, kw_only=True)
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
    error: str | None = None
    status: HTTPStatus = HTTPStatus.OK
    """Status of the HTTP error if the protocol has no place for the error of a single row."""


def check_number(number: int) -> None:
    """Raise HttpError unless a request of this number of rows may be scored."""
    if not 1 <= number <= MAX_ROWS:
        raise HttpError(413 if number else 400, f"{number} rows, must be 1 to {MAX_ROWS} per request")


def check_all(results: Sequence[RowResult], name: str) -> None:
    """Raise HttpError with the first row's error, if any row has no reward; `name`: the field with the rows."""
    for i, result in enumerate(results):
        if result.error is not None:
            where = f"{name}[{i}]: " if len(results) > 1 else ""
            raise HttpError(result.status, where + result.error)


# What the bodies of several protocols have: rows, token ids and messages.


T = TypeVar("T")


def _check_row_count(value: Any) -> Any:
    if isinstance(value, list) and value:
        check_number(len(value))
    return value


# A list stops at its first invalid item: the errors of millions would need gigabytes.
Rows = Annotated[list[T], Field(fail_fast=True), BeforeValidator(_check_row_count)]
Texts = Annotated[Rows[str], Field(min_length=1), BeforeValidator(lambda one: [one] if isinstance(one, str) else one)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
# Other keys of a message, such as `tool_calls`, reach the reward model's chat template.
Chat = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True), AfterValidator(plain_messages)]
