"""Client of an OpenAI-compatible endpoint, with retries until a deadline. Needs the standard library alone."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from python_backend.backoff import backoff_s
from python_backend.errors import RlhfError
from python_backend.rewards.counts import count
from python_backend.rewards.opener import opener_for

FIRST_PAUSE_S = 0.5
MAX_REPLY_BYTES = 4_000_000
LONGEST_MESSAGE = 200
TOO_BUSY = (408, 425, 429)  # and every 5xx


class EndpointFailed(RlhfError):
    """The endpoint gave no usable reply; the message says why."""


class _WorthRetrying(Exception):
    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


@dataclass(frozen=True)
class Reply:
    """The first choice of a chat completion."""

    text: str
    is_cut: bool
    """Whether it ended at the token limit."""
    prompt_tokens: int
    completion_tokens: int


class ChatEndpoint:
    """Requests chat completions; counts `requests`, `retries` and `request_seconds`."""

    def __init__(self, base_url: str, key: str | None, *, max_retries: int, request_timeout_s: float) -> None:
        """`base_url`: with the version, as in `http://127.0.0.1:8000/v1`. `key`: sent as a bearer token."""
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._key, self._max_retries, self._timeout_s = key, max_retries, request_timeout_s
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._opener = opener_for(base_url)

    def complete(self, body: Mapping[str, Any], deadline: float) -> Reply:
        """Return the reply to a request. Raises EndpointFailed; `deadline` is a time of `time.monotonic`."""
        data = json.dumps(body).encode()
        for attempt in range(self._max_retries + 1):
            try:
                return self._attempt(data, deadline)
            except _WorthRetrying as error:
                cause = str(error)
                pause_s = max(backoff_s(FIRST_PAUSE_S, attempt), error.after_s)
            if time.monotonic() + pause_s >= deadline:
                raise EndpointFailed(f"{cause}; no time for another attempt after {attempt + 1}")
            if attempt < self._max_retries:
                count("retries")
                time.sleep(pause_s)
        raise EndpointFailed(f"{cause}; gave up after {self._max_retries + 1} attempts")

    def redacted(self, text: str) -> str:
        """Return the text without the key, which an endpoint may repeat in its messages."""
        return text.replace(self._key, "***") if self._key else text

    def _without_key(self, content: bytes) -> bytes:
        """Return a reply without the key, before it is truncated: `redacted` would not find a part of the key."""
        return content.replace(self._key.encode(), b"***") if self._key else content

    def _attempt(self, data: bytes, deadline: float) -> Reply:
        request = urllib.request.Request(self._url, data, self._headers)
        started = time.monotonic()
        count("requests")
        try:
            with self._opener.open(request, timeout=max(0.001, min(self._timeout_s, deadline - started))) as reply:
                content = self._without_key(reply.read(MAX_REPLY_BYTES + 1))
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from error
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", None) or error
            raise _WorthRetrying(f"{self._url}: {type(cause).__name__}: {cause}") from error
        finally:
            count("request_seconds", time.monotonic() - started)
        if len(content) > MAX_REPLY_BYTES:
            raise EndpointFailed(f"{self._url}: the reply has more than {MAX_REPLY_BYTES} bytes")
        return self._reply(content)

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        content = b""
        with error, contextlib.suppress(OSError, http.client.HTTPException):
            content = self._without_key(error.read(MAX_REPLY_BYTES))
        message = f"{self._url}: HTTP {error.code}: {_message(content) or error.reason}"
        if error.code in TOO_BUSY or error.code >= 500:
            return _WorthRetrying(message, _retry_after_s(error.headers.get("Retry-After")))
        return EndpointFailed(message)

    def _reply(self, content: bytes) -> Reply:
        try:
            reply = json.loads(content)
            choice, usage = reply["choices"][0], reply.get("usage") or {}
            text = choice["message"].get("content")
            tokens = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _WorthRetrying(f"{self._url}: not a chat completion: {_line(content)}") from error
        if not isinstance(text, str):
            raise EndpointFailed(f"{self._url}: the reply has no text: {_line(content)}")
        known = [number if isinstance(number, int) and number > 0 else 0 for number in tokens]
        return Reply(text, choice.get("finish_reason") == "length", *known)


def _message(content: bytes) -> str:
    """Return the message in an error's body, in OpenAI's form if it has it."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return _line(str(json.loads(content)["error"]["message"]).encode())
    return _line(content)


def _line(content: bytes) -> str:
    line = " ".join(content[: 4 * LONGEST_MESSAGE].decode("utf-8", "replace").split())
    return line if len(line) <= LONGEST_MESSAGE else line[:LONGEST_MESSAGE] + " …"


def _retry_after_s(value: str | None) -> float:
    """Return the seconds of a Retry-After header, which has seconds or a date; 0 if it has neither."""
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, float(value or 0))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(str(value)).timestamp() - time.time())
    return 0.0
