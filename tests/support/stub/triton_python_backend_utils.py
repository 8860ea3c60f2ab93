"""Stand-in for the module that exists only inside Triton's stub, so that a test can run a model in its own process."""

from __future__ import annotations

import queue
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class Tensor:
    """A named array."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name = name
        self._array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class TritonError:
    """A message and its code."""

    INTERNAL = "INTERNAL"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"

    def __init__(self, message: str, code: str) -> None:
        try:
            message.encode()
        except UnicodeEncodeError as error:
            raise TypeError("incompatible constructor arguments") from error  # as the real one does
        self.text = f"{code}: {message}"


class InferenceResponse:
    """Output tensors or an error; unlike the real one it keeps the tensors that the caller did not request."""

    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self.outputs = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = None if error is None else error.text


class Request:
    """A request for `outputs`, and its own response sender; `responses` receives what the model sends."""

    def __init__(self, inputs: Mapping[str, np.ndarray], outputs: Collection[str], parameters: str = "") -> None:
        self.inputs = inputs
        self._parameters = parameters
        self.num_looks_at_outputs = 0
        self.responses: queue.SimpleQueue[InferenceResponse] = queue.SimpleQueue()
        self._outputs = outputs

    def get_response_sender(self) -> Request:
        return self

    def requested_output_names(self) -> Collection[str]:
        self.num_looks_at_outputs += 1
        return self._outputs

    def timeout(self) -> int:
        return 0

    def parameters(self) -> str:
        return self._parameters

    def send(self, response: InferenceResponse, flags: int) -> None:
        assert flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self.responses.put(response)


def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
    return Tensor(name, request.inputs[name]) if name in request.inputs else None


class MetricFamily:
    """A family of metrics, and any metric in it; records nothing."""

    COUNTER = GAUGE = None

    def __init__(self, **_: object) -> None:
        pass

    def Metric(self, **_: object) -> MetricFamily:
        return self

    def increment(self, _: float) -> None:
        pass

    def set(self, _: float) -> None:
        pass


class Logger:
    """The server's log, printed to pytest's captured output."""

    log_info: Any = print
    log_error: Any = print
