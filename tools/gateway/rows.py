"""Rows to score, as every protocol of the gateway builds them, and their results."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from typing_extensions import Self

from rlhf_triton.actor.capture.http import HttpError
from rlhf_triton.rewards.function import PROMPT_KEY, RESPONSE_KEY, with_reply
from rlhf_triton.wire.messages import plain_messages

MAX_ROWS = 4096  # of one request
MOST_PROBLEMS = 3  # of an invalid body, in its error message
WITHOUT_VALUE = ("missing", "too_short", "value_error")  # pydantic's problems that no value explains
NOT_HONOURED = (  # parameters of the protocols that would change a score
    *("truncate", "truncate_prompt_tokens", "truncation", "truncation_side", "truncation_direction"),
    *("max_tokens_per_doc", "max_chunks_per_doc"),
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
)
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
    times_us: tuple[int, int] | None = None
    """In the server's queue and in the forward pass, if requested."""
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


# What the bodies of all protocols share: strict types, unknown fields refused, token ids and messages.


T = TypeVar("T")


def _few(value: Any) -> Any:
    if isinstance(value, list) and value:
        check_number(len(value))
    return value


# A list stops at its first invalid item: the errors of millions would need gigabytes.
Rows = Annotated[list[T], Field(fail_fast=True), BeforeValidator(_few)]
Texts = Annotated[Rows[str], Field(min_length=1), BeforeValidator(lambda one: [one] if isinstance(one, str) else one)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
# Other keys of a message, such as `tool_calls`, reach the reward model's chat template.
Chat = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True), AfterValidator(plain_messages)]


class Body(BaseModel):
    """Base class of request bodies. A number in a string is no number, and an unknown field is an error."""

    model_config = ConfigDict(extra="ignore", strict=True)

    @classmethod
    def read(cls, data: Any) -> Self:
        """Return a body from JSON. Raises HttpError with its first problems."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            lines = [_problem(item) for item in error.errors(include_url=False)[:MOST_PROBLEMS]]
            raise HttpError(400, "; ".join(lines)) from None

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {*cls.model_fields}
        for info in cls.model_fields.values():
            if isinstance(info.validation_alias, AliasChoices):
                known.update(map(str, info.validation_alias.choices))
        for name, value in data.items():
            if name in NOT_HONOURED and value is not None and value is not False:
                raise ValueError(
                    f"{name} is {reprlib.repr(value)}, but no row is truncated, and a chat is rendered with the reward "
                    "model's template and ends as it is sent; leave it out"
                )
            if name not in known and name not in NOT_HONOURED:
                raise ValueError(f"unknown field {reprlib.repr(name)}; known: {', '.join(sorted(known))}")
        return data


def _problem(item: Any) -> str:
    """Return one of pydantic's problems: its field, what is wrong, and the value."""
    place = ""
    for part in item["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else part
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] not in WITHOUT_VALUE:
        message += f", got {reprlib.repr(item['input'])}"
    return f"{place or 'body'}{'' if message.startswith(('[', ':')) else ': '}{message}"
