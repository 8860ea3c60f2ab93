"""The protocols of vLLM's pooling server, and `/rerank` of Text Embeddings Inference (TEI).

Scores are probabilities of the checkpoint's labels, or the sigmoid of a reward that is not one checkpoint alone; if the
request says so, they are the rewards themselves.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AliasChoices, Discriminator, Field, Tag, field_validator, model_validator

from rlhf_triton.actor.capture.http import HttpError
from rlhf_triton.client.reward_source import Row, chat_row, text_row
from rlhf_triton.client.served import ServedModel
from rlhf_triton.tools.gateway.protocols.scored_body import Results, ScoredBody, single_scores
from rlhf_triton.tools.gateway.rows import BoundedRows, ChatMessages, OneOrMoreTexts, TokenIds, check_all
from rlhf_triton.wire.contract import PROBABILITIES, REWARD_MODEL


def activated(scores: Sequence[float]) -> list[float]:
    """Return the sigmoid of one score, or the softmax of several, as vLLM's classifier pooler."""
    exponents = np.array([0.0, *scores] if len(scores) == 1 else scores)
    weights = np.exp(exponents - exponents.max())
    return (weights / weights.sum())[-len(scores) :].tolist()


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
        scores = enumerate(single_scores(self.scores(results, "text_2")))
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
        scores = single_scores(self.scores(results, "texts" if self.is_tei else "documents"))
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        if self.is_tei:
            texts = {i: {"text": self.documents[i]} for i in order} if self.return_text else {}
            return [{"index": i, "score": scores[i], **texts.get(i, {})} for i in order]
        shown = {i: {"document": {"text": self.documents[i]}} for i in order} if self.return_documents else {}
        best = order[: self.top_n or None]
        return _vllm_reply(
            "rerank", results=[{"index": i, "relevance_score": scores[i], **shown.get(i, {})} for i in best]
        )
