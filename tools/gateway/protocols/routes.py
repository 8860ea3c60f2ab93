"""The protocols of rewards as one table of paths, and their routes.

A row without a reward fails the request, except in the gateway's own `/v1/rewards`, which has a place for its error.
"""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlhf_triton.actor.capture.http import HttpError, read_json, while_connected
from rlhf_triton.client.reward_source import RewardSource
from rlhf_triton.tools.gateway.protocols.openrlhf import OpenRLHFRequest
from rlhf_triton.tools.gateway.protocols.rewards import RewardsRequest
from rlhf_triton.tools.gateway.protocols.scored_body import Results, ScoredBody
from rlhf_triton.tools.gateway.protocols.vllm import ClassifyRequest, PairScoresRequest, PoolingRequest, RerankRequest
from rlhf_triton.tools.gateway.rows import check_rows
from rlhf_triton.wire.contract import REWARD_MODEL

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
