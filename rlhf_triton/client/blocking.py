"""Blocking clients over asynchronous ones: the base class of each kind, and how one gets the methods of the other."""

import asyncio
import functools
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from pydantic import ValidationError

from rlhf_triton.client.client import TritonClient
from rlhf_triton.config.client import ClientSettings
from rlhf_triton.errors import RlhfError
from rlhf_triton.wire.contract import ContractError

P = ParamSpec("P")
T = TypeVar("T")


class AsyncClient(AbstractAsyncContextManager[Any]):
    """A client of servers of one kind, for one event loop of the process in which it was made."""

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        training_key: str | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        if not isinstance(settings, ClientSettings | None):
            raise ContractError(f"settings: {settings!r:.80}, must be a rlhf_triton.ClientSettings")
        try:
            servers = (url,) if isinstance(url, str) else tuple(url)
            settings = ClientSettings(**{**(settings or ClientSettings()).model_dump(), "servers": servers})
        except (TypeError, ValidationError) as error:
            raise ContractError(f"url: {url!r}, must be host:port, dns:name:port, or several of them") from error
        if not servers:
            raise ContractError(f"url: {url!r}, must have at least one address")
        self._client = TritonClient(servers[0], settings, training_key=training_key)
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel the calls in flight and close all connections. Accepted steps are still trained."""
        if not self._is_closed:
            self._is_closed = True
            await self._client.__aexit__()

    def check_usable(self) -> None:
        """Raise RlhfError if the client is closed, or was made in another process."""
        if self._pid != os.getpid():
            raise RlhfError("the client was made in another process; make one after the fork")
        if self._is_closed:
            raise RlhfError("the client is closed; make another one")

    def _check_loop(self) -> None:
        """Raise RlhfError if the client cannot be used here: see `check_usable`, or in another event loop."""
        self.check_usable()
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise RlhfError("the client is used in another event loop; make one client in each")
        self._loop = loop


C = TypeVar("C", bound=AsyncClient)


class BlockingClient(AbstractContextManager[Any], Generic[C]):
    """Blocks its callers, who may be several threads, until an asynchronous client has the reply.

    It has an event loop in a thread of its own, so it works where a loop runs already, as in a notebook; there it
    blocks that loop.
    """

    def __init__(self, client: C) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="triton-client", daemon=True)
        self._thread.start()
        self._closing = threading.Lock()
        # Closes a client that is garbage-collected, or still open when Python exits.
        self._close = weakref.finalize(self, _close, client, self._loop, self._thread)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; calls in flight in other threads raise RlhfError."""
        if self._thread.is_alive():  # not in a forked process, in which another thread may hold the lock forever
            with self._closing:
                self._close()

    def _submit(
        self, call: Callable[Concatenate[C, P], Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        self._client.check_usable()  # first: in a forked process, another thread may hold the lock forever
        with self._closing:
            self._client.check_usable()
            return asyncio.run_coroutine_threadsafe(call(self._client, *args, **kwargs), self._loop)

    def _wait(self, call: Callable[Concatenate[C, P], Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        if threading.current_thread() is self._thread:
            raise RlhfError("a future's callback cannot wait for the client; let another thread call it")
        future = self._submit(call, *args, **kwargs)
        try:
            return future.result()
        except CancelledError as error:
            raise RlhfError("the client was closed before the answer arrived") from error
        except BaseException:  # such as Ctrl-C: the request must not go on
            future.cancel()
            raise


def _close(client: AsyncClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if not thread.is_alive() or thread is threading.current_thread():  # forked; collected by its own call
        return
    asyncio.run_coroutine_threadsafe(client.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def blocking(
    call: Callable[Concatenate[C, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingClient[C], P], T]:
    """Return the method of a blocking client that waits for this one of the asynchronous client."""

    @functools.wraps(call)
    def wait(self: BlockingClient[C], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._wait(call, *args, **kwargs)

    return wait


def future(
    call: Callable[Concatenate[C, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingClient[C], P], Future[T]]:
    """Return the method of a blocking client that returns a future of what this one of the asynchronous returns."""

    @functools.wraps(call)
    def submit(self: BlockingClient[C], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._submit(call, *args, **kwargs)

    submit.__name__ = f"{call.__name__}_future"
    return submit
