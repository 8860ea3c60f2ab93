"""The routes of sessions: what an agent's client calls, and what its trainer does."""

import asyncio
import dataclasses
import json
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import JSONResponse

from rlhf_triton.actor.capture.dialects import (
    ANTHROPIC_MESSAGES,
    NUMBER,
    OPENAI_CHAT,
    Dialect,
    checked,
    number,
    reply_to,
)
from rlhf_triton.actor.capture.sessions import CaptureError, Sampled, Sampler, Session, Sessions
from rlhf_triton.actor.data.chat import TemplateError
from rlhf_triton.store.jsonl import append_jsonl

Name = Annotated[str, PathParameter(pattern=r"^[\w.:-]{1,200}$")]
RELEASE = "rlhf.release"  # in the scope of a request: gives back the room of its body
TYPES = {404: "not_found_error", 429: "rate_limit_error"}  # Anthropic's names


async def refused(_: Request, error: Exception) -> JSONResponse:
    """Return the reply to a request that failed with an RlhfError; OpenAI's and Anthropic's clients read it."""
    status = error.status if isinstance(error, CaptureError) else 400 if isinstance(error, TemplateError) else 502
    told = {"type": TYPES.get(status, "invalid_request_error" if status < 500 else "api_error"), "message": str(error)}
    return JSONResponse(
        {"type": "error", "error": {**told, "param": getattr(error, "field", None), "code": status}}, status
    )


def capture_router(sessions: Sessions, sampler: Sampler, *, model: str, max_tokens: int) -> APIRouter:
    """Return the routes of agents; the application must have `refused` as the handler of RlhfError.

    Args:
        model: name of the policy; requests may have any other.
        max_tokens: of a reply whose request sets no limit.
    """
    router = APIRouter(prefix="/sessions/{name}", tags=["agents"])

    async def answer(name: str, request: Request, dialect: Dialect) -> Response:
        asked = await asyncio.to_thread(dialect.read, await _json(request), max_tokens)
        with sessions.calling(name) as session:
            # A long context takes seconds, in which other agents and the run's generation go on.
            call, most = await asyncio.to_thread(session.begin, asked.messages, asked.tools)
            prompt = call.tokens
            sampling = dataclasses.replace(asked.sampling, max_tokens=min(most, asked.sampling.max_tokens))
            sampled = await _while_connected(request, sampler.sample(name, prompt, sampling))
            reply = reply_to(asked, uuid.uuid4().hex, len(prompt), sampled, sessions.tokenizer)
            session.record(call, sampled, reply.message)
        body = dialect.body(reply, asked)
        if asked.stream:
            return Response("".join(dialect.events(body, asked)), media_type="text/event-stream")
        return JSONResponse(body)

    @router.post("/v1/chat/completions")
    async def chat_completions(name: Name, request: Request) -> Response:
        """Answer as OpenAI's chat completions."""
        return await answer(name, request, OPENAI_CHAT)

    @router.post("/v1/messages")
    @router.post("/v1/v1/messages")  # Anthropic's client appends `/v1/messages` to its base URL
    async def messages(name: Name, request: Request) -> Response:
        """Answer as Anthropic's messages."""
        return await answer(name, request, ANTHROPIC_MESSAGES)

    @router.get("/v1/models")
    async def models(name: Name) -> dict[str, Any]:
        """Name the policy."""
        return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "policy"}]}

    @router.post("/reward")
    async def reward(name: Name, request: Request) -> dict[str, float]:
        """Add to the reward of the last call; return the sum."""
        body = checked(await _json(request), {"reward": NUMBER}, ("reward",))
        last = sessions.find(name).calls[-1]
        last.reward += number(body, "reward", None, -1e9, 1e9)
        return {"reward": last.reward}

    return router


def add_trainer_routes(router: APIRouter, sessions: Sessions, export: Path | None) -> None:
    """Add the routes that read and end sessions. `export`: JSONL file for the rows of ended sessions, if any."""

    @router.post("")
    async def begin(name: Name) -> Response:
        """Let calls begin another session under the name of one that has ended."""
        sessions.reopen(name)
        return JSONResponse({})

    @router.get("")
    async def read(name: Name) -> Response:
        """Return the trajectories so far."""
        return JSONResponse({"trajectories": _rows(sessions.find(name))})

    @router.post("/end")
    async def end(name: Name, request: Request) -> Response:
        """Export the trajectories, forget the session, and return them."""
        body, session = checked(await _json(request), {"group": str}), sessions.find(name)
        rows = _rows(session, body.get("group"))
        if export is not None:
            try:
                append_jsonl(export, rows)
            except OSError as error:
                raise CaptureError(500, f"session {name} stays open, as its export failed: {error}") from error
        sessions.end(session.name)
        return JSONResponse({"trajectories": rows})


def _rows(session: Session, group: str | None = None) -> list[dict[str, Any]]:
    return [row.exported(session, group) for row in session.rows()]


async def _json(request: Request) -> Any:
    """Return the body, `{}` if there is none. Raises CaptureError unless it is JSON whose texts have an encoding.

    The request keeps no copy, and gives back the room that the gateway has reserved for its body.
    """

    def parsed(data: bytes) -> Any:
        found = json.loads(data or "{}")
        json.dumps(found, ensure_ascii=False).encode()  # raises on lone surrogates
        return found

    try:
        body = await asyncio.to_thread(parsed, b"".join([chunk async for chunk in request.stream()]))
    except (ValueError, RecursionError) as error:
        raise CaptureError(400, f"body: must be JSON in UTF-8, but {error}") from error
    if (release := request.scope.get(RELEASE)) is not None:
        await release()
    return body


async def _while_connected(request: Request, work: Coroutine[Any, Any, Sampled]) -> Sampled:
    """Return the result of `work`, or cancel it when the client disconnects. Raises CaptureError."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = task, gone = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise CaptureError(408, "the client has disconnected, so the reply is not recorded")
        return task.result()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
