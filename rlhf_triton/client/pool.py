"""Least-loaded balancing over healthy servers; waits while none is healthy.

A lost server, or one that joins, receives no requests until it reports all models requested so far as ready. A server
that disappears from DNS gets no further requests.
"""

import asyncio
import contextlib
import functools
import logging
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from rlhf_triton.backoff import backoff_s
from rlhf_triton.client import retry
from rlhf_triton.client.errors import AttemptFailed, ErrorKind, RequestFailed, ServersDiffer
from rlhf_triton.client.outage import Outage
from rlhf_triton.client.retry import HINT, Attempts, RequestCounters
from rlhf_triton.client.servers import C, Server, ServerNames, Suspension
from rlhf_triton.client.training_queue import QueuedRequest, TrainingQueue
from rlhf_triton.config.client import ClientSettings
from rlhf_triton.errors import RlhfError

logger = logging.getLogger(__name__)
T = TypeVar("T")
RESOLVE_EVERY_S = 10.0


class ServerPool(Generic[C]):
    """All servers that requests may be sent to."""

    def __init__(
        self,
        addresses: Sequence[str],
        connect: Callable[[str], C],
        settings: ClientSettings,
        counters: RequestCounters,
        *,
        hint: str = HINT,
        waits_for_same: bool = True,
    ) -> None:
        """
        Args:
            hint: ends the message if no server is healthy for `max_outage_s`.
            waits_for_same: if all servers are ErrorKind.DIFFERENT, requests wait for another one instead of failing.
        """
        self.servers: list[Server[C]] = []
        self.training_queue = TrainingQueue()
        self._gone: list[Server[C]] = []  # no longer in DNS, but may have requests in flight
        self._resolving = asyncio.Lock()
        self._names = ServerNames(addresses)
        self._connect = connect
        self._settings = settings
        self._counters = counters
        self._hint = hint
        self._models: set[str] = set()  # requested so far; a server is ready if all of these are
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._outage: Outage | None = None
        self._reminder: asyncio.Task[None] | None = None
        self._num_selections = 0  # so far
        self._waits_for_same = waits_for_same
        self._writer: Server[C] | None = None

    @contextlib.asynccontextmanager
    async def select(
        self,
        model: str,
        *,
        writes: bool,
        patient: bool,
        avoid: Collection[str] = (),
        session: int | str | None = None,
    ) -> AsyncIterator[Server[C]]:
        """Select a server for one attempt, which counts as in flight until the end of the block.

        Args:
            model: the requested model.
            writes: the request changes state, so select the same server as last time while it is healthy.
            patient: if no server is healthy, wait for one; otherwise return an unhealthy one.
            avoid: URLs of servers to select only if there are no others.
            session: requests of the same session go to the same server, as long as the same servers are healthy.

        Raises:
            RequestFailed: no server was healthy for `max_outage_s`, or an address cannot be resolved.
        """
        self._models.add(model)
        choose = self._writing if writes else functools.partial(self._least_busy, avoid=avoid, session=session)
        server = await self._wait_for_server(model, choose, patient=patient and self._settings.max_outage_s > 0)
        suspended = server.suspended.get(model)
        server.in_flight += 1
        if suspended:
            suspended.on_trial = True
        try:
            yield server
        finally:
            server.in_flight -= 1
            if suspended:
                suspended.on_trial = False
                self._wake_waiters()

    def record_success(self, server: Server[C], model: str) -> None:
        """Record that the server has replied to a request for this model."""
        server.losses = 0 if server.down is None else server.losses
        if server.suspended.pop(model, None):
            self._wake_waiters()

    async def record_failure(self, server: Server[C], model: str, failure: AttemptFailed) -> bool:
        """Take the server out of service if it is lost, or only the model if its process died; return whether it did.

        A server that may only be overloaded is probed first.
        """
        if failure.kind.is_final:
            self.record_success(server, model)
            return False
        if failure.kind is ErrorKind.DEAD:
            self._suspend(server, model, failure)
            return True
        if server in self._gone:
            return True
        if server.down is None and (failure.kind.is_refusal or await self._why_not_ready(server)):
            self._set_aside(server, failure)
        return server.down is not None

    async def request(
        self,
        attempts: Attempts,
        send: Callable[[C], Awaitable[T]],
        *,
        queued: QueuedRequest | None = None,
        patient: bool = True,
    ) -> T:
        """Return the result of `send`, called with the connection to a server, after as many attempts as necessary.

        `queued`: a training request's place in `training_queue`. `patient`: see `select`. Raises RequestFailed.
        """
        self._counters.requests += 1
        attempts.budget.earn()
        try:
            while True:
                if queued:
                    await self.training_queue.wait_for(queued, lambda: self._writing(attempts.model))
                selection = self.select(
                    attempts.model,
                    writes=queued is not None,
                    patient=patient,
                    avoid=attempts.outdated,
                    session=attempts.session,
                )
                async with selection as server:
                    try:
                        with self.training_queue.in_flight(queued, server):
                            reply = await send(server.connection)
                        self.record_success(server, attempts.model)
                        return reply
                    except AttemptFailed as failure:
                        if queued and failure.is_out_of_order and not self.training_queue.is_first(queued):
                            self.record_success(server, attempts.model)
                            self._counters.retries += 1  # the previous step was lost: wait for its reply
                            pause_s = 0.0
                        else:
                            pause_s = await self.pause_after(server, attempts, failure, patient=patient)
                await asyncio.sleep(pause_s)
        except RequestFailed:
            self._counters.failed_requests += 1
            self._counters.over_budget += attempts.is_over_budget
            raise

    def can_accept(self, model: str, *, excluded: Server[C] | None = None) -> bool:
        """Return whether any server other than `excluded` accepts requests for this model."""
        return any(server.accepts(model) for server in self.servers if server is not excluded)

    async def pause_after(
        self, server: Server[C], attempts: Attempts, failure: AttemptFailed, *, patient: bool
    ) -> float:
        """Record a failed attempt; return the pause in seconds before the next one.

        The pause is 0 if the next attempt goes to another server or, if `patient`, waits for one. Raises RequestFailed
        if there is no next attempt.
        """
        if failure.kind is ErrorKind.OTHER_VERSION and attempts.demanded is not None:
            return self._pause_for_version(server, attempts, failure)
        is_lost = await self.record_failure(server, attempts.model, failure)
        goes_elsewhere = is_lost and self.can_accept(attempts.model, excluded=server)
        pause_s = 0.0
        if goes_elsewhere or (is_lost and patient and self._settings.max_outage_s > 0):
            attempts.record_failover(failure, server.url)
            self._counters.failovers += goes_elsewhere
        else:
            pause_s = attempts.pause_s(failure, server.url)
        self._counters.retries += 1
        return pause_s

    def _pause_for_version(self, server: Server[C], attempts: Attempts, failure: AttemptFailed) -> float:
        """Return the pause before the next attempt: 0 unless no server has the demanded versions."""
        self.record_success(server, attempts.model)
        pause_s = attempts.pause_for_version_s(failure, server.url)
        others = [
            other for other in self.servers if other.accepts(attempts.model) and other.url not in attempts.outdated
        ]
        if not others:
            attempts.outdated.clear()
        self._counters.failovers += bool(others)
        self._counters.retries += 1
        return 0.0 if others else pause_s

    @property
    def outage(self) -> str:
        """Why requests wait for a healthy server; empty if they do not."""
        return self._causes() if self._outage else ""

    async def why_not_ready(self, model: str) -> str | None:
        """Probe all servers; return why none of them is ready to answer this model, or None if one is."""
        if not self.servers:
            await self._resolve_addresses()
        causes = await asyncio.gather(*(self._why_not_answering(server, model) for server in self.servers))
        return None if None in causes else "; ".join(cause for cause in causes if cause)

    async def close(self) -> None:
        """Cancel the probes and close all connections."""
        everyone = [*self.servers, *self._gone]
        tasks = [*self._tasks, *(server.probe for server in everyone if server.probe)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in everyone:
            await server.connection.close()

    # Selection:

    async def _wait_for_server(
        self, model: str, choose: Callable[[str], Server[C] | None], *, patient: bool
    ) -> Server[C]:
        if not self.servers:
            await self._resolve_addresses()
        while (server := choose(model)) is None:
            if not patient:
                return min(self.servers, key=lambda server: server.losses)
            await self._wait(model)
        return server

    def _least_busy(self, model: str, *, avoid: Collection[str], session: int | str | None) -> Server[C] | None:
        """Return the available server with the fewest requests in flight, or the session's server; None without one.

        Servers in `avoid` are selected only if there are no others. Ties go to the server that was selected for this
        model the longest ago. The order is kept per model, because rows go to reward and critic alternately: with a
        common order, one of two servers would get all requests for the critic.
        """
        server = min(
            (server for server in self.servers if server.accepts(model)),
            key=lambda server: (
                server.url in avoid,
                0 if session is None else zlib.crc32(f"{session} {server.url}".encode()),
                server.in_flight,
                server.last_selected.get(model, 0),
            ),
            default=None,
        )
        if server:
            self._num_selections += 1
            server.last_selected[model] = self._num_selections
        return server

    def _writing(self, model: str) -> Server[C] | None:
        """Return the server for training requests; None if there is none.

        It stays the same while it is healthy, because requests to different servers might overtake each other.
        """
        if self._writer not in self.servers or not self._writer.accepts(model):
            self._writer = next((server for server in self.servers if server.accepts(model)), None)
        return self._writer

    # Servers that join and leave:

    async def _resolve_addresses(self) -> None:
        """Resolve the addresses. The first servers get requests at once, later ones once they are ready."""
        async with self._resolving:
            urls = await self._names.urls()
            before = self.servers
            current_urls = {server.url for server in before}
            joined = [Server(url=url, connection=self._connect(url)) for url in urls if url not in current_urls]
            removed = [server for server in before if server.url not in urls]
            self.servers = [*(server for server in before if server not in removed), *joined]
            self._gone += removed
            for server in joined if before else []:
                server.down = "has just joined"
                self._spawn(self._probe_until_ready(server))
            for server in removed:
                logger.info("%s has left: it gets no further requests", server.url)
            if not before and self._names.may_change:
                self._spawn(self._follow_names())
            if joined or removed:
                self._wake_waiters()

    async def _follow_names(self) -> None:
        """Resolve the addresses every `RESOLVE_EVERY_S` seconds, until cancelled."""
        while True:
            await asyncio.sleep(RESOLVE_EVERY_S)
            await self._resolve_addresses()

    # Servers that are lost and recover:

    def _set_aside(self, server: Server[C], failure: AttemptFailed) -> None:
        if server.down is not None or server in self._gone:
            return
        server.down = failure.why or failure.event
        server.losses += 1
        self._fail_waiting(server, failure)
        if len(self.servers) > 1:
            level = logging.INFO if failure.kind is ErrorKind.UNLOADED else logging.WARNING  # draining is not a fault
            logger.log(level, "%s gets no requests until it is ready again: %s", server.url, server.down)
        self._spawn(self._probe_until_ready(server))

    async def _probe_until_ready(self, server: Server[C]) -> None:
        """Probe a lost or joining server until all requested models are ready, then put it into service."""
        while server in self.servers:
            await asyncio.sleep(backoff_s(retry.BACKOFF_S, server.losses - 1))
            try:
                server.down = await self._why_not_ready(server)
            except RlhfError as error:  # task edge: requests that wait for a server raise this error
                server.down = str(error)
                server.unusable = error
                logger.warning("%s gets no requests: %s", server.url, error)
                break
            if server.down is None:
                server.unusable = None
                server.suspended.clear()
                if len(self.servers) > 1:
                    logger.info("%s is ready%s", server.url, " again" if server.losses else " and joins")
                break
            server.losses += 1
        self._wake_waiters()

    async def _why_not_ready(self, server: Server[C]) -> str | None:
        """Probe the server; return why it is not ready, or None if it is. Concurrent callers share one probe."""
        if server.probe is None or server.probe.done():
            server.probe = asyncio.create_task(self._probe(server))
        return await asyncio.shield(server.probe)

    async def _probe(self, server: Server[C]) -> str | None:
        try:
            causes = [await server.connection.get_ready(model) for model in sorted(self._models)]
        except AttemptFailed as failure:
            self._fail_waiting(server, failure)
            return failure.why or failure.event
        return "; ".join(cause for cause in causes if cause) or None

    def _fail_waiting(self, server: Server[C], failure: AttemptFailed) -> None:
        """If the server is ErrorKind.DIFFERENT, mark it as unusable; waiting requests fail once all servers are."""
        if failure.kind is ErrorKind.DIFFERENT and not self._waits_for_same:
            server.unusable = ServersDiffer(f"{server.url} {failure.event}: {failure.why}")
            self._wake_waiters()

    async def _why_not_answering(self, server: Server[C], model: str) -> str | None:
        """Return why this server is not ready to answer the model, with the server's address; None if it is ready."""
        try:
            suspended = server.suspended.get(model)  # Triton reports the model of a dead process as ready
            is_away = suspended is not None and not server.accepts(model)
            cause = suspended.cause if suspended and is_away else await server.connection.get_ready(model)
        except AttemptFailed as failure:
            cause = failure.why or failure.event
        return f"{server.url}: {cause}" if cause else None

    def _suspend(self, server: Server[C], model: str, failure: AttemptFailed) -> None:
        suspension = server.suspended.get(model)
        if suspension and not suspension.on_trial:  # another request that was in flight has already recorded it
            return
        losses = suspension.losses + 1 if suspension else 1
        pause_s = backoff_s(retry.BACKOFF_S, losses - 1)
        server.suspended[model] = Suspension(losses, time.monotonic() + pause_s, failure.why)
        asyncio.get_running_loop().call_later(pause_s, self._wake_waiters)

    async def _wait(self, model: str) -> None:
        """Wait until the state of any server changes. Raises RequestFailed after `max_outage_s`."""
        longest = self._settings.max_outage_s
        if self._outage is None:
            self._outage = Outage(self._causes)
            self._counters.outages += 1
            self._reminder = self._spawn(self._outage.remind())
        if self._outage.begin_wait(model):
            asyncio.get_running_loop().call_later(longest, self._wake_waiters)  # waiters then check the time
        unusable = [server.unusable for server in self.servers if server.unusable]
        if unusable and len(unusable) == len(self.servers):  # otherwise wait for the other servers
            raise unusable[0]
        waited_s = self._outage.waited_s(model)
        is_tried = any(model in server.suspended and server.suspended[model].on_trial for server in self.servers)
        if waited_s >= longest and not is_tried:  # a model that is tried may have been healthy for long
            raise RequestFailed(
                f"{model}: no healthy server for {waited_s:.0f} s (max_outage_s): {self._causes()}{self._hint}"
            )
        await self._changed.wait()

    def _causes(self) -> str:
        lines = []
        for server in self.servers:
            causes = [server.down] if server.down else [f"{m}: {s.cause}" for m, s in server.suspended.items()]
            lines += [f"{server.url}: {cause}" for cause in causes]
        return "; ".join(lines)

    def _wake_waiters(self) -> None:
        """Wake all waiters; end the outage if every model with waiting requests is served again."""
        self._changed.set()
        self._changed = asyncio.Event()
        if self._outage and self._reminder and not self._outage.forget(self._is_served):
            self._reminder.cancel()
            self._outage.end()
            self._counters.outage_seconds += self._outage.seconds
            self._outage = None

    def _is_served(self, model: str) -> bool:
        return any(server.down is None and model not in server.suspended for server in self.servers)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
