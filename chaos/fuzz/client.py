"""Sends the fuzz test's requests over HTTP or gRPC exactly as built: no client library validates or corrects them.

`GoodClient` meanwhile scores the same valid rows repeatedly, and measures how long the answers take.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from chaos.fuzz.requests import Request, Tensor

HANG_S = 30.0
PAUSE_S = 0.05
TOLERANCE = 1e-4
LARGEST_MESSAGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass
class Answer:
    """Answer to a request. `status` is the HTTP status code or the name of the gRPC status; None if there was none."""

    status: str | None
    text: str
    seconds: float
    outputs: dict[str, list[int]] = field(default_factory=dict)
    """Shapes of the outputs, by name."""

    @property
    def hung(self) -> bool:
        """Whether no answer came in time."""
        return self.status == "DEADLINE_EXCEEDED" or (self.status is None and self.seconds >= HANG_S)


def send_http(url: str, request: Request) -> Answer:
    """Send a request over HTTP; a status of None means that the connection broke or no answer came."""
    body, headers = _http_body(request)
    version = f"/versions/{request.version}" if request.version else ""
    begin = time.monotonic()
    connection = http.client.HTTPConnection(url, timeout=HANG_S)
    try:
        connection.request("POST", f"/v2/models/{request.model}{version}/infer", body, {**headers, **request.headers})
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Answer(None, f"{type(error).__name__}: {error}", time.monotonic() - begin)
    finally:
        connection.close()
    length = int(answer.headers.get("Inference-Header-Content-Length") or len(content))
    text = content[:length].decode("utf-8", "replace")
    outputs = {}
    if answer.status == 200 and not answer.headers.get("Content-Encoding"):
        outputs = {item["name"]: item["shape"] for item in json.loads(text).get("outputs", [])}
    return Answer(str(answer.status), text, time.monotonic() - begin, outputs)


def _http_body(request: Request) -> tuple[bytes, dict[str, str]]:
    if request.body is not None:
        return request.body, {}
    inputs, parts = [], []
    for tensor in request.tensors:
        described: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if tensor.values is not None:
            described["data"] = tensor.values
        else:
            described["parameters"] = {"binary_data_size": len(tensor.data)}
            parts.append(tensor.data)
        inputs.append(described)
    header: dict[str, Any] = {"inputs": inputs, "parameters": {"binary_data_output": True, **request.parameters}}
    if request.outputs:
        header["outputs"] = [{"name": name} for name in request.outputs]
    encoded = json.dumps(header).encode()
    return encoded + b"".join(parts), {"Inference-Header-Content-Length": str(len(encoded))}


class GrpcSender:
    """Sends requests over one gRPC channel; each thread needs its own sender."""

    def __init__(self, url: str) -> None:
        self._channel = grpc.insecure_channel(url, options=[*LARGEST_MESSAGE, ("grpc.enable_http_proxy", 0)])
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def send(self, request: Request) -> Answer:
        """Send a request and return the answer."""
        begin = time.monotonic()
        try:
            message = _message(request)
            metadata = [(name.lower(), value) for name, value in request.headers.items() if value.isprintable()]
            answer = self._stub.ModelInfer(message, timeout=HANG_S, metadata=metadata)
        except grpc.RpcError as error:
            return Answer(error.code().name, str(error.details()), time.monotonic() - begin)
        shapes = {output.name: list(output.shape) for output in answer.outputs}
        return Answer("200", "", time.monotonic() - begin, shapes)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


def _message(request: Request) -> Any:
    message = service_pb2.ModelInferRequest(model_name=request.model, model_version=request.version)
    for tensor in request.tensors:
        message.inputs.append(_grpc_input(tensor))
        message.raw_input_contents.append(tensor.data)
    for name in request.outputs:
        message.outputs.add(name=name)
    for name, value in request.parameters.items():
        if isinstance(value, bool):
            message.parameters[name].bool_param = value
        elif isinstance(value, int):
            message.parameters[name].int64_param = min(value, 2**63 - 1)  # protobuf rejects larger numbers
        else:
            message.parameters[name].string_param = str(value)
    return message


def _grpc_input(tensor: Tensor) -> Any:
    return service_pb2.ModelInferRequest.InferInputTensor(
        name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
    )


def scored_tokens(rows: np.ndarray) -> dict[str, Any]:
    """Return the body of an inference request of token rows `[B, S]`."""
    tensor = {"name": "tokens", "datatype": "INT64", "shape": list(rows.shape), "data": rows.ravel().tolist()}
    return {"inputs": [tensor]}


def numbers_of(answer: Any) -> dict[str, Any]:
    """Return the outputs of an inference request that are numbers, by name."""
    return {item["name"]: item["data"] for item in answer["outputs"] if item["datatype"] == "FP32"}


class GoodClient:
    """Scores the same rows repeatedly in a background thread, as an actor would."""

    def __init__(
        self, url: str, path: str, body: Any, read: Callable[[Any], dict[str, Any]], headers: Mapping[str, str]
    ) -> None:
        """`read`: returns the numbers of a reply, by name."""
        self.longest_s = 0.0
        self.answered = 0
        self.wrong: list[str] = []
        self.outages: list[str] = []
        self._url, self._path, self._body, self._headers = url, path, json.dumps(body).encode(), {**headers}
        self._read, self._expected = read, dict[str, Any]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="good-client", daemon=True)

    def start(self) -> None:
        """Start the thread; the first answer is the reference for all others."""
        self._ask()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PAUSE_S):
            self._ask()

    def _ask(self) -> None:
        begin = time.monotonic()
        connection = http.client.HTTPConnection(self._url, timeout=HANG_S)
        try:
            connection.request("POST", self._path, self._body, self._headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.outages.append(f"{type(error).__name__}: {error}")
            return
        finally:
            connection.close()
            self.longest_s = max(self.longest_s, time.monotonic() - begin)
        if answer.status != 200:
            self.outages.append(f"HTTP {answer.status}: {content[:200]!r}")
            return
        self._compare(json.loads(content))

    def _compare(self, answer: dict[str, Any]) -> None:
        found = {name: np.asarray(values, np.float64) for name, values in self._read(answer).items()}
        self._expected = self._expected or found
        self.answered += 1
        for name, array in self._expected.items():
            if name not in found or not np.allclose(found[name], array, atol=TOLERANCE, rtol=0, equal_nan=True):
                self.wrong.append(f"{name}: {found.get(name)} instead of {array}")
