"""The gateway as an ASGI application: routes of all protocols, health, keys, and errors in one shape."""

import asyncio
import base64
import binascii
import contextlib
import difflib
import gc
import hmac
import ipaddress
import itertools
import re
import reprlib
import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlhf_triton.actor.capture.app import RELEASE, refused
from rlhf_triton.client.client import TritonClient
from rlhf_triton.config import GatewaySection
from rlhf_triton.errors import RlhfError
from rlhf_triton.tools.gateway.dialects import reward_router
from rlhf_triton.tools.gateway.request_log import GatewayMetrics, RequestLog
from rlhf_triton.tools.gateway.rows import GatewayError
from rlhf_triton.tools.gateway.scoring import RewardSource, Room
from rlhf_triton.wire.texts import printable

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz", "/metrics", "/openapi.json"})  # without a key
MOST_PROBLEMS = 3  # of an invalid body, in its error message
NO_KEY = "no valid key: send `Authorization: Bearer KEY`, or put the key into the URL, http://:KEY@host"
HEADERS = {
    HTTPStatus.SERVICE_UNAVAILABLE: {"retry-after": "1"},
    HTTPStatus.UNAUTHORIZED: {"www-authenticate": "Bearer"},
}
BODY_S = 30.0  # for a body to arrive
SMALL_BODY_BYTES = 65_536
COLLECTED_BYTES = 1_000_000  # of a body after which garbage is collected, which takes some 10 ms
MAX_ITEMS = 250_000  # texts, objects and arrays of a body, each of which takes 50 to 250 bytes once it is parsed
_ITEM = re.compile(rb'"[^"]*"?|[{[]')
SESSIONS = "/sessions/"
NOT_JSON = "not JSON: it is not UTF-8, nested too deeply, or has a number with too many digits"
AGENT_PATHS = ("/v1/chat/completions", "/v1/messages")  # behind /sessions/NAME
# Pydantic's problems in our words, by type; in braces what its context has.
PROBLEMS = {
    "missing": "missing",
    "string_type": "must be a text",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "int_type": "must be an integer",
    "bool_type": "must be true or false",
    "too_short": "empty, must have at least {min_length} entry",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "must match {pattern}",
}
WITHOUT_VALUE = ("missing", "too_short", "value_error")
DESCRIPTION = "Rewards from Triton, in the protocols of several trainers. A row without a reward is an error, never 0."


class ErrorReply(BaseModel):
    """The shape of OpenAI's and vLLM's errors: `message`, `type`, `param` and `code`, the status."""

    error: dict[str, Any]


