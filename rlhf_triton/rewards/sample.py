"""The argument of a reward function."""

from dataclasses import dataclass, field
from typing import Any

PROMPT_KEY = "prompt"  # reserved metadata keys: the actor stores prompt (or a chat's messages) and response there
RESPONSE_KEY = "response"
MESSAGES_KEY = "messages"
REPLY_KEY = "reply_messages"  # the reply with all its keys; with an environment, all messages after the prompt


@dataclass(frozen=True)
class Sample:
    """One response to score."""

    text: str
    """Prompt and response as one text; for a chat prompt only the response."""
    tokens: list[int] | None = field(default_factory=list)
    """Token ids as sent; for a sentence, ids from the reward's tokenizer without added special tokens, at most 32768.

    None if the server has no tokenizer, which is possible if another trainer sends texts to functions only.
    """
    metadata: dict[str, Any] = field(default_factory=dict)
    """Columns of the prompt's row. The actor adds `response`, and `prompt` or (chats) `messages`.

    `reply_messages` contains a chat's messages from the first reply on, if there is an environment, or the reply's
    message, if it has more than content or follows a message of the assistant.
    """

    @property
    def prompt(self) -> str | None:
        """Text of the prompt, or content of a chat's last message; None if the caller did not send it."""
        messages = self.metadata.get(MESSAGES_KEY)
        if not isinstance(messages, list):
            return self.metadata.get(PROMPT_KEY)
        return (messages[-1].get("content") or "") if messages else ""

    @property
    def response(self) -> str | None:
        """Text of the response; None if the caller did not send it."""
        return self.metadata.get(RESPONSE_KEY)
