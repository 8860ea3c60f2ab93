"""Checks the health of a running tritonserver: reloads models that died or hang, reports if the server itself hangs.

Triton does neither: it continues to report ready, and answers every request to a dead model with an error. A model
that works on a long request does not count as hung: its forward-pass counter increases, or its process uses the CPU.
On a GPU only the counter says so: a process that waits for a GPU that hangs uses the CPU, too. Responses do not prove
progress: a model with a broken device answers every request with an error.

A process that is not scheduled for a few seconds (a busy or paused machine) is kept, unless a request waited for it
meanwhile. After a second, server 2.51 fails that request and frees its memory without telling the process. When the
process runs again, it ends itself (python_backend/serving/pulse.py), or the server aborts.
"""

import contextlib
import http.client
import json
import math
import re
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rlhf_triton.client.control_plane import PROBED_OUTPUTS, ControlPlaneError, Failure
from rlhf_triton.tools.server.child import restart_pause_s
from rlhf_triton.tools.server.server_log import Log
from rlhf_triton.tools.server.tritonserver import TritonServer
from rlhf_triton.wire.contract import LOAD_LABEL

PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 5.0
IDLE_PROBE_S = 10.0  # between probes of a model that receives no requests
FAILED_PROBES = 3  # in succession that the model answered with an error of its own, without a forward pass meanwhile
MISSED_PROBES = 3  # in succession; fewer are no silence, however long the checks between them took
SERVER_SILENT_S = 20.0  # no answer over HTTP, or none over gRPC: the server hangs
STOPPED_S = 10.0  # no answer, and its process is stopped (SIGSTOP) or not scheduled: the model hangs
PULSE_S = 1.0  # a model's process has a thread that wakes up every 0.3 s, unless it is stopped, frozen or starved
PULSE_POLL_S = 0.02
SILENT_S = 60.0  # no answer, no forward pass, and its process hardly uses the CPU: the model hangs
COMPUTING_SILENT_S = 600.0  # no answer and no forward pass, but its process computes, perhaps on one very long row
# A process that has used more of a core than this since its model stopped answering counts as computing.
COMPUTING_CPU_SHARE = 0.2
STOP_S = 1.0  # longest wait for the thread of the checks to end
WAITING = "nv_inference_pending_request_count"
FORWARDS = "rlhf_forwards_total"
LOST = "rlhf_lost_processes_total"
GPU_BYTES = "rlhf_gpu_bytes"  # only models on a GPU have it
ANSWERED = "nv_inference_request_success"
# Triton counts an error that the model itself sends as a success; the model counts it then.
FAILED = "nv_inference_request_failure"
FAILURES = (FAILED, "rlhf_requests_refused_total")
PROGRESS = ("nv_inference_exec_count", ANSWERED)  # for models that count no forward passes
_SWITCHES = re.compile(r"ctxt_switches:\s*(\d+)")
_METRIC = re.compile(r"^(\w+)\{(.*)\} (\S+)", re.MULTILINE)


@dataclass
class _Silence:
    """Probes without an answer, since the last one with an answer."""

    missed: int = 0
    since: float = 0.0

    def record(self, *, answered: bool) -> None:
        """Count a probe."""
        self.missed = 0 if answered else self.missed + 1
        if self.missed <= 1:
            self.since = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the first missed probe; 0 unless at least MISSED_PROBES were missed in succession.

        The time from the last answer to the first missed probe does not count: for most of it, no probe was sent.
        """
        return time.monotonic() - self.since if self.missed >= MISSED_PROBES else 0.0


@dataclass(kw_only=True)
class _Watched:
    """Health-check state of one model."""

    metrics: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The model's metrics at the last check."""
    num_instances: int = 0
    """Processes that the model should have; 0: not known yet."""
    errors: int = 0
    """Probes in succession that were answered with an error."""
    progress: Sequence[float] = ()
    silence: _Silence = field(default_factory=_Silence)
    cpu_s: float = 0.0
    """CPU time of the model's processes when it stopped answering."""
    replacements: int = 0
    """Consecutive reloads without an answer in between."""
    probe_at: float = 0.0
    """Time (monotonic) before which the model is not probed while it receives no requests."""
    again_at: float = 0.0
    """Time (monotonic) before which the model is not reloaded again."""

    def has_progressed(self, metrics: defaultdict[str, float]) -> bool:
        """Return whether the model with these `metrics` has made progress since the last call."""
        before = self.progress
        self.progress = [metrics[name] for name in ((FORWARDS,) if FORWARDS in metrics else PROGRESS)]
        return self.progress != before


