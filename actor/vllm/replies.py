"""Reads vLLM's replies to generation requests: unchecked, their values would reach rows, exports and training."""

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from rlhf_triton.actor.data.recorded import PolicyTurn, RecordedVersion
from rlhf_triton.client.errors import AttemptFailed, ErrorKind
from rlhf_triton.errors import reason_of_item

COMPLETE = ("stop", "length")  # finish_reason of a whole response


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class _TokenLogprob(_Part):
    logprob: float


class _Logprobs(_Part):
    content: list[_TokenLogprob] = Field(default=[])


class _Span(_Part):
    version: RecordedVersion = None
    start: NonNegativeInt
    end: NonNegativeInt


class _Choice(_Part):
    finish_reason: str | None = None
    token_ids: list[NonNegativeInt] = Field(default=[])
    logprobs: _Logprobs = _Logprobs()
    weight_versions: list[_Span] = Field(default=[])


class _Reply(_Part):
    choices: Annotated[list[_Choice], Field(min_length=1)]


def turn_in(reply: Mapping[str, Any], vocab_size: int | None) -> PolicyTurn:
    """Return the complete response in a reply; `vocab_size`: of the policy, None if unknown. Raises AttemptFailed."""
    try:
        choice = _Reply.model_validate(reply).choices[0]
    except ValidationError as error:
        item = error.errors(include_url=False)[0]
        place = ".".join(map(str, item["loc"]))
        raise _damaged(f"{place}: {reason_of_item(item)}, got {reprlib.repr(item['input'])}") from None
    if choice.finish_reason not in COMPLETE:  # "abort": the server was paused by another client
        raise AttemptFailed(ErrorKind.LOST, "did not complete a response", f"finish_reason {choice.finish_reason!r}")
    tokens = choice.token_ids
    logprobs = [item.logprob for item in choice.logprobs.content]
    if not len(tokens) == len(logprobs) > 0:
        raise _damaged(f"{len(tokens)} tokens with {len(logprobs)} log-probs")
    if vocab_size is not None and max(tokens) >= vocab_size:
        raise _damaged(f"token id {max(tokens)} is outside the vocabulary of {vocab_size}")
    versions: list[RecordedVersion] = [None] * len(tokens)
    for span in choice.weight_versions:
        if not span.start <= span.end <= len(tokens):
            raise _damaged(f"weights version {span.version} of the tokens {span.start} to {span.end} of {len(tokens)}")
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return PolicyTurn(tokens, choice.finish_reason == "stop", logprobs, versions)


def _damaged(why: str) -> AttemptFailed:
    return AttemptFailed(ErrorKind.LOST, "answered with a damaged response", why)
