"""What the bodies of all protocols share: strict types, unknown fields refused, token ids and messages."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from tools.gateway.rows import check_number

MAX_FIELDS = 64  # of an object; each unknown one is an error message
T = TypeVar("T")
max_rows: ContextVar[int] = ContextVar("max_rows")
"""`gateway.max_rows` in the task of a request; pydantic hands no settings to the classes of its bodies."""


def _few(value: Any) -> Any:
    if isinstance(value, list) and value:
        check_number(len(value), max_rows.get())
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
        """Join text parts to one text, as vLLM does for most templates: others would render Python's own notation."""
        if not isinstance(content, list):
            return content
        for part in content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"a part of type {part.get('type')!r}, only text can be scored")
        return "\n".join(part["text"] for part in content)

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and "tool_calls" not in (self.model_extra or {}):
            raise ValueError("content: missing or null, must be a text")
        return self


Chat = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


def plain(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages as sent, with the parts of a content joined."""
    return [message.model_dump(exclude_unset=True) for message in messages]
