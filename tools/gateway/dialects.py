"""The protocols of rewards as one table: paths, the rows of a request, and the reply of their rewards.

A row without a reward fails the request,
except in the gateway's own `/v1/rewards`, which has a place for its error.

vLLM's scores, and those of Text Embeddings Inference (TEI), are probabilities of the checkpoint's labels, or, of a
reward that is not one checkpoint alone, its sigmoid; the rewards themselves if the request says so. A reply has `usage`
only if the client sent tokens: texts are tokenised by the server, which does not count them.
"""

import base64
import math
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import AliasChoices, Discriminator, Field, Tag, model_validator

from rlhf_triton.client.served import ServedModel
from rlhf_triton.rewards.function import PROMPT_KEY, REPLY_KEY, RESPONSE_KEY
from rlhf_triton.tools.gateway.rows import (
    Body,
    Chat,
    GatewayError,
    Row,
    RowResult,
    Rows,
    TokenIds,
    chat_row,
    check_all,
    reply_row,
    sequence_rewards,
    text_row,
)
from rlhf_triton.tools.gateway.scoring import RewardSource
from rlhf_triton.wire.contract import MESSAGES

UNAVAILABLE = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
TOO_LONG = "no row is truncated: one that is too long for the model is an error"
TEMPLATE = "a chat is rendered with the template of the reward model's checkpoint, and ends as it is sent"
NOT_HONOURED = {  # parameters of the protocols that would change a score -> why they do not
    "truncate": TOO_LONG,
    "truncate_prompt_tokens": TOO_LONG,
    "truncation": TOO_LONG,
    "truncation_side": TOO_LONG,
    "truncation_direction": TOO_LONG,
    "max_tokens_per_doc": TOO_LONG,
    "max_chunks_per_doc": TOO_LONG,
    "chat_template": TEMPLATE,
    "chat_template_kwargs": TEMPLATE,
    "add_generation_prompt": TEMPLATE,
    "continue_final_message": TEMPLATE,
}
RESERVED = {PROMPT_KEY, RESPONSE_KEY, REPLY_KEY, MESSAGES}


class ScoredBody(Body):
    """A body whose `rows(served)` are scored."""

    not_honoured = NOT_HONOURED

    @property
    def is_activated(self) -> bool:
        """Whether the reply has probabilities instead of rewards."""
        return False

    def outputs(self, served: ServedModel) -> dict[str, bool]:
        """Return further outputs that the reply needs, as keywords of `RewardSource.score`. Raises GatewayError."""
        return {"probabilities": self.is_activated and bool(served.labels)}


@dataclass(frozen=True, kw_only=True)
class Results:
    """Rewards and errors of a request's rows."""

    rows: list[Row]
    results: list[RowResult]
    served: ServedModel
    model: str  # its name in vLLM's protocol


def _kind_of(value: Any) -> str:
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else ""
    return "<texts>" if isinstance(first, str) else "<rows>" if isinstance(first, list) else "<tokens>"


Prompt = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Chat, Tag("<chat>")],
    Discriminator(lambda value: "<chat>" if isinstance(value, list) else "<text>"),
]


# ---- the gateway's own: texts, chats and token ids in one request ----


class RewardInput(Body):
    """A row: exactly one of `text`, `messages`, `tokens`, or `prompt` with `response`."""

    text: str | None = None
    """Prompt and response as one text."""
    prompt: Prompt | None = None
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
    def _one_kind(self) -> "RewardInput":
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
            return chat_row(self.messages, self.metadata)
        if self.prompt is not None and self.response is not None:
            return reply_row(self.prompt, self.response, self.metadata)
        return Row((self.text or "",), self.tokens, self.metadata, self.prompt_length)


class RewardsRequest(ScoredBody):
    """Rows to score, of any kinds and lengths."""

    inputs: Annotated[Rows[RewardInput], Field(min_length=1)]
    probabilities: bool = False
    """Return the probabilities of the reward model's labels."""
    timing: bool = False
    """Return how long each row waited in the server's queue, and how long its forward pass took."""

    def rows(self, served: ServedModel) -> list[Row]:
        """Return the rows."""
        return [item.row() for item in self.inputs]

    def outputs(self, served: ServedModel) -> dict[str, bool]:
        """Return what the request has flags for. Raises GatewayError if the served reward has none."""
        wanted = {"probabilities": self.probabilities, "timing": self.timing}
        for name, known in (("probabilities", served.labels), ("timing", served.is_timed)):
            if wanted[name] and not known:
                raise GatewayError(400, f"{name}: the served reward has none: it is a sum of terms, not one model")
        return wanted


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


