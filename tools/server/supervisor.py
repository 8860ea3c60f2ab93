"""Keeps one tritonserver running: restarts it when it dies or hangs. `ServerHealth` watches its models."""

import contextlib
import time
from collections.abc import Callable

from rlhf_triton.tools.server.child import restart_pause_s
from rlhf_triton.tools.server.health import ServerHealth
from rlhf_triton.tools.server.triton_home import ServerStartError
from rlhf_triton.tools.server.tritonserver import TritonServer

STEADY_S = 10.0  # if a server ran for less time, its start counts as failed, and restarts back off


class Supervisor:
    """Owns a server. Call `look` regularly, so that it restarts the server when needed, and `stop` at the end."""

    def __init__(
        self,
        start: Callable[[], TritonServer],
        *,
        log: Callable[[str], None],
        lock: contextlib.AbstractContextManager[None] | None = None,
    ) -> None:
        """Start the server.

        Args:
            start: starts a server and returns it once its models have answered; `look` calls it for each restart.
            log: receives a line for each event.
            lock: of the server's folder, held until `stop`; see `only_server`.

        Raises:
            RlhfError: another server holds `lock`.
            ServerStartError: the first start failed; failed restarts are retried with exponential back-off.
        """
        self._start = start
        self._log = log
        self._short_lives = 0
        self._start_at: float | None = None  # None while the server runs
        self.failed_starts = 0
        """Failed restarts so far."""
        with contextlib.ExitStack() as held:
            if lock is not None:
                held.enter_context(lock)
            self.server = start()
            self._held = held.pop_all()
        self._watch()

    def look(self) -> None:
        """Restart the server if it has died or hangs, and rotate its log."""
        if self._start_at is None:
            reason = self._reason_to_restart()
            if reason is None:
                self.server.bound_log()
                return
            self._take_down(reason)
        assert self._start_at is not None
        if time.monotonic() >= self._start_at:
            self._start_again()

    def drain(self, give_up: Callable[[], bool]) -> None:
        """Stop the health checks, and drain the server if it runs; see `TritonServer.drain`."""
        self._health.stop()  # they would load again what is unloaded
        if self._start_at is None:
            self.server.drain(give_up)

    def stop(self) -> None:
        """Stop the health checks and the server."""
        self._health.stop()
        self.server.stop()
        self._held.close()

    def _reason_to_restart(self) -> str | None:
        try:
            self.server.raise_if_dead()
        except ServerStartError as death:
            return str(death).splitlines()[0]
        return self._health.trouble

    def _take_down(self, reason: str) -> None:
        self._down_at = time.monotonic()
        self._short_lives = 0 if self._down_at - self._ready_at > STEADY_S else self._short_lives + 1
        self._start_at = self._down_at + restart_pause_s(self._short_lives)
        self._log(f"{reason}\nrestarting the server")
        self.server.kill()  # a hung server would only let SIGTERM time out
        self._health.stop()
        self.server.stop()

    def _start_again(self) -> None:
        try:
            self.server = self._start()
        except ServerStartError as error:
            self.failed_starts += 1
            self._short_lives += 1
            pause_s = restart_pause_s(self._short_lives)
            self._log(f"error: {error}\ntrying again in {pause_s:g} s")
            self._start_at = time.monotonic() + pause_s
            return
        self._start_at = None
        self._log(f"serving again after {time.monotonic() - self._down_at:.1f} s")
        self._watch()

    def _watch(self) -> None:
        self._ready_at = time.monotonic()
        self._health = ServerHealth(self.server, self._log)
        self._health.start()
