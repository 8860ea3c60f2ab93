"""The remote-reward protocols of OpenRLHF and slime.

OpenRLHF: `--reward.remote_url http://host:port/get_reward`. A query is the text of prompt and response, with special
tokens. The server tokenises it with the reward model's own tokenizer; `reward.add_special_tokens: false` adds none,
as OpenRLHF's `serve_rm`.
"""

from typing import Any

from fastapi import APIRouter

from tools.gateway.rows import Body, Chat, GatewayError, Row, Rows, plain, reply_row, sequence_rewards, text_row
from tools.gateway.scoring import RewardSource


class OpenRLHFRequest(Body):
    """A request of OpenRLHF's `SingleTurnAgentExecutor`."""

    query: Rows[str]
    """Prompt and response of each row as one text."""
    prompts: Rows[str] | None = None
    """The prompts alone, for reward functions."""
    labels: Rows[Any] | None = None
    """Column `label` of each row, for reward functions."""


class OpenRLHFReply(Body):
    """The reply of OpenRLHF's `serve_rm`."""

    rewards: list[float]
    scores: list[float]
    """The same numbers, by which OpenRLHF filters prompts."""
    extra_logs: dict[str, list[float]]
    """Terms of a weighted sum of rewards."""


def openrlhf_router(source: RewardSource) -> APIRouter:
    """Return the route `/get_reward`. A row without a reward fails the request, which OpenRLHF then repeats."""
    router = APIRouter(tags=["OpenRLHF"])

    @router.post("/get_reward")
    async def get_reward(request: OpenRLHFRequest) -> OpenRLHFReply:
        results = await source.score(_rows(request))
        rewards = sequence_rewards(results, "query")
        terms: dict[str, list[float]] = {}
        for i, name in enumerate((await source.served()).components):
            column = [result.components[i] for result in results]
            if None not in column:  # a term of weight 0 may have failed
                terms[name] = [term for term in column if term is not None]
        return OpenRLHFReply(rewards=rewards, scores=rewards, extra_logs=terms)

    return router


def _rows(request: OpenRLHFRequest) -> list[Row]:
    for name, column in (("prompts", request.prompts), ("labels", request.labels)):
        if column is not None and len(column) != len(request.query):
            raise GatewayError(
                400, f"{name}: {len(column)} entries, must be one for each of {len(request.query)} queries"
            )
    prompts: list[str | None] = [*request.prompts] if request.prompts else [None] * len(request.query)
    labels = [{"label": label} for label in request.labels] if request.labels else [{}] * len(request.query)
    return [_row(*columns) for columns in zip(request.query, prompts, labels, strict=True)]


def _row(query: str, prompt: str | None, label: dict[str, Any]) -> Row:
    if prompt is None or not query.startswith(prompt):  # the tokenizer may have changed the prompt
        return Row((query,), metadata=label)
    return text_row(prompt, query[len(prompt) :], label)


# slime's remote reward: `--rm-type remote_rm --rm-url http://host:port/remote_rm`.


class SlimeRequest(Body):
    """A request of slime's `remote_rm`: one sample."""

    prompt: str | Chat
    """A text, or the messages of a chat."""
    response: str
    label: Any = None
    """Column `label`, for reward functions."""


def slime_router(source: RewardSource) -> APIRouter:
    """Return the route `/remote_rm`, whose reply is the reward alone, a JSON number."""
    router = APIRouter(tags=["slime"])

    @router.post("/remote_rm")
    async def remote_rm(request: SlimeRequest) -> float:
        prompt = request.prompt if isinstance(request.prompt, str) else plain(request.prompt)
        results = await source.score([reply_row(prompt, request.response, {"label": request.label})])
        return sequence_rewards(results, "response")[0]

    return router
