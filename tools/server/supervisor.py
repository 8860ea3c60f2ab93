"""Keeps a server running, tritonserver or vLLM: restarts it when it dies or hangs."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from rlhf_triton.errors import REPORTED, RlhfError, reason_of
from rlhf_triton.tools.server.child import restart_pause_s
from rlhf_triton.tools.server.health import ServerHealth
from rlhf_triton.tools.server.server_log import Log, set_aside_if_large
from rlhf_triton.tools.server.triton_home import ServerStartError

STEADY_S = 10.0  # if a server ran for less time, its start counts as failed, and restarts back off


class SupervisedServer(Protocol):
    """A running server."""

    log_path: Path
    """Its log, which it opened in append mode."""

    def raise_if_dead(self) -> None:
        """Raise ServerStartError if it has ended."""

    def kill(self) -> None:
        """Kill it at once."""

    def stop(self) -> None:
        """Stop it, and remove its leftovers."""


S = TypeVar("S", bound=SupervisedServer)


class Supervisor(Generic[S]):
    """Owns a server. Call `restart_if_down` regularly and `stop` at the end."""

    def __init__(
        self,
        start: Callable[[], S],
        *,
        log: Log,
        name: str = "the server",
        watch: Callable[[S, Log], ServerHealth] | None = None,
        lock: contextlib.AbstractContextManager[None] | None = None,
    ) -> None:
        """Start the server.

        Args:
            start: starts a server and returns it once it is ready; also for each restart.
            log: receives a line for each event.
            name: of the server, in these lines.
            watch: makes the health checks of a started server.
            lock: of the server's folder, held until `stop`; see `only_server`.

        Raises:
            RlhfError: another server holds `lock`.
            ServerStartError: the first start failed; failed restarts are retried with exponential back-off.
        """
        self._start = start
        self._log = log
        self._name = name
        self._make_watch = watch
        self._watch: ServerHealth | None = None
        self._short_lives = 0
        self._start_at: float | None = None  # None while the server runs
        self.failed_starts = 0
        """Failed restarts so far."""
        with contextlib.ExitStack() as held:
            if lock is not None:
                held.enter_context(lock)
            self.server = start()
            self._held = held.pop_all()
        self._begin_watch()

    def restart_if_down(self) -> None:
        """Restart the server if it has died or hangs, and rotate its log."""
        if self._start_at is None:
            reason = self._reason_to_restart()
            if reason is None:
                set_aside_if_large(self.server.log_path)
                return
            self._stop_server(reason)
        assert self._start_at is not None
        if time.monotonic() >= self._start_at:
            self._restart_server()

    def stop_watching(self) -> bool:
        """Stop the health checks, so that they do not reload what a drain unloads; return whether the server runs."""
        if self._watch is not None:
            self._watch.stop()
        return self._start_at is None

    def stop(self) -> None:
        """Stop the health checks and the server."""
        self.stop_watching()
        self.server.stop()
        self._held.close()

    def _reason_to_restart(self) -> str | None:
        try:
            self.server.raise_if_dead()
        except ServerStartError as death:
            return str(death).splitlines()[0]
        return None if self._watch is None else self._watch.restart_reason

    def _stop_server(self, reason: str) -> None:
        self._down_at = time.monotonic()
        self._short_lives = 0 if self._down_at - self._ready_at > STEADY_S else self._short_lives + 1
        self._start_at = self._down_at + restart_pause_s(self._short_lives)
        self._log(f"{reason}\nrestarting {self._name}")
        self.server.kill()  # a hung server would only let SIGTERM time out
        self.stop_watching()
        self.server.stop()

    def _restart_server(self) -> None:
        try:
            self.server = self._start()
        except REPORTED as error:  # also a model's folder that cannot be read for a while
            self.failed_starts += 1
            self._short_lives += 1
            pause_s = restart_pause_s(self._short_lives)
            reason = error if isinstance(error, RlhfError) else reason_of(error)
            self._log(f"error: {reason}\ntrying again in {pause_s:g} s")
            self._start_at = time.monotonic() + pause_s
            return
        self._start_at = None
        self._log(f"serving again after {time.monotonic() - self._down_at:.1f} s")
        self._begin_watch()

    def _begin_watch(self) -> None:
        self._ready_at = time.monotonic()
        if self._make_watch is not None:
            self._watch = self._make_watch(self.server, self._log)
            self._watch.start()