def rewards_reply(request: RewardsRequest, found: Results) -> RewardsReply:
    """Return rewards and errors. Raises GatewayError, 503 or 504, only if no server could score any row in time."""
    results, served = found.results, found.served
    if all(result.status in UNAVAILABLE for result in results):
        check_all(results, "inputs")
    times = [result.times_us or (None, None) for result in results]
    return RewardsReply(
        rewards=[result.rewards[0] if len(result.rewards) == 1 else [*result.rewards] or None for result in results],
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


# ---- OpenRLHF's `--reward.remote_url http://host:port/get_reward`, slime's `--rm-url http://host:port/remote_rm` ----


class OpenRLHFRequest(ScoredBody):
    """A request of OpenRLHF's `SingleTurnAgentExecutor`."""

    query: Rows[str]
    """Prompt and response of each row as one text, with special tokens: see `reward.add_special_tokens`."""
    prompts: Rows[str] | None = None
    """The prompts alone, for reward functions."""
    labels: Rows[Any] | None = None
    """Column `label` of each row, for reward functions."""

    def rows(self, served: ServedModel) -> list[Row]:
        """Return the rows. Raises GatewayError if the columns differ in their number of entries."""
        for name, column in (("prompts", self.prompts), ("labels", self.labels)):
            if column is not None and len(column) != len(self.query):
                raise GatewayError(
                    400, f"{name}: {len(column)} entries, must be one for each of {len(self.query)} queries"
                )
        prompts: list[str | None] = [*self.prompts] if self.prompts else [None] * len(self.query)
        labels = [{"label": label} for label in self.labels] if self.labels else [{}] * len(self.query)
        return [_openrlhf_row(*columns) for columns in zip(self.query, prompts, labels, strict=True)]


def _openrlhf_row(query: str, prompt: str | None, label: dict[str, Any]) -> Row:
    if prompt is None or not query.startswith(prompt):  # the tokenizer may have changed the prompt
        return Row((query,), metadata=label)
    return text_row(prompt, query[len(prompt) :], label)


def openrlhf_reply(_: OpenRLHFRequest, found: Results) -> dict[str, Any]:
    """Return rewards, the same numbers as `scores`, by which OpenRLHF filters prompts, and terms of a weighted sum."""
    rewards = sequence_rewards(found.results, "query")
    terms: dict[str, list[float | None]] = {}
    for i, name in enumerate(found.served.components):
        column = [result.components[i] for result in found.results]
        if None not in column:  # a term of weight 0 may have failed
            terms[name] = column
    return {"rewards": rewards, "scores": rewards, "extra_logs": terms}


class SlimeRequest(ScoredBody):
    """A request of slime's `remote_rm`: one sample."""

    prompt: Prompt
    """A text, or the messages of a chat."""
    response: str
    label: Any = None
    """Column `label`, for reward functions."""

    def rows(self, served: ServedModel) -> list[Row]:
        """Return the row."""
        return [reply_row(self.prompt, self.response, {"label": self.label})]


def slime_reply(_: SlimeRequest, found: Results) -> float:
    """Return the reward alone, a JSON number."""
    return sequence_rewards(found.results, "response")[0]


# ---- vLLM's, and TEI's `/rerank` ----


Tokens = Annotated[TokenIds, Field(min_length=1)]
Input = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Rows[str], Tag("<texts>")]
    | Annotated[Tokens, Tag("<tokens>")]
    | Annotated[Rows[Tokens], Tag("<rows>")],
    Discriminator(_kind_of),
]
Texts = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Rows[str], Field(min_length=1), Tag("<texts>")],
    Discriminator(lambda value: "<texts>" if isinstance(value, list) else "<text>"),
]


class PoolingOptions(ScoredBody):
    """Fields that vLLM's requests share; those after `encoding_format` are for its engine and have no effect."""

    model: str | None = None
    use_activation: bool | None = None
    """False: rewards as they are; otherwise probabilities of the labels."""
    activation: bool | None = None
    """The name of `use_activation` before vLLM 0.11.2."""
    task: Literal["classify"] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    """How `/pooling` returns rewards; `base64` is of little-endian FP32."""
    user: str | None = None
    request_id: str | None = None
    priority: int = 0

    @property
    def is_activated(self) -> bool:
        """Whether the scores are probabilities."""
        given = (self.use_activation, self.activation)
        return next((value for value in given if value is not None), True)


