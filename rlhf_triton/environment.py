"""The interface of a user's environment (`environment.class` in the YAML)."""

from typing import Any, Protocol


class Environment(Protocol):
    """The partner of one conversation, constructed with `environment.options`; see docs/environments.md.

    Any class with these methods is an environment; it need not derive from this one. The methods may be coroutines.
    """

    def reset(self, row: dict[str, Any]) -> str | None:
        """Start a conversation for a row of the prompt file, plus a `seed`; return a text to append to the prompt."""

    def step(self, action: str) -> tuple[str, float | None, bool]:
        """Process a turn of the policy; return the observation, the reward, and whether the conversation is over."""
        ...


class EnvironmentLost(ConnectionError):
    """Raise it from an environment that is lost through no fault of the policy: its conversation restarts.

    Any other exception is a failure of the conversation: a restart after an error that an action has caused would
    repeat the conversation until the policy acts otherwise, which biases the samples.
    """
