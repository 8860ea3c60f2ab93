"""What the bodies of all protocols share: strict types, unknown fields refused, token ids and messages."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Body(BaseModel):
    """Base class of request bodies. A number in a string is no number, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class ChatMessage(BaseModel):
    """One message of a chat; other fields, such as `tool_calls`, reach the reward model's chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[dict[str, Any]] | None = None


Chat = Annotated[list[ChatMessage], Field(min_length=1)]


def plain(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages as sent."""
    return [message.model_dump(exclude_unset=True) for message in messages]