class PoolingCompletionRequest(PoolingOptions):
    """Texts or rows of token ids."""

    input: Input
    add_special_tokens: bool | None = None
    """Must be as `reward.add_special_tokens`."""

    def rows(self, served: ServedModel) -> list[Row]:
        """Return the rows. Raises GatewayError if the server adds special tokens otherwise than requested."""
        if self.add_special_tokens not in (None, served.adds_special_tokens):
            told = f"but the server tokenises with reward.add_special_tokens {served.adds_special_tokens}"
            raise GatewayError(400, f"add_special_tokens: {self.add_special_tokens}, {told}")
        items: list[Any] = [self.input] if _kind_of(self.input) in ("<text>", "<tokens>") else [*self.input]
        return [Row((item,)) if isinstance(item, str) else Row(tokens=item) for item in items]


class PoolingChatRequest(PoolingOptions):
    """One chat, rendered with the template of the reward model's checkpoint."""

    messages: Chat
    add_special_tokens: Literal[False] | None = None

    def rows(self, served: ServedModel) -> list[Row]:
        """Return the row."""
        return [chat_row(self.messages, {})]


PoolingRequest = Annotated[
    Annotated[PoolingCompletionRequest, Tag("<completion>")] | Annotated[PoolingChatRequest, Tag("<chat>")],
    Discriminator(lambda data: "<chat>" if isinstance(data, dict) and "messages" in data else "<completion>"),
]


def _pairs(first: Sequence[str], second: Sequence[str], served: ServedModel) -> list[Row]:
    if not served.takes_pairs:
        raise GatewayError(
            501, "the reward model takes one text per row, text pairs need reward.text: pair; use /v1/rewards"
        )
    return [text_row(*pair, {}) for pair in zip(first, second, strict=True)]


class PairScoresRequest(PoolingOptions):
    """Text pairs: as many in both fields, or one text for all of the other field; under any of vLLM's names."""

    text_1: Annotated[Texts, Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))]
    text_2: Annotated[Texts, Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))]

    def rows(self, served: ServedModel) -> list[Row]:
        """Return a row for each pair. Raises GatewayError if the numbers of texts do not fit."""
        first, second = ([texts] if isinstance(texts, str) else texts for texts in (self.text_1, self.text_2))
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise GatewayError(400, f"text_1: {len(first)} texts for {len(second)} of text_2, must be as many, or one")
        return _pairs(first, second, served)


class RerankRequest(PoolingOptions):
    """Documents to rank for a query, as vLLM, Jina and Cohere have it."""

    query: str
    documents: Annotated[Rows[str], Field(min_length=1)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    """How many of the best documents to return; default, and 0: all."""
    return_documents: bool = True

    def rows(self, served: ServedModel) -> list[Row]:
        """Return a row for each document."""
        return _pairs([self.query] * len(self.documents), self.documents, served)


class TeiRerankRequest(ScoredBody):
    """Texts to rank for a query, as TEI has it."""

    query: str
    texts: Annotated[Rows[str], Field(min_length=1)]
    raw_scores: bool = False
    """True: rewards as they are; otherwise probabilities."""
    return_text: bool = False

    @property
    def is_activated(self) -> bool:
        """Whether the scores are probabilities."""
        return not self.raw_scores

    def rows(self, served: ServedModel) -> list[Row]:
        """Return a row for each text."""
        return _pairs([self.query] * len(self.texts), self.texts, served)


AnyRerankRequest = Annotated[
    Annotated[RerankRequest, Tag("<vLLM>")] | Annotated[TeiRerankRequest, Tag("<TEI>")],
    Discriminator(lambda data: "<TEI>" if isinstance(data, dict) and "texts" in data else "<vLLM>"),
]


def activated(scores: Sequence[float]) -> list[float]:
    """Return the sigmoid of one score, or the softmax of several, as vLLM's classifier pooler."""
    exponents = (0.0, scores[0]) if len(scores) == 1 else scores
    largest = max(exponents)
    weights = [math.exp(exponent - largest) for exponent in exponents]
    return [weight / sum(weights) for weight in weights[-len(scores) :]]


def _scores(is_activated: bool, found: Results, name: str = "input") -> list[list[float]]:
    check_all(found.results, name)
    if not is_activated:
        return [[*result.rewards] for result in found.results]
    if found.served.labels:
        return [[*result.probabilities] for result in found.results]
    return [activated(result.rewards) for result in found.results]


def _single_scores(is_activated: bool, found: Results, name: str) -> list[float]:
    scores = _scores(is_activated, found, name)
    if len(scores[0]) != 1:
        raise GatewayError(501, f"the reward model has {len(scores[0])} labels, a pair has one score: use /classify")
    return [row[0] for row in scores]


def _vllm_reply(kind: str, found: Results, **data: Any) -> dict[str, Any]:
    head: dict[str, Any] = {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": found.model,
    }
    sent = [row.tokens for row in found.rows if row.tokens is not None]
    if len(sent) == len(found.rows):
        count = sum(map(len, sent))
        usage = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0, "prompt_tokens_details": None}
        head["usage"] = usage
    return {**head, **data}


