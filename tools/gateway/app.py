"""The gateway as an ASGI application: routes of all protocols, health, keys, and errors in one shape."""

import asyncio
import base64
import binascii
import contextlib
import ctypes
import gc
import hmac
import ipaddress
import itertools
import re
import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlhf_triton.actor.capture.http import DISCONNECTED, RELEASE, HttpError, refused
from rlhf_triton.client.client import TritonClient
from rlhf_triton.client.reward_source import RewardSource, Room
from rlhf_triton.errors import RlhfError
from rlhf_triton.tools.gateway.protocols.routes import reward_routes
from rlhf_triton.tools.gateway.request_log import RequestLog, gateway_metrics
from rlhf_triton.tools.gateway.rows import MAX_BODY_BYTES

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz", "/metrics"})  # without a key
NO_KEY = "no valid key: send `Authorization: Bearer KEY`, or put the key into the URL, http://:KEY@host"
DEADLINE_S = 60.0  # for the rewards of a row, retries included
BODY_S = 30.0  # for a body to arrive
SMALL_BODY_BYTES = 65_536
RELEASE_S = 1.0  # between two releases of memory
COLLECTED_BYTES = 1_000_000  # after a larger body memory is released
MAX_ITEMS = 250_000  # texts, objects and arrays of a body, each of which takes 50 to 250 bytes once it is parsed
_ITEM = re.compile(rb'"[^"]*"?|[{[]')
SESSIONS = "/sessions/"


def create_app(client: TritonClient | None, key: str | None = None, *, more: Sequence[Route] = ()) -> Starlette:
    """Return the application.

    Args:
        client: where the rewards come from; the application closes it when it shuts down. None: there are none.
        key: what requests must carry, if set.
        more: routes beside those for rewards.
    """
    registry = CollectorRegistry()
    source = RewardSource(client, patience_s=DEADLINE_S, deadline_s=DEADLINE_S) if client else None

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client or contextlib.nullcontext():
            yield

    async def healthz(_: Request) -> Response:
        """Return 200 while the gateway runs."""
        return JSONResponse({"status": "ok"})

    async def health(_: Request) -> Response:
        """Return 200 if a server is ready to score, otherwise 503 with the cause."""
        cause = await source.why_not_ready() if source else None
        if cause is not None:
            raise HttpError(503, cause)
        return JSONResponse({"status": "ready"})

    async def prometheus(_: Request) -> Response:
        """Return the gateway's metrics in Prometheus' text format."""
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    routes = [
        *(reward_routes(source) if source else ()),
        *more,
        Route("/healthz", healthz),
        *(Route(path, health) for path in ("/health", "/readyz")),
        Route("/metrics", prometheus),
    ]
    paths = sorted({route.path for route in routes})

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        problem = f"no such path; known: {', '.join(paths)}"
        if error.status_code == 405:
            problem = f"{request.method} is not allowed here; send {(error.headers or {}).get('Allow')}"
        return await refused(request, HttpError(error.status_code, f"{request.url.path}: {problem}"))

    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[
            Middleware(RequestLog, metrics=gateway_metrics(registry), routes=paths, quiet=OPEN_PATHS),
            Middleware(RequestGuard, key=key),
        ],
        exception_handlers={RlhfError: refused, HTTPException: no_route},
    )


