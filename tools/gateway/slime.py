"""slime's remote reward: `--rm-type remote_rm --rm-url http://host:port/remote_rm`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from tools.gateway.bodies import Body, Chat, plain
from tools.gateway.rows import reply_row, sequence_rewards
from tools.gateway.scoring import RewardSource


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
