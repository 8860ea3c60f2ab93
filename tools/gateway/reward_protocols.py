"""The protocols of rewards as one table: paths, and the rows of a request with the reply of their rewards.

A row without a reward fails the request, except in the gateway's own `/v1/rewards`, which has a place for its error.

Scores in the protocols of vLLM and Text Embeddings Inference (TEI) are probabilities of the checkpoint's labels, or the
sigmoid of a reward that is not one checkpoint alone; if the request says so, they are the rewards themselves.
"""

import abc
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AliasChoices, Discriminator, Field, Tag, field_validator, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlhf_triton.actor.capture.http import Body, HttpError, read_json, while_connected
from rlhf_triton.client.reward_source import RESERVED, UNAVAILABLE, RewardSource, Row, RowResult, chat_row, text_row
from rlhf_triton.client.served import ServedModel
from rlhf_triton.tools.gateway.rows import BoundedRows, ChatMessages, OneOrMoreTexts, TokenIds, check_all, check_rows
from rlhf_triton.wire.contract import PROBABILITIES, REWARD_MODEL


@dataclass(frozen=True)
class Results:
    """Rewards and errors of a request's rows."""

    rows: list[RowResult]
    served: ServedModel

    def single(self, name: str) -> list[float]:
        """Return the one reward of every row of the field `name`. Raises HttpError if a row has none, or several."""
        check_all(self.rows, name)
        return _single([row.rewards for row in self.rows])


def _single(scores: Sequence[Sequence[float]]) -> list[float]:
    if several := next((len(row) for row in scores if len(row) != 1), 0):
        raise HttpError(
            501,
            f"the reward model returns {several} scores per row, this protocol has one: set reward.attribute_weights, "
            "or use /classify",
        )
    return [row[0] for row in scores]


def activated(scores: Sequence[float]) -> list[float]:
    """Return the sigmoid of one score, or the softmax of several, as vLLM's classifier pooler."""
    exponents = np.array([0.0, *scores] if len(scores) == 1 else scores)
    weights = np.exp(exponents - exponents.max())
    return (weights / weights.sum())[-len(scores) :].tolist()


class ScoredBody(Body, abc.ABC):
    """A body whose rows are scored."""

    @abc.abstractmethod
    def rows(self, served: ServedModel) -> list[Row]:
        """Return the rows. Raises HttpError if the served reward cannot score them."""

    def outputs(self, served: ServedModel) -> set[str]:
        """Return further tensors that the reply needs."""
        return set()

    @abc.abstractmethod
    def reply(self, results: Results) -> Any:
        """Return the body of the reply. Raises HttpError if the protocol cannot express it."""


# ---- the gateway's own: texts, chats and token ids in one request ----


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


# ---- OpenRLHF's `--reward.remote_url http://host:port/get_reward` ----


class OpenRLHFRequest(ScoredBody):
    """A request of OpenRLHF's `SingleTurnAgentExecutor`."""

    query: BoundedRows[str]
    """Prompt and response of each row as one text, with special tokens: see `reward.add_special_tokens`."""
    prompts: BoundedRows[str | None] | None = None
    """The prompts alone, for reward functions."""
    labels: BoundedRows[Any] | None = None
    """Column `label` of each row, for reward functions."""

    def rows(self, served: ServedModel) -> list[Row]:
        for name, column in (("prompts", self.prompts), ("labels", self.labels)):
            if column and len(column) != len(self.query):
                raise HttpError(
                    400, f"{name}: {len(column)} entries, must be one for each of {len(self.query)} queries"
                )
        labels = [{"label": label} for label in self.labels] if self.labels else [{}] * len(self.query)
        rows = []
        for query, prompt, label in zip(self.query, self.prompts or [None] * len(self.query), labels, strict=True):
            if prompt is None or not query.startswith(prompt):  # the tokenizer may have changed the prompt
                rows.append(Row((query,), metadata=label))
            else:
                rows.append(text_row(prompt, query[len(prompt) :], label))
        return rows

    def reply(self, results: Results) -> dict[str, Any]:
        """Return rewards, also as `scores`, by which OpenRLHF filters prompts, and the terms of a weighted sum."""
        rewards = results.single("query")
        terms: dict[str, list[float | None]] = {}
        for i, name in enumerate(results.served.components):
            column = [row.components[i] for row in results.rows]
            if None not in column:  # a term of weight 0 may have failed
                terms[name] = column
        return {"rewards": rewards, "scores": rewards, "extra_logs": terms}