class ServerHealth:
    """Checks the server in a background thread until `stop`; `restart_reason` says why the server must be restarted."""

    def __init__(self, server: TritonServer, log: Log) -> None:
        self.restart_reason: str | None = None
        """Why the server must be restarted, else None; the checks end once it is set."""
        self._server = server
        self._log = log
        self._stopping = threading.Event()
        self._models = {model: _Watched() for model in server.models()}
        self._silences = {"HTTP": _Silence(), "gRPC": _Silence()}
        self._control = server.control()
        self._thread = threading.Thread(target=self._watch, name="server-health", daemon=True)

    def start(self) -> None:
        """Start the checks."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the checks, and a reload that is in flight."""
        self._stopping.set()
        self._control.close()  # all calls in flight fail: a reload may take minutes, and a server is stopped in less
        if self._thread.is_alive():  # a signal may have arrived before the thread was started
            self._thread.join(STOP_S)

    def _watch(self) -> None:
        try:
            while not self._stopping.wait(PROBE_EVERY_S) and self.restart_reason is None:
                self._check_server()
        except ValueError:  # gRPC's error for a call on the connection that `stop` has closed
            if not self._stopping.is_set():
                raise

    def _check_server(self) -> None:
        """Check the server and, if it answers, each model."""
        if not self._server_answers():
            return
        processes = self._server.processes()
        for model, watched in self._models.items():
            if self._stopping.is_set() or self.restart_reason is not None or self._server.poll() is not None:
                break
            self._check_model(model, watched, processes.get(model, []))

    def _server_answers(self) -> bool:
        """Return whether the server answers over both protocols; set `restart_reason` after a long silence.

        The probes are requests that never wait in a queue.
        """
        answers = {
            "HTTP": bool(get_page(self._server.section.http_url, "/v2/health/live")),
            "gRPC": self._control.answers_inference(PROBE_TIMEOUT_S),
        }
        for protocol, answered in answers.items():
            silence = self._silences[protocol]
            silence.record(answered=answered)
            if silence.seconds > SERVER_SILENT_S:
                self.restart_reason = f"tritonserver has not answered over {protocol} for {silence.seconds:.0f} s"
        return all(answers.values())

    def _check_model(self, model: str, watched: _Watched, processes: Sequence[psutil.Process]) -> None:
        try:
            answers = self._answers(model, watched, processes)
        except ControlPlaneError as error:
            if error.kind is Failure.UNUSABLE:  # its process holds memory that the next one may need: it ends first
                self._replace(model, watched, str(error), unload=True)
                return
            if error.kind is Failure.DIED:
                self._replace_dead(model, watched, processes)
                return
            # busy, being reloaded, failing, or hung
            answers = watched.has_progressed(self._metrics(model))
            watched.errors = 0 if answers or error.kind is not Failure.FAILED else watched.errors + 1
            if watched.errors >= FAILED_PROBES:
                self._replace(model, watched, f"{model} answers with errors only ({error})", unload=True)
                return
        watched.silence.record(answered=answers)
        if answers:
            watched.replacements = watched.errors = 0
        elif watched.silence.missed == 1:
            watched.cpu_s = _cpu_s(processes)
        silent_s = watched.silence.seconds
        if silent_s > _longest_silence_s(processes, watched, silent_s) and not self._stopping.is_set():
            _kill(processes)
            self._replace(model, watched, f"{model} has not answered for {silent_s:.0f} s")
            watched.silence = _Silence()

    def _replace_dead(self, model: str, watched: _Watched, processes: Sequence[psutil.Process]) -> None:
        lives = len(processes) >= watched.num_instances and any(map(is_alive, processes))
        why = "did not run for a second, and tritonserver has given it up" if lives else "has died"
        _kill(processes)  # if it runs again, a late answer ends the server, or it never answers again
        self._replace(model, watched, f"the process of {model} {why}")

    def _answers(self, model: str, watched: _Watched, processes: Sequence[psutil.Process]) -> bool:
        """Return whether the model has answered since the last check, has nothing to do, or answers a probe now.

        Models that train, save or mix rewards are not probed: a valid request would have side effects, and an invalid
        one would count as failed. For them, return whether their process runs and no request waits without progress.

        Raises:
            ControlPlaneError: it does not answer the probe; one of its processes has ended, or Triton has given it up
                because it was not scheduled (DIED), or has lost its device or a rank (UNUSABLE).
        """
        if not processes:
            raise ControlPlaneError(f"{model}: its process is gone", Failure.DIED)
        metrics = self._metrics(model)
        if model not in PROBED_OUTPUTS:
            return not _is_stopped(processes) and (watched.has_progressed(metrics) or not metrics[WAITING])
        watched.num_instances = watched.num_instances or self._control.num_instances(model)
        if len(processes) < watched.num_instances:
            problem = f"{len(processes)} of its {watched.num_instances} processes are left"
            raise ControlPlaneError(f"{model}: {problem}", Failure.DIED)
        before = watched.metrics
        watched.metrics = metrics
        if metrics[LOST] > before.get(LOST, math.inf):
            raise ControlPlaneError(f"a process of {model} has lost its device or a rank", Failure.UNUSABLE)
        has_answered = metrics[ANSWERED] != before[ANSWERED]
        has_failed = metrics[FAILED] > before[FAILED]
        is_idle = not (has_answered or has_failed or watched.silence.missed)
        has_scored = has_answered and metrics[FORWARDS] != before[FORWARDS]
        if not has_scored and not (is_idle and time.monotonic() < watched.probe_at):
            is_new = not has_failed and watched.silence.seconds <= STOPPED_S
            if is_new and not _runs(processes):  # a probe would be a request that Triton gives up, and the process too
                return False
            self._control.probe(model, PROBE_TIMEOUT_S)
            metrics[ANSWERED] += 1
            watched.probe_at = time.monotonic() + IDLE_PROBE_S
        return True

    def _metrics(self, model: str) -> defaultdict[str, float]:
        values = defaultdict[str, float](float)
        for name, labels, value in read_metrics(self._server.section.metrics_url):
            if f'model="{model}"' in labels:
                values[name] += value
        return values

    def _replace(self, model: str, watched: _Watched, reason: str, *, unload: bool = False) -> None:
        """Reload the model; set `restart_reason` if the load gets no answer or does not help."""
        begin = time.monotonic()
        if begin < watched.again_at:
            return
        self._log(f"{reason}: reloading the model")
        watched.replacements += 1
        watched.errors = watched.num_instances = 0
        watched.metrics.pop(LOST, None)  # another process may be lost before the reload ends
        pause_s = restart_pause_s(watched.replacements + 1)
        try:
            timeout_s = self._server.section.start_timeout_s
            label = f"replaced-{uuid.uuid4().hex[:8]}"
            self._control.load(model, parameters={LOAD_LABEL: label}, unload=unload, timeout_s=timeout_s)
        except ControlPlaneError as error:
            if error.kind is Failure.REFUSED:  # the model itself cannot load, and could not in a restarted server
                self._log(f"error: {error}\ntrying again in {pause_s:g} s")
            else:
                self.restart_reason = f"{model} cannot be reloaded: {error}"
        else:
            self._log(f"{model} serves again after {time.monotonic() - begin:.1f} s")
            if watched.replacements > 1:
                self.restart_reason = f"{reason}, although it has just been reloaded"
        watched.again_at = time.monotonic() + pause_s


