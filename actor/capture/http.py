"""What the HTTP applications of agents and of the gateway share: errors in one shape, bodies, clients that leave."""

import asyncio
import json
import reprlib
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, ValidationError, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse
from typing_extensions import Self

from rlhf_triton.actor.data.chat import TemplateError
from rlhf_triton.client.errors import RequestFailed
from rlhf_triton.errors import RlhfError
from rlhf_triton.wire.texts import printable

T = TypeVar("T")
RELEASE = "rlhf.release"  # in the scope of a request: gives back the room of its body
TYPES = {404: "not_found_error", 429: "rate_limit_error"}  # Anthropic's names
HEADERS = {
    HTTPStatus.SERVICE_UNAVAILABLE: {"retry-after": "1"},
    HTTPStatus.UNAUTHORIZED: {"www-authenticate": "Bearer"},
}
MOST_PROBLEMS = 3  # of an invalid body, in its error message
WITHOUT_VALUE = ("missing", "too_short", "value_error")  # pydantic's problems that no value explains
NOT_HONOURED = (  # parameters of the protocols that would change a score
    *("truncate", "truncate_prompt_tokens", "truncation", "truncation_side", "truncation_direction"),
    *("max_tokens_per_doc", "max_chunks_per_doc"),
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
)


class HttpError(RlhfError):
    """A request that gets an HTTP error; `status` is its code, `field` what is wrong in the body."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.field = status, field


async def refused(request: Request, error: Exception) -> JSONResponse:
    """Return the reply to a request that failed with an RlhfError; OpenAI's and Anthropic's clients read it."""
    if not isinstance(error, HttpError):
        known = {TemplateError: 400, RequestFailed: 503}
        error = HttpError(next((known[kind] for kind in known if isinstance(error, kind)), 502), str(error))
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
            raise HttpError(408, "the client has disconnected, so its request was cancelled")
        return task.result()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Body(BaseModel):
    """Base class of request bodies. A number in a string is no number, null is absent, an unknown field an error."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @classmethod
    def read(cls, data: Any) -> Self:
        """Return a body from JSON. Raises HttpError with its first problems."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            found = [_problem(item) for item in error.errors(include_url=False)[:MOST_PROBLEMS]]
            raise HttpError(400, "; ".join(problem for _, problem in found), found[0][0]) from None

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {*cls.model_fields}
        for info in cls.model_fields.values():
            if isinstance(info.validation_alias, AliasChoices):
                known.update(map(str, info.validation_alias.choices))
        found = {name: value for name, value in data.items() if value is not None}
        for name, value in found.items():
            if name in NOT_HONOURED and value is not False:
                raise ValueError(
                    f"{name} is {reprlib.repr(value)}, but no row is truncated, and a chat is rendered with the reward "
                    "model's template and ends as it is sent; leave it out"
                )
            if name not in known and name not in NOT_HONOURED:
                raise ValueError(f"unknown field {reprlib.repr(name)}; known: {', '.join(sorted(known))}")
        return found


def _problem(item: Any) -> tuple[str, str]:
    """Return the field of one of pydantic's problems, and what is wrong with it, with the value."""
    place = ""
    for part in item["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else part
    place = place or "body"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] not in WITHOUT_VALUE:
        message += f", got {reprlib.repr(item['input'])}"
    return place, f"{place}{'' if message.startswith(('[', ':')) else ': '}{message}"
