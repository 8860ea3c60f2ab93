"""Watches one running tritonserver: replaces models that have died or hang, and tells when the server itself hangs.

Triton does neither: it goes on calling itself ready, and answers every request to a dead model with an error. A model
that works on long requests is not hung: its forwards are counted, or its process computes.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from tools.server.model_loading import SCORING_OUTPUTS, probe
from tools.server.tritonserver import TritonServer
from trainer.control_plane import ControlPlane, ControlPlaneError, LoadRefused, ModelProcessDied

PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 5.0
SERVER_SILENT_S = 20.0  # no answer over HTTP, or none over gRPC: the server hangs
STOPPED_S = 10.0  # no answer, and its process is stopped (SIGSTOP): the model hangs
SILENT_S = 60.0  # no answer, no forward, and its process does next to nothing
COMPUTING_SILENT_S = 600.0  # no answer and no forward, but its process computes: perhaps one very long row
COMPUTING_CPU_SHARE = 0.2
LONGEST_PAUSE_S = 60.0
WAITING = "nv_inference_pending_request_count"
PROGRESS = ("rlhf_forwards_total", "nv_inference_exec_count", "nv_inference_request_success")
_METRIC = re.compile(r'^(\w+)\{[^}]*model="([^"]+)"[^}]*\} (\S+)', re.MULTILINE)


@dataclass
class _Watched:
    """What is known of one model."""

    successes: int = -1
    progress: tuple[float, ...] = ()
    silent_since: float | None = None
    cpu_s: float = 0.0
    """CPU time of its processes when it fell silent."""
    replacements: int = 0
    """In a row, without an answer between them."""
    again_at: float = 0.0


class ServerHealth:
    """Watches in a thread of its own until `stop`; `trouble` says why the server must be started again."""

    def __init__(self, server: TritonServer, log: Callable[[str], None]) -> None:
        self.trouble: str | None = None
        """Set when only a new server helps; nothing is watched any more then."""
        self._server = server
        self._log = log
        self._stopping = threading.Event()
        self._models = {model: _Watched() for model in server.models()}
        self._heard = dict.fromkeys(("HTTP", "gRPC"), time.monotonic())
        self._thread = threading.Thread(target=self._watch, name="server-health", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopping.set()
        if self._thread.is_alive():  # a signal may have come before it was started
            self._thread.join()

    def _watch(self) -> None:
        with self._server.control() as control:
            while not self._stopping.wait(PROBE_EVERY_S) and self.trouble is None:
                if not self._server_answers(control):
                    continue
                processes = self._server.processes()
                for model, watched in self._models.items():
                    if self._stopping.is_set() or self.trouble is not None or self._server.poll() is not None:
                        break
                    self._look_at(control, model, watched, processes.get(model, []))

    def _server_answers(self, control: ControlPlane) -> bool:
        """Ask over both protocols what never waits behind other requests; sets `trouble` after a long silence."""
        answers = {
            "HTTP": bool(get_page(self._server.section.http_url, "/v2/health/live")),
            "gRPC": control.answers_inference(PROBE_TIMEOUT_S),
        }
        now = time.monotonic()
        for protocol, answered in answers.items():
            silent_s = 0.0 if answered else now - self._heard[protocol]
            self._heard[protocol] = now - silent_s
            if silent_s > SERVER_SILENT_S:
                self.trouble = f"tritonserver has not answered over {protocol} for {silent_s:.0f} s"
        return all(answers.values())

    def _look_at(
        self, control: ControlPlane, model: str, watched: _Watched, processes: Sequence[psutil.Process]
    ) -> None:
        try:
            answers = self._answers(control, model, watched, processes)
        except ModelProcessDied:  # so Triton says of a stopped process as well
            _kill([process for process in processes if _is_stopped([process])])
            self._replace(control, model, watched, f"the process of {model} has died")
            return
        except ControlPlaneError:  # busy, being reloaded, or hung
            answers = self._progresses(model, watched)
        if answers:
            watched.silent_since, watched.replacements = None, 0
            return
        now = time.monotonic()
        if watched.silent_since is None:
            watched.silent_since, watched.cpu_s = now, _cpu_s(processes)
        silent_s = now - watched.silent_since
        if silent_s > _longest_silence_s(processes, watched, silent_s):
            _kill(processes)
            self._replace(control, model, watched, f"{model} has not answered for {silent_s:.0f} s")
            watched.silent_since = None

    def _answers(
        self, control: ControlPlane, model: str, watched: _Watched, processes: Sequence[psutil.Process]
    ) -> bool:
        """Whether it has answered since the last look, or answers now. Raises ControlPlaneError.

        What trains, saves or adds up has no request without effect but wrong ones, which would count as failed: of
        these the process is looked for, and whether requests wait while none is executed.
        """
        if model in SCORING_OUTPUTS:
            successes = control.statistics(model).success_count
            if successes == watched.successes:
                probe(control, model, PROBE_TIMEOUT_S)
                successes += 1
            watched.successes = successes
            return True
        if not processes:
            raise ModelProcessDied(f"{model}: its process is gone")
        return not _is_stopped(processes) and self._progresses(model, watched)

    def _progresses(self, model: str, watched: _Watched) -> bool:
        """Whether it has done anything since the last look, or has nothing to do."""
        page = _METRIC.findall(get_page(self._server.section.metrics_url, "/metrics"))
        found = {name: float(value) for name, labelled, value in page if labelled == model}
        progress = tuple(found.get(name, 0.0) for name in PROGRESS)
        moved, watched.progress = progress != watched.progress, progress
        return moved or (model not in SCORING_OUTPUTS and not found.get(WAITING))

    def _replace(self, control: ControlPlane, model: str, watched: _Watched, reason: str) -> None:
        """Load the model anew; where the load gets no answer or does not help, only a new server does."""
        begin = time.monotonic()
        if begin < watched.again_at:
            return
        self._log(f"{reason}: loading the model anew")
        watched.replacements += 1
        pause_s = min(LONGEST_PAUSE_S, 2.0 ** (watched.replacements - 1))
        try:
            timeout_s = self._server.section.load_timeout_s
            control.load(model, parameters={"replaced": uuid.uuid4().hex[:8]}, timeout_s=timeout_s)
        except LoadRefused as error:  # the model's own reason, which a new server would meet too
            self._log(f"error: {error}\ntrying again in {pause_s:g} s")
        except ControlPlaneError as error:
            self.trouble = f"{model} cannot be replaced: {error}"
        else:
            self._log(f"{model} serves again after {time.monotonic() - begin:.1f} s")
            if watched.replacements > 1:
                self.trouble = f"{reason}, though it has just been replaced"
        watched.again_at = time.monotonic() + pause_s


def _longest_silence_s(processes: Sequence[psutil.Process], watched: _Watched, silent_s: float) -> float:
    if _is_stopped(processes):
        return STOPPED_S
    computes = _cpu_s(processes) - watched.cpu_s > COMPUTING_CPU_SHARE * silent_s
    return COMPUTING_SILENT_S if computes else SILENT_S


def _is_stopped(processes: Sequence[psutil.Process]) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(process.status() == psutil.STATUS_STOPPED for process in processes)
    return False


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        return sum(sum(process.cpu_times()[:2]) for process in processes)
    return 0.0


def get_page(url: str, path: str) -> str:
    """The page; empty if there is no answer."""
    host, _, port = url.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read().decode() or answer.reason
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()
