"""Checks the health of a running tritonserver: reloads models that died or hang, reports if the server itself hangs.

Triton does neither: it continues to report ready, and answers every request to a dead model with an error. A model
that works on a long request does not count as hung: its forward-pass counter increases, or its process uses the CPU.
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
from trainer.control_plane import ControlPlane, ControlPlaneError, LoadRefused, ModelLostRank, ModelProcessDied

PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 5.0
SERVER_SILENT_S = 20.0  # no answer over HTTP, or none over gRPC: the server hangs
STOPPED_S = 10.0  # no answer, and its process is stopped (SIGSTOP): the model hangs
SILENT_S = 60.0  # no answer, no forward pass, and its process hardly uses the CPU: the model hangs
COMPUTING_SILENT_S = 600.0  # no answer and no forward pass, but its process computes, perhaps on one very long row
COMPUTING_CPU_SHARE = 0.2  # of one core, since the model stopped answering; above it, the process counts as computing
LONGEST_PAUSE_S = 60.0  # between attempts to reload a model
WAITING = "nv_inference_pending_request_count"
FORWARDS = "rlhf_forwards_total"
PROGRESS = (FORWARDS, "nv_inference_exec_count", "nv_inference_request_success")
_METRIC = re.compile(r'^(\w+)\{[^}]*model="([^"]+)"[^}]*\} (\S+)', re.MULTILINE)


@dataclass
class _Watched:
    """State of the checks of one model."""

    successes: int = -1
    forwards: float | None = None
    progress: tuple[float, ...] = ()
    silent_since: float | None = None
    cpu_s: float = 0.0
    """CPU time of the model's processes when it stopped answering."""
    replacements: int = 0
    """Consecutive reloads without an answer in between."""
    again_at: float = 0.0
    """Time (monotonic) before which the model is not reloaded again."""


class ServerHealth:
    """Checks the server in a background thread until `stop`; `trouble` says why the server must be restarted."""

    def __init__(self, server: TritonServer, log: Callable[[str], None]) -> None:
        self.trouble: str | None = None
        """Why the server must be restarted, else None; the checks end once it is set."""
        self._server = server
        self._log = log
        self._stopping = threading.Event()
        self._models = {model: _Watched() for model in server.models()}
        self._heard = dict.fromkeys(("HTTP", "gRPC"), time.monotonic())
        self._thread = threading.Thread(target=self._watch, name="server-health", daemon=True)

    def start(self) -> None:
        """Start the checks."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the checks."""
        self._stopping.set()
        if self._thread.is_alive():  # a signal may have arrived before the thread was started
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
        """Return whether the server answers over both protocols; set `trouble` after a long silence.

        The probes are requests that never wait in a queue.
        """
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
        except ModelLostRank as loss:  # its process holds memory that the next one may need, so it has to end first
            self._replace(control, model, watched, str(loss), unload=True)
            return
        except ModelProcessDied:  # Triton reports a stopped process as dead, too
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
        """Return whether the model has answered since the last check, or answers a probe now. Raises ControlPlaneError.

        Models that train, save or mix rewards are not probed: a valid request would have side effects, and an invalid
        one would count as failed. For them, return whether their process runs and no request waits without progress.
        """
        if model in SCORING_OUTPUTS:
            successes, forwards = control.statistics(model).success_count, self._metrics(model).get(FORWARDS)
            # To Triton, an error that the model itself sends is a success.
            if successes == watched.successes or forwards == watched.forwards:
                probe(control, model, PROBE_TIMEOUT_S)
                successes += 1
            watched.successes, watched.forwards = successes, forwards
            return True
        if not processes:
            raise ModelProcessDied(f"{model}: its process is gone")
        return not _is_stopped(processes) and self._progresses(model, watched)

    def _progresses(self, model: str, watched: _Watched) -> bool:
        """Return whether the model has made progress since the last check, or has nothing to do."""
        found = self._metrics(model)
        progress = tuple(found.get(name, 0.0) for name in PROGRESS)
        moved, watched.progress = progress != watched.progress, progress
        return moved or (model not in SCORING_OUTPUTS and not found.get(WAITING))

    def _metrics(self, model: str) -> dict[str, float]:
        page = _METRIC.findall(get_page(self._server.section.metrics_url, "/metrics"))
        return {name: float(value) for name, labelled, value in page if labelled == model}

    def _replace(
        self, control: ControlPlane, model: str, watched: _Watched, reason: str, *, unload: bool = False
    ) -> None:
        """Reload the model; if the load gets no answer or does not help, set `trouble`, which restarts the server."""
        begin = time.monotonic()
        if begin < watched.again_at:
            return
        self._log(f"{reason}: reloading the model")
        watched.replacements += 1
        pause_s = min(LONGEST_PAUSE_S, 2.0 ** (watched.replacements - 1))
        try:
            timeout_s = self._server.section.load_timeout_s
            control.load(model, parameters={"replaced": uuid.uuid4().hex[:8]}, unload=unload, timeout_s=timeout_s)
        except LoadRefused as error:  # the model itself cannot load, and could not in a restarted server
            self._log(f"error: {error}\ntrying again in {pause_s:g} s")
        except ControlPlaneError as error:
            self.trouble = f"{model} cannot be reloaded: {error}"
        else:
            self._log(f"{model} serves again after {time.monotonic() - begin:.1f} s")
            if watched.replacements > 1:
                self.trouble = f"{reason}, although it has just been reloaded"
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


def is_triton(url: str) -> bool:
    """Return whether a tritonserver answers at `host:port`, and not some other program."""
    return '"name":"triton"' in get_page(url, "/v2").replace(" ", "")


def get_page(url: str, path: str) -> str:
    """Return the response body of a GET request, or the reason phrase if it is empty; "" if there is no response."""
    host, _, port = url.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read().decode(errors="replace") or answer.reason
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()
