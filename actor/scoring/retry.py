"""What went wrong with an attempt, and whether to retry: within the request's own limit and a budget shared by all."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from enum import Enum

from python_backend.config import ClientSection
from python_backend.errors import RlhfError

MAX_BACKOFF_S = 8.0


class RequestFailed(RlhfError):
    """A request got no answer worth having; the message names model, server, attempts and cause."""


class ServerFailed(RequestFailed):
    """The server has done what was asked, and it failed (500): the same request would not be done again."""


class OverBudget(RequestFailed):
    """The request might have been repeated, but too many others were."""


@dataclass
class RequestCounters:
    """What the client saw; a request that succeeded in the end did not fail."""

    requests: int = 0
    retries: int = 0
    """Further attempts, of whatever kind."""
    failovers: int = 0
    """Those of them that went to another server at once."""
    over_budget: int = 0
    """Requests that failed because the retry budget was spent."""
    failed_requests: int = 0
    outages: int = 0
    """Times that requests had to wait because no server answered."""
    outage_seconds: float = 0.0
    """How long these lasted, those that are over."""


class Kind(Enum):
    """What an attempt says about the server and the request."""

    UNREACHABLE = "no connection, so nothing was sent"
    LOST = "the connection broke, or no answer came in time"
    DEAD = "the model's process has died"
    BUSY = "not now: 503"
    FAILED = "done, and failed: 500"
    WRONG = "the request will never be answered"

    @property
    def is_final(self) -> bool:
        """Whether the server has answered, and would answer the same again."""
        return self in (Kind.FAILED, Kind.WRONG)


class Trouble(Exception):
    """Why an attempt got no answer; raised `from` the original error."""

    def __init__(self, kind: Kind, what: str, why: str = "", *, hint: str = "") -> None:
        """`what` happened, and `why`, as parts of a sentence: "critic at host:8000 refused after 2 attempts: why"."""
        super().__init__(what, why)
        self.kind, self.what, self.why, self._hint = kind, what, why, hint

    def sentence(self, model: str, url: str, attempts: int) -> str:
        """For people."""
        tries = f" after {attempts} attempts" if attempts > 1 else ""
        return f"{model} at {url} {self.what}{tries}" + (f": {self.why}" if self.why else "") + self._hint


class RetryBudget:
    """A bucket of retries for all requests: each request earns a fraction of one, each retry spends one.

    As in Finagle, Envoy and gRPC: where every request fails, retries add a fraction to the load instead of multiplying
    it. The bucket begins full, so that a small run may retry too, and never holds more.
    """

    def __init__(self, per_request: float, reserve: int) -> None:
        self._per_request, self._most = per_request, float(reserve)
        self._tokens = self._most

    def earn(self) -> None:
        """A request was made."""
        self._tokens = min(self._most, self._tokens + self._per_request)

    def spend(self) -> bool:
        """Whether a retry may be made; it is paid for."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Course:
    """The attempts of one request.

    | what happened | the server | the request |
    |---|---|---|
    | no connection | set aside | goes on at another server, or waits for one; free of charge |
    | connection lost, model's process dead | set aside | the same, for one of its own retries |
    | no answer in time, 503, and still ready | stays | pauses; one of its own retries, and one of the budget |
    | anything else | stays | fails |
    """

    def __init__(self, model: str, settings: ClientSection, budget: RetryBudget, *, retries: int) -> None:
        self.model, self.budget = model, budget
        self.retried = 0  # further attempts
        self._made = 0  # attempts that reached a server
        self._settings, self._retries = settings, retries
        self._unreached_since: float | None = None

    def moves_on(self, trouble: Trouble, url: str) -> None:
        """Another attempt without a pause: its server is set aside. Raises RequestFailed if there may be none."""
        if trouble.kind is not Kind.UNREACHABLE:
            self._reached(trouble, url)
            self._unreached_since = None
        elif self._unreached_since is None:
            self._unreached_since = time.monotonic()
        elif time.monotonic() - self._unreached_since > self._settings.max_outage_s:  # ready, and gone when asked
            raise self._failure(trouble, url) from trouble.__cause__
        self.retried += 1

    def pause_s(self, trouble: Trouble, url: str) -> float:
        """Seconds until another attempt at a server that is still there. Raises RequestFailed if there is none."""
        self._reached(trouble, url)
        if not self.budget.spend():
            cause = trouble.sentence(self.model, url, self.retried + 1)
            raise OverBudget(
                f"{cause}; not repeated: too many requests fail, actor.client.retry_budget is spent"
            ) from trouble.__cause__
        self.retried += 1
        longest = min(MAX_BACKOFF_S, self._settings.backoff_s * 2 ** (self._made - 1))
        return jittered(longest)

    def _reached(self, trouble: Trouble, url: str) -> None:
        self._made += 1
        if trouble.kind.is_final or self._made > self._retries:
            raise self._failure(trouble, url) from trouble.__cause__

    def _failure(self, trouble: Trouble, url: str) -> RequestFailed:
        kind = ServerFailed if trouble.kind is Kind.FAILED else RequestFailed
        return kind(trouble.sentence(self.model, url, self.retried + 1))


def jittered(longest_s: float) -> float:
    """Between half of it and all of it, so that those who failed together do not come back together."""
    return longest_s * random.uniform(0.5, 1.0)
