"""vLLM's `/classify` and `/pooling` for sequence rewards, `/score` for text pairs, and `/v1/models`.

As in vLLM, these are the probabilities of the checkpoint's labels, unless the request has `use_activation: false`; then
they are the rewards themselves. Of a reward that is not one checkpoint alone, it is the sigmoid. `usage` counts only
tokens that the client sent: texts are tokenised by the server.
"""

from __future__ import annotations

import base64
import math
import struct
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal

from fastapi import APIRouter
from pydantic import AliasChoices, Discriminator, Field, Tag

from tools.gateway.rows import Body, Chat, GatewayError, Row, Rows, T, TokenIds, chat_row, check_all, plain, text_row
from tools.gateway.scoring import RewardSource


def _kind_of(value: Any) -> str:
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else ""
    return "texts" if isinstance(first, str) else "rows" if isinstance(first, list) else "tokens"


Tokens = Annotated[TokenIds, Field(min_length=1)]
Input = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Rows[str], Tag("texts")]
    | Annotated[Tokens, Tag("tokens")]
    | Annotated[Rows[Tokens], Tag("rows")],
    Discriminator(_kind_of),
]


class PoolingOptions(Body):
    """Fields that completion and chat requests share; those that only vLLM's engine needs have no effect."""

    model: str | None = None
    use_activation: bool | None = None
    """False: rewards as they are; otherwise probabilities of the labels."""
    activation: bool | None = None
    """The name of `use_activation` before vLLM 0.11.2."""
    task: Literal["classify"] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    """How `/pooling` returns rewards; `base64` is of little-endian FP32."""
    truncate_prompt_tokens: Literal[-1] | None = None
    """The server truncates a text to the model's length, as -1 requests, but no chat and no pair: that is an error."""
    user: str | None = None
    request_id: str | None = None
    priority: int = 0


class PoolingCompletionRequest(PoolingOptions):
    """Texts or rows of token ids."""

    input: Input
    add_special_tokens: bool | None = None
    """Must be as `reward.add_special_tokens`."""

    def rows(self) -> list[Row]:
        """Return the rows to score."""
        items: list[Any] = [self.input] if _kind_of(self.input) in ("text", "tokens") else [*self.input]
        return [Row((item,)) if isinstance(item, str) else Row(tokens=item) for item in items]


class PoolingChatRequest(PoolingOptions):
    """One chat, rendered with the template of the reward model's checkpoint."""

    messages: Chat
    add_special_tokens: Literal[False] | None = None
    add_generation_prompt: Literal[False] = False
    continue_final_message: Literal[False] = False

    def rows(self) -> list[Row]:
        """Return the row to score."""
        return [chat_row(plain(self.messages), {})]


PoolingRequest = Annotated[
    Annotated[PoolingCompletionRequest, Tag("completion")] | Annotated[PoolingChatRequest, Tag("chat")],
    Discriminator(lambda data: "chat" if isinstance(data, dict) and "messages" in data else "completion"),
]


Texts = Annotated[
    Annotated[str, Tag("text")] | Annotated[Rows[str], Field(min_length=1), Tag("texts")], Discriminator(_kind_of)
]


class PairScoresRequest(PoolingOptions):
    """Text pairs: as many in both fields, or one text for all of the other field; under any of vLLM's names."""

    text_1: Annotated[Texts, Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))]
    text_2: Annotated[Texts, Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))]

    def rows(self) -> list[Row]:
        """Return the rows to score. Raises GatewayError if the numbers of texts do not fit."""
        first, second = ([texts] if isinstance(texts, str) else texts for texts in (self.text_1, self.text_2))
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise GatewayError(400, f"text_1: {len(first)} texts for {len(second)} of text_2, must be as many, or one")
        return [text_row(*pair, {}) for pair in zip(first, second, strict=True)]


