"""Stand-in for the module that exists only inside Triton's stub, so that a test can run a model in its own process."""

import queue

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class Tensor:
    """A named array."""

    def __init__(self, name, array):
        self._name = name
        self._array = array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class TritonError:
    """A message and its code."""

    INTERNAL = "INTERNAL"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"

    def __init__(self, message, code):
        try:
            message.encode()
        except UnicodeEncodeError as error:
            raise TypeError("incompatible constructor arguments") from error  # as the real one does
        self.text = f"{code}: {message}"


class InferenceResponse:
    """Output tensors or an error; unlike the real one it keeps the tensors that the caller did not request."""

    def __init__(self, output_tensors=(), error=None):
        self.outputs = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = None if error is None else error.text


class Request:
    """A request for `outputs`, and its own response sender; `responses` receives what the model sends."""

    def __init__(self, inputs, outputs, parameters=""):
        self.inputs = inputs
        self._parameters = parameters
        self.num_looks_at_outputs = 0
        self.responses = queue.SimpleQueue()
        self._outputs = outputs

    def get_response_sender(self):
        return self

    def requested_output_names(self):
        self.num_looks_at_outputs += 1
        return self._outputs

    def timeout(self):
        return 0

    def parameters(self):
        return self._parameters

    def send(self, response, flags):
        assert flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self.responses.put(response)


def get_input_tensor_by_name(request, name):
    return Tensor(name, request.inputs[name]) if name in request.inputs else None


class MetricFamily:
    """A family of metrics, and any metric in it; records nothing."""

    COUNTER = GAUGE = None

    def __init__(self, **_):
        pass

    def Metric(self, **_):
        return self

    def increment(self, _):
        pass

    def set(self, _):
        pass


class Logger:
    """The server's log, printed to pytest's captured output."""

    log_info = print
    log_error = print
