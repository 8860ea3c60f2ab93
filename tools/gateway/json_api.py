"""The gateway's own JSON API: texts, chats and token ids in one request, an error for each row that has no reward."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, model_validator

from python_backend.rewards.function import PROMPT_KEY, REPLY_KEY, RESPONSE_KEY
from python_backend.wire.contract import MESSAGES
from tools.gateway.rows import Body, Chat, GatewayError, Row, Rows, TokenIds, chat_row, check_all, plain, reply_row
from tools.gateway.scoring import RewardSource

UNAVAILABLE = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
RESERVED = {PROMPT_KEY, RESPONSE_KEY, REPLY_KEY, MESSAGES}


class RewardInput(Body):
    """A row: exactly one of `text`, `messages`, `tokens`, or `prompt` with `response`."""

    text: str | None = None
    """Prompt and response as one text."""
    prompt: str | Chat | None = None
    """A text, or the messages of a chat."""
    response: str | None = None
    """The response to `prompt`."""
    messages: Chat | None = None
    """A whole chat, rendered with the reward model's chat template."""
    tokens: TokenIds | None = None
    """Ids of the reward model's tokenizer, special tokens included; no padding."""
    prompt_length: Annotated[int, Field(ge=0)] = 0
    """Leading `tokens` that belong to the prompt, in which a process reward looks for no steps."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Columns for reward functions (`sample.metadata`)."""

    @model_validator(mode="after")
    def _one_kind(self) -> RewardInput:
        given = [name for name in ("text", "prompt", "messages", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"has {' and '.join(given) or 'no content'}, must have one of text, prompt, messages, tokens"
            )
        if (self.prompt is None) != (self.response is None):
            raise ValueError("prompt and response belong together")
        if self.prompt_length and self.prompt_length >= len(self.tokens or ()):
            raise ValueError(f"prompt_length: {self.prompt_length}, must be less than the number of tokens")
        if taken := RESERVED & self.metadata.keys():
            raise ValueError(f"metadata.{sorted(taken)[0]}: a reserved name; use the row's own field or another name")
        return self

    def row(self) -> Row:
        """Return the row to score."""
        if self.messages is not None:
            return chat_row(plain(self.messages), self.metadata)
        if self.prompt is not None and self.response is not None:
            prompt = self.prompt if isinstance(self.prompt, str) else plain(self.prompt)
            return reply_row(prompt, self.response, self.metadata)
        return Row((self.text or "",), self.tokens, self.metadata, self.prompt_length)


class RewardsRequest(Body):
    """Rows to score, of any kinds and lengths."""

    inputs: Annotated[Rows[RewardInput], Field(min_length=1)]
    probabilities: bool = False
    """Return the probabilities of the reward model's labels."""
    timing: bool = False
    """Return how long each row waited in the server's queue, and how long its forward pass took."""


class RewardsReply(Body):
    """One entry per row of the request in each list."""

    rewards: list[float | list[float] | None]
    """A list of all attributes if `reward.merge_attributes` is false; None where there is no reward."""
    errors: list[str | None]
    """Why there is no reward."""
    components: dict[str, list[float | None]]
    """Terms of a weighted sum of rewards, by name."""
    weights_versions: list[int | None]
    """Version of the reward model's weights, None if the server names none."""
    labels: list[str] | None = None
    """Names of the labels; only with `probabilities`."""
    probabilities: list[list[float] | None] | None = None
    """Of the labels, in the order of `labels`, from scores before merging and standardisation."""
    queue_us: list[int | None] | None = None
    """Microseconds from the arrival in the reward model's process to the forward pass; only with `timing`."""
    compute_us: list[int | None] | None = None
    """Microseconds of the forward pass, which several rows share; only with `timing`."""


def json_router(source: RewardSource) -> APIRouter:
    """Return the route `/v1/rewards`. It fails with 503 or 504 only if no server could score any row in time."""
    router = APIRouter(tags=["JSON"])

    @router.post("/v1/rewards", response_model_exclude_none=True)
    async def rewards(request: RewardsRequest) -> RewardsReply:
        served = await source.served()
        wanted = {"probabilities": request.probabilities, "timing": request.timing}
        for name, known in (("probabilities", served.labels), ("timing", served.is_timed)):
            if wanted[name] and not known:
                raise GatewayError(
                    HTTPStatus.BAD_REQUEST, f"{name}: the served reward has none, it is not one checkpoint alone"
                )
        results = await source.score([item.row() for item in request.inputs], **wanted)
        if all(result.status in UNAVAILABLE for result in results):
            check_all(results, "inputs")
        times = [result.times_us or (None, None) for result in results]
        return RewardsReply(
            rewards=[
                result.rewards[0] if len(result.rewards) == 1 else [*result.rewards] or None for result in results
            ],
            errors=[result.error for result in results],
            components={
                name: [result.components[i] if result.components else None for result in results]
                for i, name in enumerate(served.components)
            },
            weights_versions=[result.weights_version for result in results],
            labels=[*served.labels] if request.probabilities else None,
            probabilities=[[*result.probabilities] or None for result in results] if request.probabilities else None,
            queue_us=[queued for queued, _ in times] if request.timing else None,
            compute_us=[took for _, took in times] if request.timing else None,
        )

    return router
