"""Fields shared by the reward protocols' bodies: limits, rows, token ids and messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from rlhf_triton.actor.capture.http import HttpError
from rlhf_triton.client.reward_source import Row, RowResult
from rlhf_triton.client.served import ServedModel
from rlhf_triton.wire.messages import plain_messages

MAX_ROWS = 4096  # per request
MAX_BODY_BYTES = 16_000_000  # limit of a request, of the texts of its rows, and of all large bodies in memory


def check_number(number: int) -> None:
    """Raise HttpError unless a request of this number of rows may be scored."""
    if not 1 <= number <= MAX_ROWS:
        raise HttpError(413 if number else 400, f"{number} rows, must be 1 to {MAX_ROWS} per request")


def check_rows(rows: Sequence[Row], served: ServedModel) -> None:
    """Raise HttpError if there is no row, or there are too many or too long ones."""
    check_number(len(rows))
    size = sum(row.num_characters for row in rows)  # for /score far more than its body
    if size > MAX_BODY_BYTES:
        raise HttpError(413, f"{size} characters in all rows, must be at most {MAX_BODY_BYTES}: send fewer")
    if (longest := max(row.num_characters for row in rows)) > served.max_request_bytes:
        raise HttpError(413, f"a text of {longest} characters, must have at most {served.max_request_bytes}")


def check_all(results: Sequence[RowResult], name: str) -> None:
    """Raise HttpError with the first row's error, if any row has no reward; `name`: the field with the rows."""
    for i, result in enumerate(results):
        if result.error is not None:
            where = f"{name}[{i}]: " if len(results) > 1 else ""
            raise HttpError(result.status, where + result.error)


T = TypeVar("T")


def _check_row_count(value: Any) -> Any:
    if isinstance(value, list) and value:
        check_number(len(value))
    return value


# A list stops at its first invalid item: the errors of millions would need gigabytes.
BoundedRows = Annotated[list[T], Field(fail_fast=True), BeforeValidator(_check_row_count)]
OneOrMoreTexts = Annotated[
    BoundedRows[str], Field(min_length=1), BeforeValidator(lambda one: [one] if isinstance(one, str) else one)
]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
# Other keys of a message, such as `tool_calls`, reach the reward model's chat template.
ChatMessages = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True), AfterValidator(plain_messages)]