def create_app(
    client: TritonClient | None, settings: GatewaySection, key: str | None = None, *, more: Sequence[APIRouter] = ()
) -> FastAPI:
    """Return the application.

    Args:
        client: where the rewards come from; the application closes it when it shuts down. None: there are none.
        key: what requests must carry, if set.
        more: routes beside those for rewards.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with client or contextlib.nullcontext():
            yield

    metrics, routes = GatewayMetrics(), set[str]()
    app = FastAPI(
        title="Reward gateway",
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # its page loads scripts from the internet
        redoc_url=None,
        responses={"default": {"description": "An error, `error.message` says which", "model": ErrorReply}},
        middleware=[
            Middleware(RequestLog, metrics=metrics, routes=routes, quiet=OPEN_PATHS),
            Middleware(RequestGuard, settings=settings, key=key),
        ],
        exception_handlers={
            RlhfError: refused,
            GatewayError: _gateway_error,
            StarletteHTTPException: _http_error,
            RequestValidationError: _invalid_body,
        },
    )
    source = RewardSource(client, settings) if client else None
    for router in ([reward_router(source, settings.model)] if source else []) + [*more]:
        app.include_router(router)

    @app.get("/healthz", tags=["health"])
    async def healthz() -> dict[str, str]:
        """Return 200 while the gateway runs."""
        return {"status": "ok"}

    @app.get("/health", tags=["health"])
    @app.get("/readyz", tags=["health"])
    async def health() -> dict[str, str]:
        """Return 200 if a server is ready to score, otherwise 503 with the cause."""
        cause = await source.why_not_ready() if source else None
        if cause is not None:
            raise GatewayError(HTTPStatus.SERVICE_UNAVAILABLE, cause)
        return {"status": "ready"}

    @app.get("/metrics", tags=["health"])
    async def prometheus() -> Response:
        """Return the gateway's metrics in Prometheus' text format."""
        return Response(metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    routes.update(app.openapi()["paths"], OPEN_PATHS)
    return app


class RequestGuard:
    """ASGI middleware: refuses requests without the key, and bodies above the limits, before they cost memory.

    At most `max_body_bytes` of large bodies are in memory at a time; further ones wait in their clients.
    """

    def __init__(self, app: ASGIApp, *, settings: GatewaySection, key: str | None) -> None:
        self._app, self._key = app, key
        self._max_body_bytes, self._room = settings.max_body_bytes, Room(settings.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        is_open = scope["path"] in OPEN_PATHS
        given = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"  # as Anthropic's client
        try:
            if self._key and not is_open and not carries(given, self._key):
                raise GatewayError(401, NO_KEY)
            if not self._key and scope["path"].startswith(SESSIONS):
                _refuse_pages(headers)
            async with contextlib.AsyncExitStack() as reserved:
                size = int(headers.get("content-length", 0))
                body = await self._body(receive, size, 0 if is_open else self._max_body_bytes, reserved)
                others = [pair for pair in scope["headers"] if pair[0] != b"content-type"]  # curl -d names a form
                scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
                if scope["path"].startswith(SESSIONS):  # where a call counts, whether its client waits for it or not
                    replay = _replayed(body, receive)
                    del body  # the policy may sample for minutes
                    await self._app({**scope, RELEASE: reserved.aclose}, replay, send)
                else:
                    await self._answer_while_connected(scope, body, receive, send)
        except GatewayError as error:  # those of the routes have their own handler
            reply = error_reply(error.status, str(error))
            if is_open or error.status != HTTPStatus.REQUEST_ENTITY_TOO_LARGE:  # clients read 413 after the whole body
                reply.headers["connection"] = "close"
            await reply(scope, receive, send)

    async def _answer_while_connected(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Answer a request, unless its client leaves before: the gateway would wait for its rewards when it stops."""
        is_answered = False

        async def answer(message: Message) -> None:
            nonlocal is_answered
            is_answered = True
            await send(message)

        async def left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        gone = asyncio.ensure_future(left())
        work = asyncio.ensure_future(self._app(scope, _replayed(body, receive), answer))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done() or is_answered:
                await work
        finally:
            for task in (work, gone):
                task.cancel()

    async def _body(self, receive: Receive, size: int, limit: int, reserved: contextlib.AsyncExitStack) -> bytes:
        """Return the body. Raises GatewayError if it is late or exceeds a limit; `size`: as the client declares it."""
        body, has_room, more, clock = bytearray(), False, True, asyncio.get_running_loop().time
        deadline = clock() + BODY_S
        while more:
            try:
                message = await asyncio.wait_for(receive(), deadline - clock())
            except asyncio.TimeoutError as error:
                raise GatewayError(408, f"the body did not arrive within {BODY_S:g} s") from error
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if max(size, len(body)) > limit:
                told = (
                    f"the body exceeds {limit} bytes (gateway.max_body_bytes)" if limit else "send no body to this path"
                )
                raise GatewayError(413, told)
            if len(body) > SMALL_BODY_BYTES and not has_room:
                await reserved.enter_async_context(self._room.reserved(size or limit))
                if (
                    size or limit
                ) > COLLECTED_BYTES:  # what was parsed is in cycles, and would stay beside the next body
                    reserved.callback(gc.collect)
                has_room, deadline = True, clock() + BODY_S
        if _num_items(body) > MAX_ITEMS:
            raise GatewayError(413, f"the body has more than {MAX_ITEMS} texts, objects and arrays: send fewer rows")
        return bytes(body)