class TokenUsage(Body):
    """Tokens that the client sent."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class ClassificationData(Body):
    """Scores of one row."""

    index: int
    label: str | None = None
    probs: list[float]
    num_classes: int

    @classmethod
    def of(cls, index: int, probs: list[float], labels: Sequence[str]) -> ClassificationData:
        """Name the most likely label, if there is one score for each."""
        label = labels[probs.index(max(probs))] if len(probs) == len(labels) else None
        return cls(index=index, label=label, probs=probs, num_classes=len(probs))


class PoolingData(Body):
    """Scores of one row: numbers, or base64."""

    index: int
    object: str = "pooling"
    data: list[float] | str


class PairScore(Body):
    """Score of one pair."""

    index: int
    object: str = "score"
    score: float


class VllmReply(Body, Generic[T]):
    """A reply, with one entry of `data` per row."""

    id: str
    object: str = "list"
    created: int
    model: str
    usage: TokenUsage
    data: list[T]


def vllm_router(source: RewardSource, model: str) -> APIRouter:
    """Return the routes; `model` is the only name that clients may use. A row without a reward fails the request."""
    router = APIRouter(tags=["vLLM"])

    async def scores_of(request: PoolingOptions, rows: list[Row]) -> list[list[float]]:
        if request.model not in (None, model):
            raise GatewayError(404, f"The model `{request.model}` does not exist; this gateway serves `{model}`.")
        return await _scores(source, request, rows)

    def common(kind: str, rows: list[Row]) -> dict[str, Any]:
        count = sum(len(row.tokens or ()) for row in rows)
        usage = TokenUsage(prompt_tokens=count, total_tokens=count)
        return {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model, "usage": usage}

    @router.post("/classify")
    async def classify(request: PoolingRequest) -> VllmReply[ClassificationData]:
        scores = await scores_of(request, rows := request.rows())
        labels = (await source.served()).labels
        data = [ClassificationData.of(i, row, labels) for i, row in enumerate(scores)]
        return VllmReply(**common("classify", rows), data=data)

    @router.post("/pooling")
    async def pooling(request: PoolingRequest) -> VllmReply[PoolingData]:
        scores = await scores_of(request, rows := request.rows())
        is_binary = request.encoding_format == "base64"
        data = [PoolingData(index=i, data=_base64(row) if is_binary else row) for i, row in enumerate(scores)]
        return VllmReply(**common("pool", rows), data=data)

    @router.post("/score")
    async def score(request: PairScoresRequest) -> VllmReply[PairScore]:
        if not (await source.served()).takes_pairs:
            raise GatewayError(501, "the reward model takes one text per row: /score needs reward.text: pair")
        scores = await scores_of(request, rows := request.rows())
        if len(scores[0]) != 1:
            raise GatewayError(501, f"the reward model has {len(scores[0])} labels, /score has one: use /classify")
        data = [PairScore(index=i, score=row[0]) for i, row in enumerate(scores)]
        return VllmReply(**common("score", rows), data=data)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "triton", "root": model}
        return {"object": "list", "data": [card]}

    return router


def activated(scores: Sequence[float]) -> list[float]:
    """Return the sigmoid of one score, or the softmax of several, as vLLM's classifier pooler."""
    exponents = (0.0, scores[0]) if len(scores) == 1 else scores
    largest = max(exponents)
    weights = [math.exp(exponent - largest) for exponent in exponents]
    return [weight / sum(weights) for weight in weights[-len(scores) :]]


async def _scores(source: RewardSource, request: PoolingOptions, rows: list[Row]) -> list[list[float]]:
    served = await source.served()
    asked = request.add_special_tokens if isinstance(request, PoolingCompletionRequest) else None
    if asked not in (None, served.adds_special_tokens):
        told = f"but the server tokenises with reward.add_special_tokens {served.adds_special_tokens}"
        raise GatewayError(400, f"add_special_tokens: {asked}, {told}")
    given = (request.use_activation, request.activation)
    activate = next((value for value in given if value is not None), True)
    results = await source.score(rows, probabilities=activate and bool(served.labels))
    check_all(results, "input")
    if not activate:
        return [[*result.rewards] for result in results]
    return [[*result.probabilities] if served.labels else activated(result.rewards) for result in results]


def _base64(row: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(row)}f", *row)).decode()
