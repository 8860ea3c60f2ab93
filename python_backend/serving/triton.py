"""Interface to Triton's Python backend: requests and replies, the server's log and metrics.

The only module that imports triton_python_backend_utils. Imports no torch.
"""

import contextlib
import ctypes
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import triton_python_backend_utils as pb_utils

from rlhf_triton.errors import RlhfError
from rlhf_triton.python_backend.serving.parameters import Parameters
from rlhf_triton.python_backend.serving.pulse import Pulse
from rlhf_triton.wire.contract import (
    AFTER_CRITIC,
    EXACT_VERSION,
    MIN_VERSION,
    OPTIONAL_OUTPUTS,
    PROBE_HEADER,
    UNNAMED,
    Arrays,
    ContractError,
    VersionRange,
)
from rlhf_triton.wire.texts import printable

MAX_NAMES = 50  # maximum number of counters of a reward function


def parameters_of(args: Mapping[str, str]) -> Parameters:
    """Return the model's parameters, from the arguments of Triton's `initialize`."""
    config = json.loads(args["model_config"])
    return Parameters(config["name"], {key: item["string_value"] for key, item in config.get("parameters", {}).items()})


def _hide_requests() -> None:
    """Make the shared memory through which this process receives requests unreadable for other users.

    Triton creates it with mode 0644, regardless of the umask.
    """
    # Bytes, because this process decodes as ASCII and may have loaded libraries from a folder with another name.
    for region in set(re.findall(rb"/dev/shm/\S+", Path("/proc/self/maps").read_bytes())):
        with contextlib.suppress(OSError):  # a library has removed its file already
            Path(os.fsdecode(region)).chmod(0o600)


class Unavailable(RlhfError):
    """The request cannot be served now; the caller may retry. Becomes UNAVAILABLE (503)."""


def http_status(error: Exception) -> int:
    """Return the HTTP status of the response to a request that failed with `error`."""
    if isinstance(error, Unavailable):
        return 503
    return 400 if isinstance(error, ContractError) else 500