# ---- vLLM's, and TEI's `/rerank` ----


class VllmRequest(ScoredBody):
    """Fields that vLLM's requests share."""

    model: str | None = None
    use_activation: bool | None = None
    """False: rewards as they are; otherwise probabilities of the labels."""
    activation: bool | None = None
    """The name of `use_activation` before vLLM 0.11.2."""

    @property
    def is_activated(self) -> bool:
        """Whether the scores are probabilities."""
        return False not in (self.use_activation, self.activation)

    def outputs(self, served: ServedModel) -> set[str]:
        return {PROBABILITIES} if self.is_activated and served.labels else set()

    def scores(self, results: Results, name: str) -> list[Sequence[float]]:
        """Return probabilities or rewards of the rows of the field `name`. Raises HttpError if a row has none."""
        check_all(results.rows, name)
        if not self.is_activated:
            return [row.rewards for row in results.rows]
        return [row.probabilities if results.served.labels else activated(row.rewards) for row in results.rows]


def _vllm_reply(kind: str, **data: Any) -> dict[str, Any]:
    head = {"id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": REWARD_MODEL}
    return {**head, **data}


class PoolingRequest(VllmRequest):
    """Texts or rows of token ids; or one chat, rendered with the template of the reward model's checkpoint."""

    input: BoundedRows[
        Annotated[
            Annotated[str, Tag("text")] | Annotated[TokenIds, Tag("tokens")],
            Discriminator(lambda value: "text" if isinstance(value, str) else "tokens"),
        ]
    ] = Field(default=[])
    messages: ChatMessages | None = None
    encoding_format: Literal["float"] = "float"

    @field_validator("input", mode="before")
    @classmethod
    def _as_rows(cls, value: Any) -> Any:
        is_row = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
        return [value] if is_row else value

    def rows(self, served: ServedModel) -> list[Row]:
        if self.messages is not None and self.input:
            raise HttpError(400, "input and messages are given; send one of them")
        if self.messages is not None:
            return [chat_row(self.messages, {})]
        return [Row((item,)) if isinstance(item, str) else Row(tokens=item) for item in self.input]

    def reply(self, results: Results) -> dict[str, Any]:
        scores = enumerate(self.scores(results, "input"))
        return _vllm_reply("pool", data=[{"index": i, "object": "pooling", "data": [*row]} for i, row in scores])


class ClassifyRequest(PoolingRequest):
    """The same body as `/pooling`."""

    def reply(self, results: Results) -> dict[str, Any]:
        """Return the scores of a row, and its most likely label if the model has one score per label."""
        labels = results.served.labels
        data = []
        for i, probs in enumerate(self.scores(results, "input")):
            label = labels[probs.index(max(probs))] if len(probs) == len(labels) else None
            data.append({"index": i, "label": label, "probs": [*probs], "num_classes": len(probs)})
        return _vllm_reply("classify", data=data)


def _pairs(first: Sequence[str], second: Sequence[str], served: ServedModel) -> list[Row]:
    if not served.takes_pairs:
        raise HttpError(
            501, "the reward model takes one text per row, text pairs need reward.text: pair; use /v1/rewards"
        )
    return [text_row(*pair, {}) for pair in zip(first, second, strict=True)]


