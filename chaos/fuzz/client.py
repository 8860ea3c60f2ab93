"""Sends the fuzz test's requests over HTTP or gRPC exactly as built: no client library validates or corrects them."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from chaos.fuzz.requests import Request

HANG_S = 30.0
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
    """Send a request over HTTP; return the answer as `post` does."""
    body, headers = _http_body(request)
    version = f"/versions/{request.version}" if request.version else ""
    return post(url, f"/v2/models/{request.model}{version}/infer", body, {**headers, **request.headers})


def post(url: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
    """Send a POST request; a status of None means that the connection broke or no answer came."""
    begin = time.monotonic()
    with contextlib.closing(http.client.HTTPConnection(url, timeout=HANG_S)) as connection:
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Answer(None, f"{type(error).__name__}: {error}", time.monotonic() - begin)
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


@contextlib.contextmanager
def grpc_sender(url: str) -> Iterator[Callable[[Request], Answer]]:
    """Yield a function that sends a request over one gRPC channel; each thread needs its own."""
    with grpc.insecure_channel(url, options=[*LARGEST_MESSAGE, ("grpc.enable_http_proxy", 0)]) as channel:
        yield functools.partial(_send_grpc, service_pb2_grpc.GRPCInferenceServiceStub(channel))


def _send_grpc(stub: Any, request: Request) -> Answer:
    begin = time.monotonic()
    try:
        metadata = [(name.lower(), value) for name, value in request.headers.items() if value.isprintable()]
        answer = stub.ModelInfer(_message(request), timeout=HANG_S, metadata=metadata)
    except grpc.RpcError as error:
        return Answer(error.code().name, str(error.details()), time.monotonic() - begin)
    shapes = {output.name: list(output.shape) for output in answer.outputs}
    return Answer("200", "", time.monotonic() - begin, shapes)


def _message(request: Request) -> Any:
    message = service_pb2.ModelInferRequest(model_name=request.model, model_version=request.version)
    for tensor in request.tensors:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
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
