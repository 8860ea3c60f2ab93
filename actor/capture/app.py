"""HTTP routes of sessions, for the clients of agents and for a trainer."""

import asyncio
import dataclasses
import functools
import json
import re
import uuid
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlhf_triton.actor.capture.anthropic_api import ANTHROPIC_MESSAGES
from rlhf_triton.actor.capture.chat_apis import ChatApi, reply_to
from rlhf_triton.actor.capture.http import Body, HttpError, in_thread, read_json, while_connected
from rlhf_triton.actor.capture.openai_api import OPENAI_CHAT
from rlhf_triton.actor.capture.sessions import Sampler, Session, Sessions
from rlhf_triton.store.jsonl import append_jsonl

SESSION = "/sessions/{name}"
NAME = re.compile(r"[\w.:-]{1,200}")


class RewardBody(Body):
    """A reward for the last call."""

    reward: Annotated[float, Field(ge=-1e9, le=1e9)]


class EndBody(Body):
    """The end of a session."""

    group: str = ""


def capture_routes(
    sessions: Sessions, sampler: Sampler, *, model: str, max_tokens: int, min_tokens: int = 0
) -> list[Route]:
    """Return the routes that agents call; the application must handle RlhfError with `refused`.

    Args:
        model: name of the policy; requests may use any other name.
        max_tokens: maximum tokens of a reply whose request sets no limit.
        min_tokens: first tokens of a reply within which the sampler ignores stop strings.
    """

    async def answer(api: ChatApi, request: Request) -> Response:
        name = _name(request)
        # A client that leaves takes its call out of the queue of the thread for large bodies.
        return await while_connected(request, reply(api, request, name, await read_json(request)))

    async def reply(api: ChatApi, request: Request, name: str, body: Any) -> Response:
        agent_request = await in_thread(request, api.read, body, max_tokens)
        del body  # the policy may sample for minutes
        with sessions.calling(name) as session:
            call = await in_thread(request, session.call, agent_request.messages, agent_request.tools)
            token_limit = session.begin(call)
            try:
                prompt = call.tokens
                sampling = dataclasses.replace(
                    agent_request.sampling, max_tokens=min(token_limit, agent_request.sampling.max_tokens)
                )
                sampled = await sampler.sample(name, prompt, sampling)
                number = uuid.uuid4().hex
                answered = reply_to(agent_request, number, len(prompt), sampled, sessions.tokenizer, min_tokens)
                session.record(call, sampled, answered.message)
            finally:
                session.forget(call)
        data = api.body(answered, agent_request)
        if agent_request.stream:
            return Response("".join(api.events(data, agent_request)), media_type="text/event-stream")
        return JSONResponse(data)

    async def models(request: Request) -> Response:
        """List the policy as the only model."""
        return JSONResponse({"object": "list", "data": [{"id": model, "object": "model", "owned_by": "policy"}]})

    async def reward(request: Request) -> Response:
        """Add to the reward of the last call; return its new reward."""
        body = RewardBody.read(await read_json(request))
        last = sessions.find(_name(request)).calls[-1]
        last.reward += body.reward
        return JSONResponse({"reward": last.reward})

    messages = functools.partial(answer, ANTHROPIC_MESSAGES)
    return [
        Route(f"{SESSION}/v1/chat/completions", functools.partial(answer, OPENAI_CHAT), methods=["POST"]),
        Route(f"{SESSION}/v1/messages", messages, methods=["POST"]),
        # Anthropic's client appends `/v1/messages` to its base URL.
        Route(f"{SESSION}/v1/v1/messages", messages, methods=["POST"]),
        Route(f"{SESSION}/v1/models", models),
        Route(f"{SESSION}/reward", reward, methods=["POST"]),
    ]


def trainer_routes(sessions: Sessions, export: Path | None) -> list[Route]:
    """Return the routes that read and end sessions. `export`: JSONL file for the rows of ended sessions, if any."""

    async def read(request: Request) -> Response:
        """Return the trajectories so far."""
        return await asyncio.to_thread(_trajectories, sessions.find(_name(request)))

    async def end(request: Request) -> Response:
        """Export the trajectories, forget the session, and return them."""
        body = EndBody.read(await read_json(request))
        name = _name(request)
        try:
            session = sessions.find(name)
        finally:  # even without calls, because a late agent's call would become a row of the next session of that name
            sessions.end(name)
        try:
            return await asyncio.to_thread(_trajectories, session, body.group, export)
        except OSError as error:
            sessions.reopen(session)
            raise HttpError(500, f"session {name} stays open because its export failed: {error}") from error

    return [
        Route(SESSION, read),
        Route(f"{SESSION}/end", end, methods=["POST"]),
    ]


def _name(request: Request) -> str:
    name = str(request.path_params["name"])
    if not NAME.fullmatch(name):
        raise HttpError(400, f"path.name: {name!r:.80}, must have 1 to 200 letters, digits, or any of _ . : -")
    return name


def _trajectories(session: Session, group: str = "", export: Path | None = None) -> Response:
    """Append a session's rows to `export`, if any, and return them. Takes seconds for long contexts; raises OSError."""
    rows = [row.exported(session, group) for row in session.rows()]
    if export is not None:
        append_jsonl(export, rows)
    encoded = ",".join(json.dumps(row, ensure_ascii=False) for row in rows)  # other threads run between two rows
    return Response(f'{{"trajectories":[{encoded}]}}', media_type="application/json")