class Call:
    """One request and its response sender."""

    def __init__(
        self,
        request: Any,
        count_failure: Callable[[int], None] = lambda status: None,
        before_send: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            count_failure: called with the HTTP status of an error response, except to a probe.
            before_send: called right before a response is sent.
        """
        self._request = request
        self._count_failure = count_failure
        self._before_send = before_send
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self.answered = False
        wanted = frozenset(request.requested_output_names())
        self.wanted: frozenset[str] = wanted - OPTIONAL_OUTPUTS if UNNAMED in wanted else wanted
        """Names of the requested outputs; all outputs except optional ones if the caller named none."""

    def array(self, name: str) -> np.ndarray | None:
        """Return an input tensor, or None if the request does not have it."""
        tensor = pb_utils.get_input_tensor_by_name(self._request, name)
        return None if tensor is None else tensor.as_numpy()

    def header(self, name: str) -> str | None:
        """Return the value of a forwarded HTTP header, or None if it was not sent. `name` must be in lower case.

        The comparison ignores the case of the sent name. Triton passes headers as request parameters. A client may set
        a parameter of the same name in the request's body, with any JSON type; values other than strings are ignored.
        """
        sent = json.loads(self._request.parameters() or "{}")
        return next((value for key, value in sent.items() if key.lower() == name and isinstance(value, str)), None)

    def versions(self) -> VersionRange | None:
        """Return the weights versions that the request demands; None: any. Raises ContractError if invalid.

        In the ensemble `critic_infer`, reward and critic both receive the request's parameters; the demand applies to
        the critic only.
        """
        sent = self._request.parameters()
        if "_version" not in sent or self.array(AFTER_CRITIC) is not None:  # skips slow parsing
            return None
        parameters = json.loads(sent)
        return VersionRange.of(parameters.get(MIN_VERSION), parameters.get(EXACT_VERSION))

    @property
    def timeout_s(self) -> float | None:
        """The request's own timeout in seconds; None if the caller set none."""
        return self._request.timeout() / 1e6 or None

    def answer(self, arrays: Arrays) -> None:
        """Send the response, reduced to the outputs that the caller requested.

        An unrequested tensor must never reach `send`. `send` releases the GIL and then drops unrequested tensors from
        the response, their last reference, so their NumPy arrays are freed by a thread that does not hold the GIL.
        Python 3.12 then segfaults at once; Python 3.11 and older have a data race on reference counts. (Servers from
        2.53 on, container 24.12, hold the GIL there.)
        """
        wanted = [pb_utils.Tensor(name, _escape_texts(array)) for name, array in arrays.items() if name in self.wanted]
        self._send(pb_utils.InferenceResponse(wanted))

    def fail(self, error: Exception) -> None:
        """Send an error response: ContractError as 400, `Unavailable` (retryable) as 503, anything else as 500.

        Never raises: if an exception left `execute`, Triton would answer every request of the batch a second time,
        which corrupts the server's heap.
        """
        if not self._is_probe():  # or the alert on this counter fires at each start
            self._count_failure(http_status(error))
        try:
            self._send(pb_utils.InferenceResponse(error=_triton_error(error)))
        except Exception as unsent:  # process edge: see above
            log_error(f"an error response could not be sent: {type(unsent).__name__}: {unsent}")

    def _is_probe(self) -> bool:
        with contextlib.suppress(ValueError):  # a forwarded header is not UTF-8
            return self.header(PROBE_HEADER) is not None
        return False

    def _send(self, response: Any) -> None:
        # This frame keeps `response` referenced until `send` has returned, so that its arrays are freed with the GIL
        # held (see `answer`).
        with self._lock:  # one thread may send the answer while another sends an error
            if not self.answered:
                self._before_send()
                self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                # Only now: if `send` raises, `fail` may still send an error. (Triton refuses that as well if `send` ran
                # out of shared memory, because its sender counts the attempt.)
                self.answered = True


def answer_each(calls: Sequence[Call], handle: Callable[[Call], None]) -> None:
    """Pass each request to `handle`; an exception fails that request only and never leaves `execute`."""
    for call in calls:
        try:
            handle(call)
        except Exception as error:  # process edge: an error fails this request only
            call.fail(error)


class ModelServer(Protocol):
    """Serves the requests of a model."""

    def execute(self, calls: Sequence[Call]) -> None:
        """Answer the requests, immediately or later; never raises."""

    def finalize(self) -> None:
        """Answer every received request, then release all resources."""


class TritonModel:
    """Base of the class that Triton loads as `TritonPythonModel`: forwards Triton's calls to what `serve` returns."""

    serve: Callable[[Mapping[str, str]], ModelServer]
    served: ModelServer
    pulse = Pulse("")  # inactive; `initialize` starts the process's own
    count_failure: Callable[[int], None] = staticmethod(lambda status: None)

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's entry point at load. A reload through Triton runs this in a new process."""
        _hide_requests()
        name = parameters_of(args).model
        # Triton itself counts an error response as a success.
        refused = NamedCounters(name, "rlhf_requests_refused_total", "Requests answered with an error", "status")
        self.count_failure = lambda status: refused.add({str(status): 1})
        self.served = type(self).serve(args)
        self.pulse = Pulse(name)
        self.pulse.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Triton's entry point for requests."""
        with self.pulse.handing_over():
            self.served.execute([Call(request, self.count_failure, self.pulse.check) for request in requests])

    def finalize(self) -> None:
        """Triton's entry point at unload."""
        self.served.finalize()


def triton_model(serve: Callable[[Mapping[str, str]], ModelServer]) -> type[TritonModel]:
    """Return the class that Triton loads; `serve` returns the server for the arguments of `initialize`."""

    class TritonPythonModel(TritonModel):
        """A class for each model, because Triton finds it by this name."""

    TritonPythonModel.serve = staticmethod(serve)
    return TritonPythonModel


def _triton_error(error: Exception) -> Any:
    kinds = pb_utils.TritonError
    status = http_status(error)
    is_plain = status != 500 or type(error) is RlhfError
    message = str(error) if is_plain else f"{type(error).__name__}: {error}"
    return kinds(printable(message), {503: kinds.UNAVAILABLE, 400: kinds.INVALID_ARG, 500: kinds.INTERNAL}[status])


def _escape_texts(array: np.ndarray) -> np.ndarray:
    """Escape unprintable characters in an array of texts; return arrays of numbers unchanged."""
    if array.dtype != np.object_:
        return array
    texts = [item.decode("utf-8", "replace") if isinstance(item, bytes) else str(item) for item in array.flat]
    return np.asarray([printable(text).encode() for text in texts], np.object_).reshape(array.shape)


class MetricCounters:
    """Counters in the server's Prometheus metrics; a reload of the model does not reset them."""

    def __init__(self, model: str, descriptions: Mapping[str, str]) -> None:
        """Register the counters. `descriptions` maps metric names to help texts."""
        self._metrics = [
            _metric(model, name, text, pb_utils.MetricFamily.COUNTER) for name, text in descriptions.items()
        ]
        self._pending = [0.0] * len(self._metrics)

    def add(self, amounts: Sequence[float]) -> None:
        """Add one amount to each counter, in the order of `descriptions`; visible after `publish`. Not thread-safe."""
        self._pending = [pending + amount for pending, amount in zip(self._pending, amounts, strict=True)]

    def publish(self) -> None:
        """Send the added amounts to the server: one round trip per metric, too slow for every forward pass.

        Never raises; the next call sends again what the server refused.
        """
        with _log_metric_errors():
            for i, metric in enumerate(self._metrics):
                if self._pending[i]:
                    metric.increment(self._pending[i])
                    self._pending[i] = 0.0


class NamedCounters:
    """Counters of one metric, distinguished by the value of a label and created on first use."""

    def __init__(self, model: str, family: str, description: str, label: str) -> None:
        self._model = model
        self._label = label
        self._family = _family(family, description, pb_utils.MetricFamily.COUNTER)
        self._metrics: dict[str, Any] = {}
        self._lock = threading.Lock()

    def add(self, amounts: Mapping[str, float]) -> None:
        """Add an amount to each named counter: one round trip to the server per counter. Thread-safe; never raises.

        Names beyond the first `MAX_NAMES` are ignored, because the server never forgets a metric.
        """
        with self._lock, _log_metric_errors():
            for name, amount in amounts.items():
                if name not in self._metrics and len(self._metrics) < MAX_NAMES:
                    self._metrics[name] = self._family.Metric(labels={"model": self._model, self._label: name})
                if name in self._metrics:
                    self._metrics[name].increment(amount)


class Gauge:
    """A gauge in the server's Prometheus metrics."""

    def __init__(self, model: str, name: str, description: str, **labels: str) -> None:
        """Register the gauge; `labels`: labels in addition to the model's name."""
        self._metric = _metric(model, name, description, pb_utils.MetricFamily.GAUGE, **labels)

    def show(self, value: float) -> None:
        """Set the value: one round trip to the server. Never raises."""
        with _log_metric_errors():
            self._metric.set(value)


@contextlib.contextmanager
def _log_metric_errors() -> Iterator[None]:
    """Log a metric's errors, such as exhausted shared memory, instead of raising: metrics must not affect answers."""
    try:
        yield
    except Exception as error:  # process edge: the calling thread also sends replies
        log_error(f"metrics: {type(error).__name__}: {error}")


def _metric(model: str, name: str, description: str, kind: Any, **labels: str) -> Any:
    return _family(name, description, kind).Metric(labels={"model": model, **labels})


def _family(name: str, description: str, kind: Any) -> Any:
    """Create a family of metrics that is never freed.

    Freeing a family removes its metrics from the server, although the model's next process may already use them.
    Freeing it at unload is worse: by then the stub has closed its connection to the server, and every unload ends in a
    segfault.
    """
    family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(family))  # leaked on purpose, even beyond interpreter shutdown
    return family


def log(message: str) -> None:
    """Write one info line to the server's log."""
    pb_utils.Logger.log_info(printable(message))


def log_error(message: str) -> None:
    """Write one error line to the server's log. Never raises, so that threads that send replies survive errors."""
    with contextlib.suppress(Exception):  # process edge: the log goes through shared memory, which may be exhausted
        pb_utils.Logger.log_error(printable(message))
