"""The YAML's `rewards`: a weighted sum of the scores of the reward checkpoint and of Python functions."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator

from python_backend.config.fields import Count, Seconds, Section
from python_backend.rewards.function import TIMEOUT_OPTION, check_spec

MODEL_TERM = "model"  # the checkpoint of the section `reward`
TERM_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


FunctionSpec = Annotated[str, AfterValidator(check_spec)]


class RewardTerm(Section):
    """One term of the sum: `model` is the checkpoint of the `reward` section, any other name is a Python function."""

    weight: float = 1.0
    """Factor of the score. With 0 the score is only logged, but a sample for which it fails still has no reward."""
    function: FunctionSpec | None = None
    """`path/to/file.py:name` or `package.module:name`, called with one `Sample`; not allowed for `model`."""
    groupwise: bool = False
    """The function receives a list of all responses to a prompt, and returns a number for each."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments for the function; of a class, those of its constructor. Anything that JSON can express."""
    timeout_s: Seconds = 2.0
    """Timeout for one sample, or one group; on expiry the worker process is killed, and none of them has a reward."""
    workers: Count = 2
    """Number of worker processes."""
    memory_mib: Count = 4096
    """Memory limit of a worker; the function gets a MemoryError beyond it."""

    @field_validator("options")
    @classmethod
    def _for_a_call(cls, value: dict[str, Any]) -> dict[str, Any]:
        wrong = next((name for name in value if not name.isidentifier() or name == TIMEOUT_OPTION), None)
        if wrong is not None:
            why = "use the term's own timeout_s" if wrong == TIMEOUT_OPTION else "not the name of an argument"
            raise ValueError(f"{wrong!r}: {why}")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:  # a date, or .nan
            raise ValueError(f"not expressible in JSON: {error}") from error
        return value


Terms = Annotated[dict[str, RewardTerm], Field(min_length=1)]


def check_terms(terms: dict[str, RewardTerm]) -> None:
    """Raise ValueError if a name is invalid, `model` sets more than a weight, or another term has no function."""
    for name, term in terms.items():
        if not TERM_NAME.fullmatch(name):
            raise ValueError(
                f"rewards.{name}: a name has 1 to 40 characters from a-z, 0-9 and _, beginning with a letter"
            )
        if name == MODEL_TERM and term.model_fields_set - {"weight"}:
            wrong = sorted(term.model_fields_set - {"weight"})[0]
            raise ValueError(
                f"rewards.{MODEL_TERM}.{wrong}: {MODEL_TERM!r} is the checkpoint of the reward section and takes "
                "only a weight; give a function a different name"
            )
        if name != MODEL_TERM and term.function is None:
            raise ValueError(
                f"rewards.{name}.function is missing: only {MODEL_TERM!r}, the checkpoint of the reward section, "
                "needs none"
            )


def function_terms(terms: dict[str, RewardTerm]) -> dict[str, RewardTerm]:
    """Return the terms that are functions."""
    return {name: term for name, term in terms.items() if name != MODEL_TERM}