def _longest_silence_s(processes: Sequence[psutil.Process], watched: _Watched, silent_s: float) -> float:
    if _is_stopped(processes):
        return STOPPED_S
    computes = GPU_BYTES not in watched.metrics and _cpu_s(processes) - watched.cpu_s > COMPUTING_CPU_SHARE * silent_s
    return COMPUTING_SILENT_S if computes else SILENT_S


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process has not ended, whatever it does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_stopped(processes: Sequence[psutil.Process]) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(process.status() == psutil.STATUS_STOPPED for process in processes)
    return False


def _runs(processes: Sequence[psutil.Process]) -> bool:
    """Return whether the processes are being scheduled; True if the kernel does not count context switches."""
    before = _switches(processes)
    deadline = time.monotonic() + PULSE_S
    while before and _switches(processes) == before:
        if time.monotonic() > deadline:
            return False
        time.sleep(PULSE_POLL_S)
    return not _is_stopped(processes)


def _switches(processes: Sequence[psutil.Process]) -> list[str]:
    """Return the numbers of context switches of all threads of the processes."""
    with contextlib.suppress(OSError):  # a thread has ended
        tasks = [task for process in processes for task in Path(f"/proc/{process.pid}/task").glob("*/status")]
        return [count for task in tasks for count in _SWITCHES.findall(task.read_text())]
    return []


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
    try:
        described = json.loads(get_page(url, "/v2"))
    except ValueError:
        return False
    return isinstance(described, dict) and described.get("name") == "triton"


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


def read_metrics(url: str) -> Iterator[tuple[str, str, float]]:
    """Yield name, labels as text, and value of each metric that a server exports at `host:port`; none if it is down."""
    for name, labels, value in _METRIC.findall(get_page(url, "/metrics")):
        yield name, labels, float(value)


def count_failures(url: str, models: Collection[str]) -> int:
    """Return how many requests failed by the metrics at `host:port`: in Triton, or with an error of a model.

    A 503 is not a failure: the client repeats the request, and counts it if all attempts fail.

    Args:
        models: the models but ensembles: for an ensemble, Triton counts two failures more, also for a 503.
    """
    ours = {f'model="{model}"' for model in models}
    return int(
        sum(
            value
            for name, labels, value in read_metrics(url)
            if name in FAILURES and '"503"' not in labels and ours & {*labels.split(",")}
        )
    )
