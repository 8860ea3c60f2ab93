"""Conversations with environments, as a run's JSON lines have them, for the page."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ShownMessage:
    """One message of a conversation."""

    speaker: str
    """`policy`, `environment`, or the tool that answers."""
    text: str
    reward: float | None
    """The environment's reward for a turn of the policy; None for other messages."""
    value: float | None
    """The critic's mean value over the turn's tokens; None if it has none."""


@dataclass(frozen=True)
class ReportConversation:
    """A conversation: the prompt with the environment's first observation, what followed, and how it ended."""

    prompt: str
    messages: list[ShownMessage]
    ending: str
    """`ended`, or why it did not end on its own."""
    has_failed: bool

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "ReportConversation | None":
        """Return the conversation of a line of samples.jsonl or rollouts.jsonl; None if it has none."""
        if "turns" not in row:
            return None
        # The last turns of the policy are those of the row; others before them are trained in other rows.
        turn = sum(message["role"] == "assistant" for message in row["turns"])
        messages = list[ShownMessage]()
        columns = [row["turn_rewards"][::-1], row.get("turn_values", [])[::-1]]
        for message in row["turns"]:
            if message["role"] == "assistant":
                turn -= 1
                reward, value = (column[turn] if turn < len(column) else None for column in columns)
                messages.append(ShownMessage("policy", message["content"].strip(), reward, value))
            else:
                messages.append(ShownMessage(message.get("name") or "environment", message["content"], None, None))
        endings = (f"{name}: {row[name]}" for name in ("error", "truncated") if name in row)
        return cls(row.get("question", row["prompt"]), messages, next(endings, "ended"), "error" in row)
