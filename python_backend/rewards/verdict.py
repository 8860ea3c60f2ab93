"""Reads the score from a judge's answer. An answer without a clear score on the scale is a failure, never 0."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from python_backend.rewards.function import BadScore

LONGEST_EXCERPT = 160  # of an answer, in an error message; its end, which should have the score
_MARKUP = re.compile(r"[*_`$]")
_NUMBER = re.compile(r"(?<!\d)[-+−]?(?<!\d)\d+(?:[.,]\d+)*")
# Between the last two numbers, so that "8/10" is not 10 and "7-8" not 8. In both patterns only one part can take a
# character, because they are matched against whatever a judge, and so perhaps a policy, has written.
_OF_SCALE = re.compile(
    r"(?:\W*(?:points?|stars?))?[^\w/]*/\W*|\W*(?:(?:points?|stars?)\W*)?(?:out )?of\W*", re.IGNORECASE
)
_RANGE = re.compile(r"\s*(?:\([^()]*\)\s*)?(?:[-–—]|to|or)\s*|.*/[^\w/]*|.*\bof\W*", re.IGNORECASE | re.DOTALL)


class NoVerdict(BadScore):
    """The judge gave no score; the message says why."""


@dataclass(frozen=True)
class VerdictReader:
    """How to read a score from `low` to `high`: by `pattern`, by `json_key`, or else as the answer's last number."""

    low: float
    high: float
    pattern: re.Pattern[str] | None = None
    json_key: str | None = None

    def read(self, answer: str) -> float:
        """Return the score. Raises NoVerdict, with an excerpt of the answer, if there is none on the scale."""
        try:
            score = self._find(answer)
            if not self.low <= score <= self.high:  # also NaN
                raise NoVerdict(f"the judge's score {score:g} is outside {self.low:g} to {self.high:g}")
        except NoVerdict as error:
            raise NoVerdict(f"{error}: {excerpt(answer)}") from None
        return score

    def _find(self, answer: str) -> float:
        if self.json_key is not None:
            return _number(_last_object(answer, self.json_key)[self.json_key])
        if self.pattern is not None:
            found = [*self.pattern.finditer(answer)]
            if not found:
                raise NoVerdict("the judge's answer does not match options.pattern")
            return _number(found[-1][1])
        return _last_number(_MARKUP.sub("", answer), self.high)


def _last_number(text: str, high: float) -> float:
    """Return the last number, or the one before it if the last is the top of the scale, as in "8 out of 10"."""
    found = [*_NUMBER.finditer(text)]
    if not found:
        raise NoVerdict("the judge's answer has no number")
    if len(found) > 1:
        before, between = found[-2], text[found[-2].end() : found[-1].start()]
        if _OF_SCALE.fullmatch(between) and _number(found[-1][0]) == high:
            return _number(before[0])
        if _RANGE.fullmatch(between):
            raise NoVerdict(
                f"the judge's answer ends with {text[before.start() : found[-1].end()]!r:.60}, not one score"
            )
    return _number(found[-1][0])


def excerpt(answer: str) -> str:
    """Return the end of an answer, quoted, as one line."""
    line = " ".join(answer.split())
    return repr(line if len(line) <= LONGEST_EXCERPT else f"… {line[-LONGEST_EXCERPT:]}")


def _number(value: Any) -> float:
    if isinstance(value, str):
        value = value.strip().replace("−", "-")
    try:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise NoVerdict(f"the judge's score {value!r:.40} is not a number")


def _last_object(answer: str, key: str) -> dict[str, Any]:
    """Return the last JSON object in the answer that has the key; text and code fences around it are ignored."""
    decoder, found, start = json.JSONDecoder(), None, answer.find("{")
    while start >= 0:
        try:
            value, start = decoder.raw_decode(answer, start)
            found = value if key in value else found
        except (ValueError, RecursionError):
            start += 1
        start = answer.find("{", start)
    if found is None:
        raise NoVerdict(f"the judge's answer has no JSON object with {key!r}")
    return found
