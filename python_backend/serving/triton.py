"""The interface to Triton: a request and its reply, a model's parameters, the server's log and metrics.

The only module that imports triton_python_backend_utils; it imports no torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backend.errors import RlhfError
from python_backend.wire.contract import ContractError
from python_backend.wire.printable import printable


class Parameters:
    """A model's `parameters` from config.pbtxt. Raises ValueError naming the model and the parameter."""

    def __init__(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.model = config["name"]
        self._values = {key: item["string_value"] for key, item in config.get("parameters", {}).items()}

    def text(self, name: str) -> str:
        """A parameter that must be there."""
        if not self._values.get(name):
            raise ValueError(
                f"{self.model}/config.pbtxt lacks the parameter {name}; render it with tools/render_configs.py"
            )
        return self._values[name]

    def optional(self, name: str) -> str | None:
        """A parameter, or None when absent or empty."""
        return self._values.get(name) or None

    def number(self, name: str) -> int:
        """A parameter that is a whole number."""
        try:
            return int(self.text(name))
        except ValueError as error:
            raise ValueError(f"{self.model}/config.pbtxt: parameter {name} is no whole number: {error}") from error

    def path(self, name: str) -> Path:
        """A path; relative ones start where tritonserver was started."""
        return Path(self.text(name)).absolute()


class Unavailable(RlhfError):
    """Not now: the caller may repeat the request."""


class StepFailed(RlhfError):
    """The sidecar did what was journalled, and it failed; the message is the sidecar's."""


class Call:
    """One request and its way back."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self.answered = False
        self.wanted: frozenset[str] = frozenset(request.requested_output_names())
        """Names of the outputs that the caller requested; all of the model's if it named none."""

    def array(self, name: str) -> np.ndarray | None:
        """An input tensor, or None."""
        tensor = pb_utils.get_input_tensor_by_name(self._request, name)
        return None if tensor is None else tensor.as_numpy()

    def header(self, name: str) -> str | None:
        """A forwarded HTTP header; `name` in lower case, the client may have spelled it otherwise.

        A client may also put a parameter of that name into the request's body, where it may be of any JSON type: only
        text counts.
        """
        sent = json.loads(self._request.parameters() or "{}")
        return next((value for key, value in sent.items() if key.lower() == name and isinstance(value, str)), None)

    @property
    def timeout_s(self) -> float | None:
        """How long the caller lets the request wait; None: as long as it takes."""
        return self._request.timeout() / 1e6 or None

    def answer(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Send those of the outputs that the caller requested; a model need not sort them out itself.

        An unrequested tensor must never reach `send`. `send` releases the GIL and then drops such tensors from the
        response, which was all that kept them alive: their NumPy arrays are freed by a thread that does not hold the
        GIL. Python 3.12 segfaults at once; under 3.11 and older it is a data race on reference counts. (Servers from
        2.53 on, container 24.12, take the GIL there.)
        """
        wanted = [pb_utils.Tensor(name, _outgoing(array)) for name, array in arrays.items() if name in self.wanted]
        self._send(pb_utils.InferenceResponse(wanted))

    def fail(self, error: Exception) -> None:
        """Send the error: a broken contract is 400, `Unavailable`, which may be retried, 503; anything else is 500.

        Never raises: if the exception left `execute`, Triton would answer every request of the batch a second time,
        and a second answer corrupts the server's heap.
        """
        try:
            self._send(pb_utils.InferenceResponse(error=_triton_error(error)))
        except Exception as trouble:  # process edge: see above
            log_error(f"an error could not be sent: {type(trouble).__name__}: {trouble}")

    def _send(self, response: Any) -> None:
        # `response` stays referenced from here until `send` has returned with the GIL: what it holds is freed by us.
        with self._lock:  # an error may come from another thread than the answer
            answered, self.answered = self.answered, True
        if not answered:
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def answer_each(requests: Sequence[Any], handle: Callable[[Call], None]) -> None:
    """Pass each request to `handle`; what it raises becomes that request's answer, and nothing leaves `execute`."""
    for request in requests:
        call = Call(request)
        try:
            handle(call)
        except Exception as error:  # process edge: one request's error is that request's answer
            call.fail(error)


def _triton_error(error: Exception) -> Any:
    code, message = pb_utils.TritonError.INTERNAL, str(error)
    if isinstance(error, Unavailable):
        code = pb_utils.TritonError.UNAVAILABLE
    elif isinstance(error, ContractError):
        code = pb_utils.TritonError.INVALID_ARG
    elif not isinstance(error, StepFailed):
        message = f"{type(error).__name__}: {error}"
    return pb_utils.TritonError(printable(message), code)


def _outgoing(array: np.ndarray) -> np.ndarray:
    """The array as it may leave: texts printable, everything else as it is."""
    if array.dtype != np.object_:
        return array
    texts = [item.decode("utf-8", "replace") if isinstance(item, bytes) else str(item) for item in array.flat]
    return np.asarray([printable(text).encode() for text in texts], np.object_).reshape(array.shape)


class MetricCounters:
    """Numbers in the server's Prometheus metrics; they go on across reloads of the model."""

    def __init__(self, model: str, descriptions: Mapping[str, str]) -> None:
        """`descriptions`: metric name -> help text."""
        kind = pb_utils.MetricFamily.COUNTER
        self._metrics = [_metric(model, name, text, kind) for name, text in descriptions.items()]
        self._pending = [0.0] * len(self._metrics)

    def add(self, amounts: Sequence[float]) -> None:
        """Add one amount to each, in the order of the descriptions; `publish` shows it. Not for two threads at once."""
        self._pending = [pending + amount for pending, amount in zip(self._pending, amounts, strict=True)]

    def publish(self) -> None:
        """Show what was added: a round trip to the server for each metric, so not for every forward."""
        pending, self._pending = self._pending, [0.0] * len(self._metrics)
        for metric, amount in zip(self._metrics, pending, strict=True):
            if amount:
                metric.increment(amount)


class Gauge:
    """One number in the server's Prometheus metrics."""

    def __init__(self, model: str, name: str, description: str) -> None:
        self._metric = _metric(model, name, description, pb_utils.MetricFamily.GAUGE)

    def show(self, value: float) -> None:
        """Set it: a round trip to the server."""
        self._metric.set(value)


def _metric(model: str, name: str, description: str, kind: Any) -> Any:
    """A metric whose family lives as long as the process.

    A family that is freed takes its metrics out of the server, where the model's next process, which may run already,
    goes on counting in them. One that is freed at unload, with the model, does worse: the stub has given up its
    connection to the server by then, and every unload ends in a segfault.
    """
    family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(family))  # leaked on purpose: not freed with the interpreter either
    return family.Metric(labels={"model": model})


def log(message: str) -> None:
    """One line into the server's log."""
    pb_utils.Logger.log_info(printable(message))


def log_error(message: str) -> None:
    """One error line into the server's log."""
    pb_utils.Logger.log_error(printable(message))


def refuse_numpy_2() -> None:
    """NumPy 2 returns empty outputs from this backend. Raises RuntimeError."""
    if int(np.__version__.split(".")[0]) >= 2 and os.environ.get("TRITON_SERVER_VERSION") is None:
        raise RuntimeError(f"NumPy {np.__version__} returns empty outputs in this tritonserver; install numpy<2")
