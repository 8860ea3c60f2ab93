"""The client for code without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

from critic_client.asynchronous import AsyncCriticClient, CriticClientError, RowScores, RowValues
from critic_client.rows import Rows
from python_backend.client.client import TrainAnswer
from python_backend.config import ClientSection

P = ParamSpec("P")
T = TypeVar("T")


class CriticClient(AbstractContextManager["CriticClient"]):
    """`AsyncCriticClient`, where everything is explained, with calls that block. A context manager.

    Any thread may call it, several at the same time: call `train` in a thread to overlap it with other work. It has an
    event loop in a thread of its own, so make one client in each process, after the fork. Called inside a running event
    loop, which it would block, it raises CriticClientError.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        run_id: str,
        training_key: str | None = None,
        settings: ClientSection | None = None,
    ) -> None:
        """Connect to nothing yet; arguments and errors as in `AsyncCriticClient`."""
        self._client = AsyncCriticClient(url, run_id=run_id, training_key=training_key, settings=settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="critic-client", daemon=True)
        self._thread.start()
        self._closing = threading.Lock()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; calls in flight in other threads raise CriticClientError."""
        if not self._thread.is_alive():  # closed already, or in a forked process, which has only the thread that forked
            return
        with self._closing:
            if self._loop.is_closed():
                return
            asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def values(self, rows: Rows) -> RowValues:
        """See `AsyncCriticClient.values`."""
        return self._wait(self._client.values, rows)

    def score(
        self, rows: Rows, metadata: list[dict[str, Any]] | None = None, *, prompt_lengths: Sequence[int] | None = None
    ) -> RowScores:
        """See `AsyncCriticClient.score`."""
        return self._wait(self._client.score, rows, metadata, prompt_lengths=prompt_lengths)

    def train(self, step: int, tokens: Rows, returns: Rows, prev_values: Rows, mask: Rows) -> TrainAnswer:
        """See `AsyncCriticClient.train`."""
        return self._wait(self._client.train, step, tokens, returns, prev_values, mask)

    def save(self, step: int, *, keep_steps: Sequence[int] | None = None) -> int:
        """See `AsyncCriticClient.save`."""
        return self._wait(self._client.save, step, keep_steps=keep_steps)

    def rewind(self, step: int) -> int:
        """See `AsyncCriticClient.rewind`."""
        return self._wait(self._client.rewind, step)

    def _wait(self, call: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        self._client.check_usable()  # first: in a forked process, another thread may hold the lock forever
        if asyncio._get_running_loop() is not None:
            raise CriticClientError("this call would block the running event loop; use AsyncCriticClient there")
        with self._closing:
            self._client.check_usable()
            future = asyncio.run_coroutine_threadsafe(call(*args, **kwargs), self._loop)
        try:
            return future.result()
        except CancelledError as error:
            raise CriticClientError("the client was closed before the answer arrived") from error
        except BaseException:  # such as Ctrl-C: the request must not go on
            future.cancel()
            raise
