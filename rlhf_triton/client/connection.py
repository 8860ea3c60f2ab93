"""Connections to one server over tritonclient's async HTTP, with a deadline per attempt.

The only module that imports tritonclient.http.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import aiohttp
from tritonclient.http import InferInput, InferRequestedOutput
from tritonclient.http.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from rlhf_triton.client.deadline import timeout
from rlhf_triton.client.errors import AttemptFailed, ErrorKind
from rlhf_triton.client.retry import HINT
from rlhf_triton.client.served import ServedModels
from rlhf_triton.wire.contract import Arrays

logger = logging.getLogger(__name__)
T = TypeVar("T")
PROBE_TIMEOUT_S = 5.0
HTTP_PORT = "give Triton's HTTP port (server.http_port), not the one for gRPC or metrics"
MORE_CONNECTIONS = 8  # beyond the requests in flight, so that probes never wait for a connection


class ServerMessage:
    """An inference request, encoded once for all its attempts."""

    def __init__(
        self,
        model: str,
        arrays: Arrays,
        outputs: tuple[str, ...],
        headers: Mapping[str, str],
        parameters: Mapping[str, int] | None = None,
    ) -> None:
        self.model = model
        self.outputs = outputs
        self.headers = headers
        self.parameters = parameters
        self.inputs = []
        for name, array in arrays.items():
            tensor = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            tensor.set_data_from_numpy(array)
            self.inputs.append(tensor)


class HTTPConnection:
    """A pool of connections to one server."""

    def __init__(self, url: str, *, max_in_flight: int, models: ServedModels) -> None:
        """`models`: a server that declares other models gets no requests."""
        self._url = url
        self._models = models
        self._difference = ""
        self._checked: set[str] = set()  # models checked since the last connection was made
        self._checking = asyncio.Lock()
        limit = max_in_flight + MORE_CONNECTIONS
        # No connection timeout here: `attempt` sets the only deadline.
        self.http = InferenceServerClient(url, conn_limit=limit, conn_timeout=None)
        # Counts connections by wrapping the connector, because aiohttp's tracing calls a dozen functions per request.
        connector: Any = self.http._stub.connector
        self._connect = connector._create_connection
        connector._create_connection = self._connected

    async def attempt(
        self, send: Callable[[], Awaitable[T]], deadline_s: float, *, repeat_after_s: float | None = None
    ) -> T:
        """Return the result of `send`. Raises AttemptFailed if it fails or misses the deadline.

        `repeat_after_s`: repeat an idempotent request without a reply after this time, then after twice as long, and so
        on: Triton never replies to a request whose model process is killed while it waits there.
        """
        try:
            async with timeout(deadline_s):  # before Python 3.12, wait_for may swallow a cancellation
                while repeat_after_s is not None:
                    with contextlib.suppress(asyncio.TimeoutError):
                        async with timeout(repeat_after_s):
                            return await send()
                    repeat_after_s *= 2
                return await send()
        except (InferenceServerException, aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError) as error:
            raise attempt_failure(error, deadline_s) from error

    async def infer(self, message: ServerMessage) -> Arrays:
        """Return the outputs of an inference request. Raises the client library's errors: call it within `attempt`."""
        wanted = [InferRequestedOutput(name, binary_data=True) for name in message.outputs]
        reply = await self.http.infer(
            message.model,
            message.inputs,
            outputs=wanted,
            headers=dict(message.headers),  # the client library modifies the dictionary
            parameters=message.parameters,
        )
        if self._unchecked:  # of all models, because an ensemble does not declare what its models do
            async with self._checking:
                for model in self._unchecked:
                    checked = self._checked  # a connection made meanwhile replaces the set
                    await self.describe(model)
                    checked.add(model)
        arrays = {name: reply.as_numpy(name) for name in message.outputs}
        for name, array in arrays.items():
            if array is None:
                raise AttemptFailed(ErrorKind.WRONG, "does not answer as Triton does", f"its reply lacks {name}")
        return arrays

    async def describe(self, model: str) -> None:
        """Read what a model declares. Raises AttemptFailed if its parameters are unexpected; see also `infer`."""
        config = await self.http.get_model_config(model)
        if not isinstance(config, dict):
            raise ValueError(f"{config!r} is not a model's configuration")
        difference = self._models.declare(model, config)
        if not difference:
            return
        if difference != self._difference:
            logger.warning("%s gets no requests: %s", self._url, difference)
        self._difference = difference
        raise AttemptFailed(ErrorKind.DIFFERENT, "serves another configuration", difference)

    async def get_ready(self, model: str) -> str | None:
        """Return why the model is not ready, or None. Raises AttemptFailed, also if its parameters are unexpected."""
        if not await self.attempt(lambda: self.http.is_model_ready(model), PROBE_TIMEOUT_S):
            return f"{model} not ready"
        if model in self._models.compared:
            await self.attempt(lambda: self.describe(model), PROBE_TIMEOUT_S)
        return None

    @property
    def _unchecked(self) -> list[str]:
        return sorted(self._models.compared - self._checked)

    async def _connected(self, *arguments: Any) -> Any:
        connection = await self._connect(*arguments)
        self._checked = set()  # perhaps to a restarted server with another configuration
        return connection

    async def close(self) -> None:
        """Close all connections; requests in flight fail."""
        await self.http.close()


def attempt_failure(error: Exception, deadline_s: float, *, hint: str = HINT) -> AttemptFailed:
    """Classify an error of an attempt; timeouts and connection errors are transient.

    `hint`: end of the message if the server cannot be reached.
    """
    if isinstance(error, InferenceServerException):
        status = str(error.status() or "")
        is_triton = error.debug_details() is None  # otherwise the body that tritonclient could not read
        why = str(error.message()) if is_triton else f"HTTP {status} without Triton's JSON; {HTTP_PORT}"
        return AttemptFailed.refused(status, why)
    if isinstance(error, asyncio.TimeoutError):
        return AttemptFailed(ErrorKind.LATE, f"did not respond within {deadline_s:g} s")
    if isinstance(error, aiohttp.ClientResponseError):  # not an HTTP status, which tritonclient handles itself
        return AttemptFailed(ErrorKind.WRONG, "does not answer in HTTP", HTTP_PORT)
    if isinstance(error, aiohttp.InvalidURL):
        return AttemptFailed(ErrorKind.WRONG, "cannot be reached", str(error))
    if isinstance(error, ValueError):
        return AttemptFailed(ErrorKind.WRONG, "does not answer as Triton does", HTTP_PORT)
    cause = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    kind = ErrorKind.UNREACHABLE if isinstance(error, aiohttp.ClientConnectorError) else ErrorKind.LOST
    return AttemptFailed(kind, "cannot be reached", cause, hint=hint)