def _refuse_pages(headers: Mapping[str, str]) -> None:
    """Raise GatewayError if a web page in a browser on this machine may have sent a request.

    It would carry an Origin; or the page's own host name for this machine, whose replies it could then read.
    """
    try:
        host = urllib.parse.urlsplit(f"//{headers.get('host', '')}").hostname or ""
        is_here = host == "localhost" or bool(ipaddress.ip_address(host))
    except ValueError:
        is_here = False
    if "origin" in headers or not is_here:
        raise GatewayError(
            403, "the request may come from a web page: call by address or localhost, or set a key (gateway.key_env)"
        )


def _replayed(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _num_items(body: bytearray) -> int:
    """Count texts, objects and arrays in JSON; an upper bound if that is at most MAX_ITEMS."""
    most = sum(map(body.count, (b'"', b"{", b"[")))
    if most <= MAX_ITEMS:  # which is faster to find, and needs no copy
        return most
    found = _ITEM.finditer(body.replace(b"\\\\", b"").replace(b'\\"', b""))
    return sum(1 for _ in itertools.islice(found, MAX_ITEMS + 1))


def carries(header: str, key: str) -> bool:
    """Return whether an Authorization header has the key: as bearer token, or as password, which a URL can carry."""
    scheme, _, given = header.partition(" ")
    if scheme.lower() == "basic":
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            given = base64.b64decode(given).decode().partition(":")[2]
    return scheme.lower() in ("bearer", "basic") and hmac.compare_digest(given.encode(), key.encode())


def error_reply(status: HTTPStatus, message: str) -> JSONResponse:
    """Return the reply to a failed request, in the shape of OpenAI's and vLLM's errors."""
    error = {"message": printable(message), "type": status.phrase, "param": None, "code": status.value}
    return JSONResponse({"error": error}, status.value, HEADERS.get(status))


async def _gateway_error(_: Request, error: GatewayError) -> JSONResponse:
    return error_reply(error.status, str(error))


async def _http_error(request: Request, error: StarletteHTTPException) -> JSONResponse:
    detail = str(error.detail)
    path = request.url.path
    known = sorted(request.app.openapi()["paths"])
    if detail == "There was an error parsing the body":  # FastAPI's, for any exception in there
        detail = f"body: {NOT_JSON}"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{path}: {request.method} is not allowed here; send {(error.headers or {}).get('Allow', 'POST')}"
    elif error.status_code == HTTPStatus.NOT_FOUND and detail == "Not Found":
        near = difflib.get_close_matches(path, known, n=1)
        detail = f"{path}: no such path; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}")
        if path in AGENT_PATHS or path.startswith(SESSIONS):
            detail = f"{path}: " + _session_hint(path, known)
    return error_reply(HTTPStatus(error.status_code), detail)


def _session_hint(path: str, known: Sequence[str]) -> str:
    if not any(each.startswith(SESSIONS) for each in known):
        return "the policy is not served to agents here; set gateway.policy"
    if path in AGENT_PATHS:
        return f"an agent's calls name a session: the base URL ends with {SESSIONS}NAME, and /v1 for OpenAI's client"
    return f"no such path; known: {', '.join(each for each in known if each.startswith(SESSIONS))}"


async def _invalid_body(_: Request, error: RequestValidationError) -> JSONResponse:
    problems = error.errors()
    lines = [_problem(item) for item in problems[:MOST_PROBLEMS]]
    more = f"; {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
    return error_reply(HTTPStatus.BAD_REQUEST, "; ".join(lines) + more)


def _problem(item: dict[str, Any]) -> str:
    """Return one of pydantic's problems in words of the request: its field, what is wrong, and the value."""
    if item["type"] == "json_invalid":
        return f"body: not JSON at character {item['loc'][-1]}: {item['ctx']['error']}"
    place = ""
    for part in item["loc"][item["loc"][0] == "body" :]:
        if isinstance(part, int):
            place += f"[{part}]"
        elif not part.startswith("<"):  # not a member of a union
            place += f".{part}" if place else part
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] in PROBLEMS:
        message = PROBLEMS[item["type"]].format(**item.get("ctx", {}))
    if item["type"] not in WITHOUT_VALUE:
        message += f", got {reprlib.repr(item['input'])}"
    elif not place and item["type"] == "missing":
        message = "empty, must be a JSON object"
    return f"{place or 'body'}{'' if message.startswith(('[', ':')) else ': '}{message}"
