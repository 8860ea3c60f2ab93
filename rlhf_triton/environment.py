"""What a user's environment has: `environment.class` in the YAML."""

from typing import Any, Protocol


class Environment(Protocol):
    """A conversation's partner: one instance for each, made with `environment.options`; docs/environments.md has more.

    Any class with these methods is one, whether it derives from this or not; they may be coroutines.
    """

    def reset(self, row: dict[str, Any]) -> str | None:
        """Begin a conversation on a line of the prompt file, which has a `seed`; what it returns follows the prompt."""

    def step(self, action: str) -> tuple[str, float | None, bool]:
        """Return observation, reward, and whether the conversation is over, for a turn of the policy."""
        ...