class RequestGuard:
    """ASGI middleware: refuses requests without the key, and bodies above the limits, before they cost memory.

    At most MAX_BODY_BYTES of large bodies are in memory at a time, and as much, or one body more, arriving. Others
    wait in their clients. A slow upload takes no more room than what has arrived of it.
    """

    def __init__(self, app: ASGIApp, *, key: str | None) -> None:
        self._app = app
        self._key = key
        self._room = Room(MAX_BODY_BYTES)
        self._arriving: dict[contextlib.AsyncExitStack, int] = {}  # number of bytes of each incomplete large body
        self._release: asyncio.Task[None] | None = None
        self._has_ended = False  # a large body, since memory was last released
        self._beyond = asyncio.Lock()  # held by the incomplete body that may exceed the limit: one can always complete

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        is_open = scope["path"] in OPEN_PATHS
        size = int(headers.get("content-length", 0))
        # Anthropic's client sends its key as `x-api-key`.
        authorization = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
        try:
            if self._key and not is_open and not carries(authorization, self._key):
                raise HttpError(401, NO_KEY)
            is_session = scope["path"].startswith(SESSIONS)
            if not self._key and is_session:
                _refuse_pages(headers)
            async with contextlib.AsyncExitStack() as reserved:
                body = await self._body(receive, size, 0 if is_open else MAX_BODY_BYTES, reserved)
                replay = _replay_body(body, receive)
                del body  # the policy may sample for minutes
                await self._app({**scope, RELEASE: reserved.aclose} if is_session else scope, replay, send)
        except HttpError as error:  # those of the routes have their own handler
            reply = await refused(Request(scope), error)
            if is_open or error.status != 413:  # clients read 413 after the whole body
                reply.headers["connection"] = "close"
            await reply(scope, receive, send)
        finally:
            if size > COLLECTED_BYTES:  # it may have ended before its body was read
                self._release_later()

    async def _body(self, receive: Receive, size: int, limit: int, reserved: contextlib.AsyncExitStack) -> bytes:
        """Return the body. Raises HttpError if it is late or exceeds a limit; `size`: as the client declares it."""
        async with contextlib.AsyncExitStack() as arriving:
            body = await self._received(receive, size, limit, arriving)
            if len(body) > SMALL_BODY_BYTES:
                await reserved.enter_async_context(self._room.reserved(len(body)))
            if len(body) > COLLECTED_BYTES:
                reserved.callback(self._release_later)
        if _num_items(body) > MAX_ITEMS:
            raise HttpError(413, f"the body has more than {MAX_ITEMS} texts, objects and arrays: send fewer rows")
        return bytes(body)

    async def _received(
        self, receive: Receive, size: int, limit: int, arriving: contextlib.AsyncExitStack
    ) -> bytearray:
        body = bytearray()
        is_beyond = False
        more = True
        clock = asyncio.get_running_loop().time
        deadline = clock() + BODY_S
        while more:
            try:
                message = await asyncio.wait_for(receive(), deadline - clock())
            except asyncio.TimeoutError as error:
                raise HttpError(408, f"the body did not arrive within {BODY_S:g} s") from error
            if message["type"] == "http.disconnect":
                raise HttpError(408, DISCONNECTED)
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if max(size, len(body)) > limit:
                raise HttpError(413, f"the body exceeds {limit} bytes" if limit else "send no body to this path")
            if len(body) <= SMALL_BODY_BYTES or is_beyond:
                continue
            others = sum(self._arriving.values()) - self._arriving.get(arriving, 0)
            if others + len(body) > MAX_BODY_BYTES:
                await arriving.enter_async_context(self._beyond)
                is_beyond = True
                deadline = clock() + BODY_S
            else:
                if arriving not in self._arriving:
                    arriving.callback(self._arriving.pop, arriving, None)
                self._arriving[arriving] = len(body)
        return body

    def _release_later(self) -> None:
        """Release memory soon, once for all large bodies that end meanwhile: with many in memory it takes seconds."""
        self._has_ended = True
        if self._release is None:
            self._release = asyncio.ensure_future(self._release_while_bodies_end())

    async def _release_while_bodies_end(self) -> None:
        while self._has_ended:
            await asyncio.sleep(RELEASE_S)
            self._has_ended = False
            await asyncio.to_thread(_release_memory)
        self._release = None


def _release_memory() -> None:
    """Return what a large body took to the operating system.

    What was parsed is in cycles, and would stay beside the next body; glibc keeps what its threads have freed.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):  # of another C library
        ctypes.CDLL(None).malloc_trim(0)


def _refuse_pages(headers: Mapping[str, str]) -> None:
    """Raise HttpError if a web page in a browser on this machine may have sent a request.

    It would carry an Origin; or the page's own host name for this machine, whose replies it could then read.
    """
    try:
        host = urllib.parse.urlsplit(f"//{headers.get('host', '')}").hostname or ""
        is_here = host == "localhost" or bool(ipaddress.ip_address(host))
    except ValueError:
        is_here = False
    if "origin" in headers or not is_here:
        raise HttpError(
            403, "the request may come from a web page: call by address or localhost, or set a key (gateway.key_env)"
        )


def _replay_body(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _num_items(body: bytearray) -> int:
    """Count texts, objects and arrays in JSON; an upper bound if that is at most MAX_ITEMS."""
    most = sum(map(body.count, (b'"', b"{", b"[")))
    if most <= MAX_ITEMS:  # which is faster to find, and needs no copy
        return most
    items = _ITEM.finditer(body.replace(b"\\\\", b"").replace(b'\\"', b""))
    return sum(1 for _ in itertools.islice(items, MAX_ITEMS + 1))


def carries(header: str, key: str) -> bool:
    """Return whether an Authorization header has the key: as bearer token, or as password, which a URL can carry."""
    scheme, _, credential = header.partition(" ")
    if scheme.lower() == "basic":
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            credential = base64.b64decode(credential).decode().partition(":")[2]
    return scheme.lower() in ("bearer", "basic") and hmac.compare_digest(credential.encode(), key.encode())
