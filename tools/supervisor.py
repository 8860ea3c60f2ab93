"""Keeps one tritonserver serving: starts it again when it dies, and replaces a model whose process has died.
Given: how to start the server. Returns: `server`, the one that runs now.
Triton itself does neither: it goes on calling itself ready, and answers every request to such a model with an error.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable

from tools.model_loading import SCORING_OUTPUTS, probe
from tools.triton_home import ServerStartError
from tools.tritonserver import TritonServer
from trainer.control_plane import ControlPlane, ControlPlaneError, ModelProcessDied

PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 5.0
MAX_RESTARTS = 5
RESTARTS_WITHIN_S = 600.0


class Supervisor:
    """Owns the server; the owner of this object calls `look` now and then, and `stop` at the end."""

    def __init__(
        self, start: Callable[[], TritonServer], *, log: Callable[[str], None], max_restarts: int = MAX_RESTARTS
    ) -> None:
        """Start the server.

        Args:
            start: returns a server whose models have answered; called from the thread that calls `look`.
            log: gets what happened, a line each.
            max_restarts: how often within RESTARTS_WITHIN_S a dead server is started again.

        Raises:
            ServerStartError: as `start` does.
        """
        self._start = start
        self._log = log
        self._max_restarts = max_restarts
        self._restarts: list[float] = []
        self.server = start()
        self._watch()

    def look(self) -> None:
        """Start the server again if it has died, and keep its log within bounds; returns when it serves.

        Raises:
            ServerStartError: it does not start, or dies again and again.
        """
        self.server.bound_log()
        if self.server.poll() is None:
            return
        try:
            self.server.raise_if_dead()
        except ServerStartError as death:
            self._stop_watching()
            self.server.stop()
            now = time.monotonic()
            self._restarts = [then for then in self._restarts if now - then < RESTARTS_WITHIN_S] + [now]
            if len(self._restarts) > self._max_restarts:
                raise ServerStartError(
                    f"{death}\nIt was started again {self._max_restarts} times before that"
                ) from death
            self._log(f"{str(death).splitlines()[0]}\nstarting it again")
            self.server = self._start()
            self._log(f"serving again after {time.monotonic() - now:.1f} s")
            self._watch()

    def stop(self) -> None:
        """Stop the server and the watching."""
        self._stop_watching()
        self.server.stop()

    def _watch(self) -> None:
        self._stopping = threading.Event()
        self._watcher = threading.Thread(
            target=_watch_models, args=(self.server, self._stopping, self._log), name="model-probes", daemon=True
        )
        self._watcher.start()

    def _stop_watching(self) -> None:
        self._stopping.set()
        if self._watcher.is_alive():  # a signal may have come before it was started
            self._watcher.join()


def _watch_models(server: TritonServer, stopping: threading.Event, log: Callable[[str], None]) -> None:
    answered: dict[str, int] = {}
    with ControlPlane(server.section.grpc_url) as control:
        while not stopping.wait(PROBE_EVERY_S):
            for model in server.models():
                if stopping.is_set() or server.poll() is not None:
                    return
                try:
                    _look_at(control, server, model, answered)
                except ModelProcessDied:
                    _replace(control, model, server.section.load_timeout_s, log)
                except ControlPlaneError:  # busy, or being reloaded: only a dead process is ours to replace
                    continue


def _look_at(control: ControlPlane, server: TritonServer, model: str, answered: dict[str, int]) -> None:
    """Raise ModelProcessDied if its process has; a model that answers others needs no probe.

    What trains and saves has no request without effect but wrong ones, which would count as failed: of these models
    the process is looked for.
    """
    if model not in SCORING_OUTPUTS:
        if not server.runs_process_of(model):
            raise ModelProcessDied(f"{model}: its process is gone")
        return
    count = control.statistics(model).success_count
    if count == answered.get(model):
        probe(control, model, PROBE_TIMEOUT_S)
        count += 1
    answered[model] = count


def _replace(control: ControlPlane, model: str, timeout_s: float, log: Callable[[str], None]) -> None:
    log(f"the process of {model} has died: loading the model anew")
    start = time.monotonic()
    try:
        control.load(model, parameters={"replaced": uuid.uuid4().hex[:8]}, timeout_s=timeout_s)
    except ControlPlaneError as error:  # tried again at the next look
        log(f"error: {error}")
    else:
        log(f"{model} serves again after {time.monotonic() - start:.1f} s")