def classify_reply(request: PoolingOptions, found: Results) -> dict[str, Any]:
    """Return scores, and the name of the most likely label if there is one score for each."""
    labels, data = found.served.labels, []
    for i, probs in enumerate(_scores(request.is_activated, found)):
        label = labels[probs.index(max(probs))] if len(probs) == len(labels) else None
        data.append({"index": i, "label": label, "probs": probs, "num_classes": len(probs)})
    return _vllm_reply("classify", found, data=data)


def pooling_reply(request: PoolingOptions, found: Results) -> dict[str, Any]:
    """Return scores as numbers, or in base64."""

    def encoded(row: list[float]) -> Any:
        if request.encoding_format == "float":
            return row
        return base64.b64encode(struct.pack(f"<{len(row)}f", *row)).decode()

    scores = _scores(request.is_activated, found)
    data = [{"index": i, "object": "pooling", "data": encoded(row)} for i, row in enumerate(scores)]
    return _vllm_reply("pool", found, data=data)


def score_reply(request: PairScoresRequest, found: Results) -> dict[str, Any]:
    """Return a score for each pair."""
    scores = _single_scores(request.is_activated, found, "text_2")
    return _vllm_reply("score", found, data=[{"index": i, "object": "score", "score": s} for i, s in enumerate(scores)])


def rerank_reply(request: RerankRequest | TeiRerankRequest, found: Results) -> Any:
    """Return the documents from the best to the worst, in vLLM's form or TEI's."""
    is_tei = isinstance(request, TeiRerankRequest)
    scores = _single_scores(request.is_activated, found, "texts" if is_tei else "documents")
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    if isinstance(request, TeiRerankRequest):
        return [
            {"index": i, "score": scores[i], **({"text": request.texts[i]} if request.return_text else {})}
            for i in order
        ]
    texts = request.documents if request.return_documents else None
    results = [
        {"index": i, "relevance_score": scores[i], **({"document": {"text": texts[i]}} if texts else {})}
        for i in order[: request.top_n or None]
    ]
    return _vllm_reply("rerank", found, results=results)


# ---- the table ----


@dataclass(frozen=True)
class Endpoint:
    """A row of the table: a request at one of the paths is read as `request` and answered by `reply`."""

    tag: str
    paths: tuple[str, ...]
    request: Any  # type of the body, a ScoredBody
    reply: Callable[[Any, Results], Any]
    response: Any = None  # type of the reply, for the OpenAPI page


DIALECTS = (
    Endpoint("JSON", ("/v1/rewards",), RewardsRequest, rewards_reply, RewardsReply),
    Endpoint("OpenRLHF", ("/get_reward",), OpenRLHFRequest, openrlhf_reply),
    Endpoint("slime", ("/remote_rm",), SlimeRequest, slime_reply),
    Endpoint("vLLM", ("/classify",), PoolingRequest, classify_reply),
    Endpoint("vLLM", ("/pooling",), PoolingRequest, pooling_reply),
    Endpoint("vLLM", ("/score", "/v1/score"), PairScoresRequest, score_reply),
    Endpoint("vLLM and TEI", ("/rerank", "/v1/rerank", "/v2/rerank"), AnyRerankRequest, rerank_reply),
)


def reward_router(source: RewardSource, model: str) -> APIRouter:
    """Return the routes of all dialects. `model`: the only name that requests with a `model` may use."""
    router = APIRouter()
    for dialect in DIALECTS:
        for path in dialect.paths:
            options: dict[str, Any] = {"tags": [dialect.tag], "response_model_exclude_none": dialect.tag == "JSON"}
            router.add_api_route(
                path, _endpoint(source, model, dialect), methods=["POST"], response_model=dialect.response, **options
            )

    @router.get("/v1/models", tags=["vLLM"])
    async def models() -> dict[str, Any]:
        """Name the reward model."""
        card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "triton", "root": model}
        return {"object": "list", "data": [card]}

    return router


def _endpoint(source: RewardSource, model: str, dialect: Endpoint) -> Callable[..., Any]:
    async def score(body: Any, request: Request) -> Any:
        if getattr(body, "model", None) not in (None, model):
            raise GatewayError(404, f"The model `{body.model}` does not exist; this gateway serves `{model}`.")
        served = await source.served()
        rows = body.rows(served)
        request.state.num_rows = len(rows)
        results = await source.score(rows, **body.outputs(served))
        request.state.errors = [result.error for result in results if result.error is not None]
        return dialect.reply(body, Results(rows=rows, results=results, served=served, model=model))

    score.__annotations__["body"] = dialect.request  # what FastAPI reads
    score.__doc__ = dialect.reply.__doc__
    return score