class PairScoresRequest(VllmRequest):
    """Pair the texts of two fields, or one text with each of the other field; accepts both of vLLM's field names."""

    text_1: Annotated[OneOrMoreTexts, Field(validation_alias=AliasChoices("text_1", "queries"))]
    text_2: Annotated[OneOrMoreTexts, Field(validation_alias=AliasChoices("text_2", "documents"))]

    def rows(self, served: ServedModel) -> list[Row]:
        first = self.text_1 * len(self.text_2) if len(self.text_1) == 1 else self.text_1
        if len(first) != len(self.text_2):
            problem = f"{len(first)} texts for {len(self.text_2)} of text_2, must be as many, or one"
            raise HttpError(400, f"text_1: {problem}")
        return _pairs(first, self.text_2, served)

    def reply(self, results: Results) -> dict[str, Any]:
        scores = enumerate(_single(self.scores(results, "text_2")))
        return _vllm_reply("score", data=[{"index": i, "object": "score", "score": score} for i, score in scores])


class RerankRequest(VllmRequest):
    """Documents to rank for a query, as vLLM, Jina and Cohere have it; or `texts`, as TEI has it."""

    query: str
    documents: Annotated[OneOrMoreTexts, Field(validation_alias=AliasChoices("documents", "texts"))]
    top_n: Annotated[int, Field(ge=0)] | None = None
    """How many of the best documents to return; default, and 0: all."""
    return_documents: bool = True
    raw_scores: bool = False
    """TEI's name of `use_activation: false`."""
    return_text: bool = False
    """TEI's name of `return_documents`."""
    is_tei: bool = False

    @model_validator(mode="before")
    @classmethod
    def _of_tei(cls, data: Any) -> Any:
        return {**data, "is_tei": "texts" in data} if isinstance(data, dict) else data

    @property
    def is_activated(self) -> bool:
        """Whether the scores are probabilities."""
        return super().is_activated and not self.raw_scores

    def rows(self, served: ServedModel) -> list[Row]:
        return _pairs([self.query] * len(self.documents), self.documents, served)

    def reply(self, results: Results) -> Any:
        """Return the documents from the best to the worst, in vLLM's form or TEI's."""
        scores = _single(self.scores(results, "texts" if self.is_tei else "documents"))
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        if self.is_tei:
            texts = {i: {"text": self.documents[i]} for i in order} if self.return_text else {}
            return [{"index": i, "score": scores[i], **texts.get(i, {})} for i in order]
        shown = {i: {"document": {"text": self.documents[i]}} for i in order} if self.return_documents else {}
        best = order[: self.top_n or None]
        return _vllm_reply(
            "rerank", results=[{"index": i, "relevance_score": scores[i], **shown.get(i, {})} for i in best]
        )


# ---- the table ----


PROTOCOLS: dict[str, type[ScoredBody]] = {
    "/v1/rewards": RewardsRequest,
    "/get_reward": OpenRLHFRequest,
    "/classify": ClassifyRequest,
    "/pooling": PoolingRequest,
    **dict.fromkeys(("/score", "/v1/score"), PairScoresRequest),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RerankRequest),
}


def reward_routes(source: RewardSource) -> list[Route]:
    """Return the routes of all protocols."""

    async def models(request: Request) -> Response:
        """Name the reward model."""
        return JSONResponse({"object": "list", "data": [{"id": REWARD_MODEL, "object": "model", "owned_by": "triton"}]})

    routes = [Route(path, _endpoint(source, protocol), methods=["POST"]) for path, protocol in PROTOCOLS.items()]
    return [*routes, Route("/v1/models", models)]


def _endpoint(source: RewardSource, protocol: type[ScoredBody]) -> Callable[..., Any]:
    async def scored(body: ScoredBody, request: Request) -> Results:
        served = await source.served()
        rows = body.rows(served)
        check_rows(rows, served)
        request.state.num_rows = len(rows)
        return Results(await source.score(rows, body.outputs(served)), served)

    async def score(request: Request) -> Response:
        body = protocol.read(await read_json(request))
        if (model := getattr(body, "model", None)) not in (None, REWARD_MODEL):
            raise HttpError(404, f"model: {model!r} does not exist, this gateway serves {REWARD_MODEL!r}")
        results = await while_connected(request, scored(body, request))
        request.state.errors = [row.error for row in results.rows if row.error is not None]
        return JSONResponse(body.reply(results))

    return score
