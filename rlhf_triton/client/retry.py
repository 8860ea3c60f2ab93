"""Decides whether to retry a failed attempt, within a limit per request and a budget shared by all requests."""

import logging
import time
from dataclasses import KW_ONLY, dataclass, field

from rlhf_triton.backoff import backoff_s
from rlhf_triton.client.errors import (
    FAILURES,
    AttemptFailed,
    ErrorKind,
    RequestFailed,
)
from rlhf_triton.config.client import ClientSettings
from rlhf_triton.wire.contract import VersionRange

logger = logging.getLogger(__name__)
HINT = "; is `rlhf-triton serve` running there?"
RETRIES = 6  # per request, after a 503, a timeout or a lost connection, within the shared budget
BACKOFF_S = 0.25  # first pause between attempts; doubles, with jitter
TRAIN_DEADLINE_S = 600.0  # timeout of an attempt of critic_train or critic_save
PER_REQUEST = 0.2  # fraction of a retry that each request adds to the budget
RETRY_RESERVE = 100  # size of a retry budget: enough for a small run's failures, too little for a retry storm


@dataclass(kw_only=True)
class RequestCounters:
    """Counts of requests, retries and outages; a request that succeeds after retries does not count as failed."""

    requests: int = 0
    retries: int = 0
    """Attempts after the first, including failovers."""
    failovers: int = 0
    """Retries that went to another server at once."""
    over_budget: int = 0
    """Requests that failed because the retry budget was exhausted."""
    failed_requests: int = 0
    outages: int = 0
    """How often requests had to wait because no server was healthy."""
    outage_seconds: float = 0.0
    """Total duration of the outages that have ended."""


class RetryBudget:
    """Token bucket of retries shared by all requests: a request earns a fraction of a token, a retry spends one.

    As in Finagle, Envoy and gRPC, retries add at most a fraction to the load if every request fails, instead of
    multiplying it. The bucket starts full, so that small runs can retry as well.
    """

    def __init__(self, reserve: int) -> None:
        self._tokens = self._most = float(reserve)

    def earn(self) -> None:
        """Add to the budget the fraction of a retry that one request contributes."""
        self._tokens = min(self._most, self._tokens + PER_REQUEST)

    def spend(self) -> bool:
        """Take one token for a retry; return whether there was one."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@dataclass(eq=False)
class Attempts:
    """The attempts of one request.

    | failure | the server | the request |
    |---|---|---|
    | no connection, or the model was unloaded | set aside | goes to another server, or waits for one; no retry |
    | connection lost, model process dead | set aside | the same, but costs one own retry |
    | timeout or 503, and the server is still ready | stays | pauses; costs one own retry and one token of the budget |
    | 500 of a request that may be repeated, as when /dev/shm is full | stays | the same |
    | 503: another version than demanded | stays | goes to another server, or pauses; costs nothing for `deadline_s` |
    | 503 of a training request: the sidecar is away | stays | pauses; costs nothing for `outlast_s` |
    | anything else | stays | fails |
    """

    model: str
    settings: ClientSettings
    budget: RetryBudget
    _: KW_ONLY
    retries: int = RETRIES
    outlast_s: float = 0.0
    repeats_failures: bool = False
    repeats_late: bool = True
    """Whether to retry after a timeout even if the server is still ready."""
    demanded: VersionRange | None = None
    """The weights versions that may answer the request; None: any."""
    session: int | str | None = None
    """Requests of the same session go to the same server while it is healthy."""
    outdated: set[str] = field(default_factory=set)
    """URLs of the servers that, since the last pause, did not have the demanded versions."""
    retried: int = 0  # attempts after the first
    is_over_budget: bool = False
    _num_attempts: int = 0  # attempts that reached a server
    _pauses: int = 0
    _began: dict[str, float] = field(default_factory=dict)  # trouble -> when the request met it first

    def record_failover(self, failure: AttemptFailed, url: str) -> None:
        """Record a retry without a pause, after a server was lost. Raises RequestFailed if no retry is left."""
        if not failure.kind.is_refusal:
            self._count_attempt(failure, url)
            self._began.pop("unreached", None)
        elif self._lasted_s("unreached") > self.settings.max_outage_s:
            # Servers that pass the probe but refuse this request never trigger the pool's `max_outage_s`.
            raise self._failure(failure, url) from failure.__cause__
        self.retried += 1

    def pause_for_version_s(self, failure: AttemptFailed, url: str) -> float:
        """Return the pause before a retry while no server has the demanded versions.

        Raises RequestFailed after `deadline_s`.
        """
        left_s = self.settings.deadline_s - self._lasted_s("unserved")
        if left_s <= 0:
            raise self._failure(failure, url) from failure.__cause__
        self.outdated.add(url)
        self.retried += 1
        return min(left_s, backoff_s(BACKOFF_S, self.retried - 1))

    def pause_s(self, failure: AttemptFailed, url: str) -> float:
        """Return the pause before a retry at a healthy server. Raises RequestFailed if no retry is left."""
        if self._retry_outage(failure, url):
            self.retried += 1
            self._pauses += 1
            return backoff_s(BACKOFF_S, self._pauses)
        if failure.kind is ErrorKind.LATE and not self.repeats_late:
            raise self._failure(failure, url) from failure.__cause__
        self._count_attempt(failure, url)
        if not self.budget.spend():
            cause = failure.sentence(self.model, url, self.retried + 1)
            self.is_over_budget = True
            raise RequestFailed(
                f"{cause}; not retried: too many requests fail, so the retry budget is exhausted", failure.why
            ) from failure.__cause__
        self.retried += 1
        return backoff_s(BACKOFF_S, self._num_attempts - 1)

    def _retry_outage(self, failure: AttemptFailed, url: str) -> bool:
        """Return whether to retry a 503 without using up a retry; log the first one."""
        if failure.kind is not ErrorKind.BUSY or not self.outlast_s:
            return False
        if not self._pauses:
            logger.warning("%s; retrying for up to %g s", failure.sentence(self.model, url, 1), self.outlast_s)
        return self._lasted_s("busy") < self.outlast_s

    def _lasted_s(self, trouble: str) -> float:
        """Return for how long the request has met this trouble; 0 the first time."""
        now = time.monotonic()
        return now - self._began.setdefault(trouble, now)

    def _count_attempt(self, failure: AttemptFailed, url: str) -> None:
        self._num_attempts += 1
        is_final = failure.kind.is_final and not (failure.kind is ErrorKind.FAILED and self.repeats_failures)
        if is_final or self._num_attempts > self.retries:
            raise self._failure(failure, url) from failure.__cause__

    def _failure(self, failure: AttemptFailed, url: str) -> RequestFailed:
        sentence = failure.sentence(self.model, url, self.retried + 1)
        return FAILURES.get(failure.kind, RequestFailed)(sentence, failure.why)
