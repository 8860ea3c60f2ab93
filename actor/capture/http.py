"""What the HTTP applications of agents and of the gateway share: errors in one shape, bodies, clients that leave."""

import asyncio
import json
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse

from rlhf_triton.actor.data.chat import TemplateError
from rlhf_triton.errors import RlhfError
from rlhf_triton.wire.texts import printable

T = TypeVar("T")
RELEASE = "rlhf.release"  # in the scope of a request: gives back the room of its body
TYPES = {404: "not_found_error", 429: "rate_limit_error"}  # Anthropic's names
HEADERS = {
    HTTPStatus.SERVICE_UNAVAILABLE: {"retry-after": "1"},
    HTTPStatus.UNAUTHORIZED: {"www-authenticate": "Bearer"},
}


class HttpError(RlhfError):
    """A request that gets an HTTP error; `status` is its code, `field` what is wrong in the body."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.field = status, field


async def refused(request: Request, error: Exception) -> JSONResponse:
    """Return the reply to a request that failed with an RlhfError, in a shape that is OpenAI's and Anthropic's."""
    if not isinstance(error, HttpError):
        error = HttpError(400 if isinstance(error, TemplateError) else 502, str(error))
    status, message = error.status, printable(str(error))
    request.scope.setdefault("state", {})["cause"] = message
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    told = {"type": kind, "message": message, "param": error.field, "code": status}
    return JSONResponse({"type": "error", "error": told}, status, HEADERS.get(HTTPStatus(status)))


async def read_json(request: Request) -> Any:
    """Return the body, `{}` if there is none. Raises HttpError unless it is JSON whose texts have an encoding.

    The request keeps no copy, and gives back the room that the gateway has reserved for its body.
    """

    def parsed(data: bytes) -> Any:
        found = json.loads(data or "{}")
        json.dumps(found, ensure_ascii=False).encode()  # raises on lone surrogates
        return found

    try:
        body = await asyncio.to_thread(parsed, b"".join([chunk async for chunk in request.stream()]))
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"body: must be JSON in UTF-8, but {error}") from error
    if (release := request.scope.get(RELEASE)) is not None:
        await release()
    return body


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or cancel it when the client disconnects. Raises HttpError."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    tasks = [task, asyncio.ensure_future(left())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HttpError(408, "the client has disconnected, so its request is given up")
        return task.result()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
