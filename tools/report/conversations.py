"""Conversations with environments, as a run's JSON lines have them, for the page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_triton.actor.data.chat import HERMES, tool_calls


@dataclass(frozen=True)
class Said:
    """One message of a conversation."""

    who: str
    """`policy`, `environment`, or the tool that answers."""
    parts: list[tuple[str, bool]]
    """Pieces of the text, each with a flag for tool calls."""
    reward: float | None
    """The environment's reward for a turn of the policy; None for other messages."""
    value: float | None
    """The critic's mean value over the turn's tokens; None if it has none."""
    tokens: Sequence[tuple[str, float, float]] = ()
    """Each token's text, value before it, and advantage; of training rollouts."""


@dataclass(frozen=True)
class Conversation:
    """A conversation: the prompt with the environment's first observation, what followed, and how it ended."""

    prompt: str
    said: list[Said]
    ending: str
    """`ended`, or why it did not end on its own."""
    has_failed: bool

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Conversation | None":
        """Return the conversation of a line of samples.jsonl or rollouts.jsonl; None if it has none."""
        if "turns" not in row:
            return None
        # The last turns of the policy are those of the row; others before them are trained in other rows.
        left, said = sum(message["role"] == "assistant" for message in row["turns"]), list[Said]()
        columns = [row["turn_rewards"][::-1], row.get("turn_values", [])[::-1], row.get("turn_tokens", [])[::-1]]
        for message in row["turns"]:
            if message["role"] == "assistant":
                left -= 1
                reward, value, tokens = (column[left] if left < len(column) else None for column in columns)
                said.append(Said("policy", _parts(message["content"]), reward, value, tokens or ()))
            else:
                said.append(Said(message.get("name") or "environment", [(message["content"], False)], None, None))
        endings = (f"{name}: {row[name]}" for name in ("error", "truncated") if name in row)
        return cls(row.get("question", row["prompt"]), said, next(endings, "ended"), "error" in row)


def _parts(text: str) -> list[tuple[str, bool]]:
    """Split a turn of the policy into text and calls; a call that cannot be read stays as the policy wrote it."""
    parts = []
    for i, piece in enumerate(HERMES.split(text)):
        if i % 2:
            call = tool_calls(f"<tool_call>{piece}</tool_call>")[0]
            arguments = ", ".join(f"{name}={json.dumps(value)}" for name, value in (call.arguments or {}).items())
            parts.append((piece.strip() if call.error else f"{call.name}({arguments})", True))
        elif piece.strip():
            parts.append((piece.strip(), False))
    return parts
