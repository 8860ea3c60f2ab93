"""Clients of the fuzz test: one sends requests over HTTP or gRPC exactly as built, one scores valid rows meanwhile."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from chaos.fuzz.requests import Request
from chaos.traffic import Background
from chaos.verdict import Verdict, verdict

LONGEST_WAIT_S = {"plain": 1.0, "guarded": 1.0, "gateway": 2.0}
GATEWAY_MB = 300.0  # above its memory at the start
# A status 500 counts as a defect, unless its message contains one of these, which tritonserver's own parsers send.
TRITONS_OWN = ("failed to parse the request JSON buffer", "Unable to parse", "unexpected", "Unexpected")
PAUSE_S = 0.05
TOLERANCE = 1e-4
HANG_S = 30.0
LARGEST_MESSAGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass
class StageOutcome:
    """Findings of one stage."""

    stage: str
    sent: Counter[str] = field(default_factory=Counter)
    """Number of requests by the status of their answer."""
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)
    outages: list[str] = field(default_factory=list)
    """Failed requests of the good client."""
    lost: list[str] = field(default_factory=list)
    """Requests whose connection broke; if the server died, one of the first of them killed it."""
    longest_good_wait_s: float = 0.0
    good_answers: int = 0
    gateway_mb: float = 0.0
    """Most memory of the gateway, above that at the start."""

    def judge(self, request: str, answer: Answer) -> None:
        """Count the answer to a request, and note what is wrong with it."""
        self.sent[str(answer.status)] += 1
        what = f"{request}: {answer.status} {answer.text}"[:1000]
        if answer.hung:
            self.hangs.append(what)
        elif answer.status is None or "Socket closed" in answer.text:
            self.lost.append(what)
        elif answer.status in ("500", "INTERNAL", "UNKNOWN") and not any(words in answer.text for words in TRITONS_OWN):
            self.wrong.append(what)
        elif answer.status == "200":
            self.wrong += [f"{what} {name} has shape {shape}" for name, shape in answer.outputs.items() if 0 in shape]

    def verdicts(self) -> list[Verdict]:
        """Return whether the stage kept each promise; a restart's verdict names the requests that were lost."""
        wait, limit = self.longest_good_wait_s, LONGEST_WAIT_S[self.stage]
        late = [f"{wait:.2f} s"] if wait > limit else []
        large = [f"{self.gateway_mb:.0f} MB"] if self.gateway_mb > GATEWAY_MB else []
        promises = {
            f"every request is answered within {HANG_S:g} s": self.hangs,
            "no answer is wrong": self.wrong,
            "no process is restarted": [*self.restarts, *(self.lost if self.restarts else [])],
            f"the good client is always served, within {limit:g} s": [*self.outages, *late],
            f"the gateway takes at most {GATEWAY_MB:g} MB more than at the start": large,
        }
        count = self.sent.total()
        return [verdict(f"{self.stage}: {promise}", count, found) for promise, found in promises.items()]


class GoodClient:
    """Scores the same rows repeatedly in its `thread`; the first answer is the reference for all others."""

    def __init__(
        self,
        outcome: StageOutcome,
        url: str,
        path: str,
        body: Any,
        read: Callable[[Any], dict[str, Any]],
        headers: Mapping[str, str],
    ) -> None:
        """Get the first answer.

        Args:
            outcome: of the stage; receives what is wrong, and how long the client waited.
            read: returns the numbers of a reply, by name.
        """
        self._outcome, self._read, self._expected = outcome, read, dict[str, Any]()
        self._request = url, path, json.dumps(body).encode(), headers
        self._ask()
        self.thread = Background("good-client", self._run)

    def _run(self) -> None:
        while not self.thread.given_up.wait(PAUSE_S):
            self._ask()

    def _ask(self) -> None:
        answer = post(*self._request)
        self._outcome.longest_good_wait_s = max(self._outcome.longest_good_wait_s, answer.seconds)
        if answer.status != "200":
            self._outcome.outages.append(f"{answer.status} {answer.text[:200]}")
            return
        found = {name: np.asarray(values, np.float64) for name, values in self._read(json.loads(answer.text)).items()}
        self._expected = self._expected or found
        self._outcome.good_answers += 1
        for name, array in self._expected.items():
            if name not in found or not np.allclose(found[name], array, atol=TOLERANCE, rtol=0, equal_nan=True):
                self._outcome.wrong.append(f"{name}: {found.get(name)} instead of {array}")


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
