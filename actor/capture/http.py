"""Parts of the HTTP applications for agents and of the gateway: error replies, request bodies, disconnects."""

import asyncio
import json
import reprlib
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, ValidationError, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse
from typing_extensions import Self

from rlhf_triton.actor.data.chat import TemplateError
from rlhf_triton.client.errors import RequestFailed
from rlhf_triton.errors import RlhfError, reason_of_item
from rlhf_triton.wire.texts import printable

T = TypeVar("T")
RELEASE = "rlhf.release"  # key in a request's scope: function that frees the memory reserved for its body
TYPES = {404: "not_found_error", 429: "rate_limit_error"}  # Anthropic's names
HEADERS = {
    HTTPStatus.SERVICE_UNAVAILABLE: {"retry-after": "1"},
    HTTPStatus.UNAUTHORIZED: {"www-authenticate": "Bearer"},
}
DISCONNECTED = "the client has disconnected, so its request was cancelled"
LARGE_BODY_BYTES = 100_000
# What large bodies need has one thread: the others stay free for small ones, and each thread keeps the memory that it
# has freed, which is hundreds of megabytes after a million tokens.
_large_bodies = ThreadPoolExecutor(1, "large-bodies")
MOST_PROBLEMS = 3  # problems of an invalid body that the error message lists
WITHOUT_VALUE = ("missing", "too_short", "value_error")  # pydantic's problem types whose message needs no value
NOT_HONOURED = (  # parameters of the protocols that would change a score
    *("truncate", "truncate_prompt_tokens", "truncation", "truncation_side", "truncation_direction"),
    *("max_tokens_per_doc", "max_chunks_per_doc"),
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
)


class HttpError(RlhfError):
    """Answers a request with an HTTP error; `status`: its code, `field`: the field of the body that is wrong."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field


async def refused(request: Request, error: Exception) -> JSONResponse:
    """Return the reply to a request that failed with an RlhfError, in the form of OpenAI's and Anthropic's errors."""
    if not isinstance(error, HttpError):
        statuses = {TemplateError: 400, RequestFailed: 503}
        error = HttpError(next((statuses[kind] for kind in statuses if isinstance(error, kind)), 502), str(error))
    status = error.status
    message = printable(str(error))
    request.scope.setdefault("state", {})["cause"] = message
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    body = {"type": kind, "message": message, "param": error.field, "code": status}
    return JSONResponse({"type": "error", "error": body}, status, HEADERS.get(HTTPStatus(status)))


async def in_thread(request: Request, function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`, called in a thread, because what is made of a large body may take seconds.

    If the request is cancelled before a thread was free, the function is not called.
    """
    is_large = int(request.headers.get("content-length", LARGE_BODY_BYTES)) >= LARGE_BODY_BYTES
    return await asyncio.get_running_loop().run_in_executor(_large_bodies if is_large else None, function, *args)


async def read_json(request: Request) -> Any:
    """Return the JSON of the body, {} if it is empty. Raises HttpError for invalid JSON or lone surrogates.

    The request keeps no copy of the body, and frees the memory that the gateway reserved for it.
    """

    def parsed(data: bytes) -> Any:
        value = json.loads(data or "{}")
        json.dumps(value, ensure_ascii=False).encode()  # raises on lone surrogates
        return value

    try:
        body = await while_connected(
            request, in_thread(request, parsed, b"".join([chunk async for chunk in request.stream()]))
        )
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"body: must be JSON in UTF-8, but {error}") from error
    if (release := request.scope.get(RELEASE)) is not None:
        await release()
    return body


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; if the client disconnects, cancel `work` and raise HttpError."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    tasks = [task, asyncio.ensure_future(wait_for_disconnect())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HttpError(408, DISCONNECTED)
        return task.result()
    finally:
        for pending in tasks:
            pending.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Body(BaseModel):
    """Base class of request bodies: strings are not converted to numbers, null means absent, unknown fields fail."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @classmethod
    def read(cls, data: Any) -> Self:
        """Parse a body from JSON. Raises HttpError with its first problems."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            problems = [_problem(item) for item in error.errors(include_url=False)[:MOST_PROBLEMS]]
            raise HttpError(400, "; ".join(text for _, text in problems), problems[0][0]) from None

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known_fields = {*cls.model_fields}
        for info in cls.model_fields.values():
            if isinstance(info.validation_alias, AliasChoices):
                known_fields.update(map(str, info.validation_alias.choices))
        present = {name: value for name, value in data.items() if value is not None}
        for name, value in present.items():
            if name in NOT_HONOURED and value is not False:
                raise ValueError(
                    f"{name} is {reprlib.repr(value)}, but no row is truncated, and the model's own template "
                    "renders chats exactly as sent; leave the field out"
                )
            if name not in known_fields and name not in NOT_HONOURED:
                raise ValueError(f"unknown field {reprlib.repr(name)}; known: {', '.join(sorted(known_fields))}")
        return present


def _problem(item: Any) -> tuple[str, str]:
    """Return (field, message with the value) of one of pydantic's problems."""
    place = ""
    for part in item["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else part
    place = place or "body"
    message = reason_of_item(item)
    if item["type"] not in WITHOUT_VALUE:
        message += f", got {reprlib.repr(item['input'])}"
    return place, f"{place}{'' if message.startswith(('[', ':')) else ': '}{message}"
