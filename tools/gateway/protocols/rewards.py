"""The gateway's own protocol, `/v1/rewards`: texts, chats and token ids in one request, and a place for each error."""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from rlhf_triton.actor.capture.http import Body
from rlhf_triton.client.reward_source import RESERVED, UNAVAILABLE, Row, chat_row, text_row
from rlhf_triton.client.served import ServedModel
from rlhf_triton.tools.gateway.protocols.scored_body import Results, ScoredBody
from rlhf_triton.tools.gateway.rows import BoundedRows, ChatMessages, TokenIds, check_all


class RewardInput(Body):
    """A row: exactly one of `text`, `messages`, `tokens`, or `prompt` with `response`."""

    text: str | None = None
    """Prompt and response as one text."""
    prompt: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[ChatMessages, Tag("chat")],
            Discriminator(lambda value: "chat" if isinstance(value, list) else "text"),
        ]
        | None
    ) = None
    """A text, or the messages of a chat."""
    response: str | None = None
    """The response to `prompt`."""
    messages: ChatMessages | None = None
    """A whole chat, rendered with the reward model's chat template."""
    tokens: TokenIds | None = None
    """Ids of the reward model's tokenizer, special tokens included; no padding."""
    prompt_length: Annotated[int, Field(ge=0)] = 0
    """Leading `tokens` that belong to the prompt, in which a process reward looks for no steps."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Columns for reward functions (`sample.metadata`)."""

    @model_validator(mode="after")
    def _one_kind(self) -> "RewardInput":
        contents = [name for name in ("text", "prompt", "messages", "tokens") if getattr(self, name) is not None]
        if len(contents) != 1:
            raise ValueError(
                f"has {' and '.join(contents) or 'no content'}, must have one of text, prompt, messages, tokens"
            )
        if (self.prompt is None) != (self.response is None):
            raise ValueError("has only one of prompt and response; send both")
        if self.prompt_length and self.prompt_length >= len(self.tokens or ()):
            raise ValueError(f"prompt_length: {self.prompt_length}, must be less than the number of tokens")
        if reserved := RESERVED & self.metadata.keys():
            raise ValueError(
                f"metadata.{sorted(reserved)[0]}: a reserved name; use the row's own field or another name"
            )
        return self

    def row(self) -> Row:
        """Return the row to score."""
        if self.messages is not None:
            return chat_row(self.messages, self.metadata)
        if isinstance(self.prompt, list):
            return chat_row([*self.prompt, {"role": "assistant", "content": self.response}], self.metadata)
        if self.prompt is not None:
            return text_row(self.prompt, self.response or "", self.metadata)
        return Row((self.text or "",), self.tokens, self.metadata, self.prompt_length)


class RewardsRequest(ScoredBody):
    """Rows to score, of any kinds and lengths."""

    inputs: Annotated[BoundedRows[RewardInput], Field(min_length=1)]

    def rows(self, served: ServedModel) -> list[Row]:
        return [item.row() for item in self.inputs]

    def reply(self, results: Results) -> dict[str, Any]:
        """Return one entry per row in each list. Raises HttpError only if no server could score any row in time."""
        rows = results.rows
        names = results.served.components
        if all(result.status in UNAVAILABLE for result in rows):
            check_all(rows, "inputs")
        return {
            "rewards": [row.rewards[0] if len(row.rewards) == 1 else [*row.rewards] or None for row in rows],
            "errors": [row.error for row in rows],
            "components": {
                name: [row.components[i] if row.components else None for row in rows] for i, name in enumerate(names)
            },
            "weights_versions": [row.weights_version for row in rows],
        }
