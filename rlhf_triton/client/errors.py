"""Errors of requests, and codes in servers' messages. The only module that searches an error's text.

Triton passes on only the text of a model's error, so a code is a piece of text that occurs in no other error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from rlhf_triton.errors import RlhfError
from rlhf_triton.wire.contract import DEMANDED, IN_JOURNAL, NEEDS_MORE, STEP_AHEAD, UNTIL_LOADED

# From Triton itself:
UNLOADED = "has no available versions"  # 404; a model that never existed "is not found"
UNKNOWN_MODEL = "unknown model"
DEAD_PROCESS = "' is not healthy"  # "Stub process '…' is not healthy.", whatever the status
LOST_DEVICE = "CUDA error"
RESTRICTED = "restricted"  # from gRPC, for a request without the key for model control
UNREADABLE = "failed to poll"  # for a load if config.pbtxt is invalid; only the log says why
CODES = (
    IN_JOURNAL,
    STEP_AHEAD,
    NEEDS_MORE,
    UNTIL_LOADED,
    DEMANDED,
    DEAD_PROCESS,
    LOST_DEVICE,
    UNLOADED,
    UNKNOWN_MODEL,
    RESTRICTED,
    UNREADABLE,
)


def code_of(message: str) -> str | None:
    """Return the first of `CODES` in a server's error message; None if it contains none."""
    return next((code for code in CODES if code in message), None)


class RequestFailed(RlhfError):
    """A request failed and is no longer retried; the message names model, server, attempts and cause."""

    def __init__(self, message: str, why: str = "") -> None:
        """`why`: the server's own message, if it sent one."""
        super().__init__(message)
        self.why = why

    @property
    def code(self) -> str | None:
        """The code in the server's error, or None."""
        return code_of(self.why)


class ServerFailed(RequestFailed):
    """The server executed the request, which failed (500); a repeated request would not be executed again."""


class RequestRefused(RequestFailed):
    """The server rejects the request and would reject any repetition."""


class ReplyLost(RequestFailed):
    """A server was reached, but the reply did not arrive, in time or at all, as often as the request was sent."""


class ServersDiffer(RequestFailed):
    """No server has the configuration that this process expects; the message names both."""


@contextmanager
def absence_explained(missing: str) -> Iterator[None]:
    """Convert RequestRefused for an unknown model into RlhfError: "the server serves {missing}"."""
    try:
        yield
    except RequestRefused as error:
        if error.code != UNKNOWN_MODEL:
            raise
        raise RlhfError(f"the server serves {missing} ({error})") from error


class ErrorKind(Enum):
    """Why an attempt failed."""

    UNREACHABLE = "no connection, so nothing was sent"
    UNLOADED = "the server has unloaded the model, as it does before it stops; the request was not executed"
    DIFFERENT = "the server serves other models than expected; the reply, if any, does not count"
    LOST = "the connection broke, or the reply is incomplete"
    LATE = "no reply arrived in time"
    DEAD = "the model's process has died"
    BUSY = "the server is busy: 503"
    OTHER_VERSION = "the server does not serve the version that the request demands"
    FAILED = "the server executed the request, and it failed: 500"
    WRONG = "the server rejects the request"

    @property
    def is_final(self) -> bool:
        """Whether a retry would get the same reply. (Callers may still retry a 500 of a request that only reads.)"""
        return self in (ErrorKind.FAILED, ErrorKind.WRONG)

    @property
    def is_refusal(self) -> bool:
        """Whether nothing was executed, and the server currently refuses every request."""
        return self in (ErrorKind.UNREACHABLE, ErrorKind.UNLOADED, ErrorKind.DIFFERENT)


KINDS = {
    DEAD_PROCESS: ErrorKind.DEAD,
    UNTIL_LOADED: ErrorKind.DEAD,
    LOST_DEVICE: ErrorKind.DEAD,
    DEMANDED: ErrorKind.OTHER_VERSION,
    UNLOADED: ErrorKind.UNLOADED,
    "503": ErrorKind.BUSY,
    "": ErrorKind.BUSY,
    "500": ErrorKind.FAILED,
}


FAILURES = {
    ErrorKind.FAILED: ServerFailed,
    ErrorKind.WRONG: RequestRefused,
    ErrorKind.DIFFERENT: ServersDiffer,
    ErrorKind.LOST: ReplyLost,
    ErrorKind.LATE: ReplyLost,
}


class AttemptFailed(Exception):
    """A failed attempt; raised `from` the original error."""

    def __init__(self, kind: ErrorKind, event: str, why: str = "", *, hint: str = "") -> None:
        """`event`, `why`, `hint`: parts of a sentence, "critic at host:8000 <event> after 2 attempts: <why><hint>"."""
        super().__init__(event, why)
        self.kind = kind
        self.event = event
        self.why = why
        self._hint = hint

    @classmethod
    def refused(cls, status: str, message: str) -> AttemptFailed:
        """Classify a server's error reply; a 503 and an unloaded or dead model are transient."""
        code = code_of(message)
        event = "has no result yet" if code == IN_JOURNAL else "refused"
        return cls(KINDS.get(code or "no code") or KINDS.get(status, ErrorKind.WRONG), event, message)

    @property
    def is_out_of_order(self) -> bool:
        """Whether the server refuses a step because it has not received the previous step."""
        return self.kind is ErrorKind.WRONG and code_of(self.why) == STEP_AHEAD

    def sentence(self, model: str, url: str, attempts: int) -> str:
        """Return the error message."""
        tries = f" after {attempts} attempts" if attempts > 1 else ""
        return f"{model} at {url} {self.event}{tries}" + (f": {self.why}" if self.why else "") + self._hint
