"""Messages of a chat."""

from typing import Any


def user(content: str) -> dict[str, Any]:
    """Return what a user says."""
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    """Return a reply; `more`: its further fields."""
    return {"role": "assistant", "content": content, **more}
