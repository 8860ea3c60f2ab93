"""Requests to Triton that are wrong in one way or several, and senders of any request over HTTP and gRPC."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc
import numpy as np
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc

from rlhf_triton.wire import contract

VOCAB_SIZE = 300
POSITIONS = 128
KEY_HEADER = "x-triton-training-key"
EDGES = (0, -1, 1, VOCAB_SIZE, 2**31, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))
DATATYPES = ("BOOL", "UINT8", "INT32", "INT64", "BF16", "FP32", "FP64", "BYTES", "NONSENSE", "")
NAMES = (
    contract.TOKENS,
    contract.SEQUENCE_LENGTHS,
    contract.SENTENCES,
    contract.TEXT_PAIRS,
    contract.METADATA,
    contract.PROMPT_LENGTHS,
    contract.RETURNS,
    contract.STEP,
    "after_critic",
    "",
    "x" * 5000,
)
TEXTS = (
    b"",
    b" ",
    b"A list of words",
    b"\x00",
    b"\xff\xfe",
    b"\x1b[2J\x1b]0;title\x07",
    b"\xed\xa0\x80",
    b"</s>" * 500,
    "\u202e\U0001f600".encode() * 50,
    b"x" * 100_000,
    b"word " * 200_000,
    b"y" * 1_000_001,
)
METADATA_TEXTS = (
    b"{}",
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{",
    b"\xff",
    b'{"a":' + b"[" * 5000,
    b'{"messages": "\\ud800"}',
    b'{"messages": [{"role": "user", "content": "\\ud800 \\u001b[2J"}]}',
    b'{"messages": [{"role": 5}]}',
    b'{"messages": [{"role": "user", "content": {"a": [1]}}]}',
    b'{"messages": []}',
    b'{"prompt": 5, "response": []}',
    b'{"a":' + b"[" * 600 + b"]" * 600 + b"}",
    b'{"do": "raise"}',
    b'{"do": "fork"}',
    b'{"a": NaN, "b": 1e999, "c": ' + b"9" * 5000 + b"}",
    b'{"messages": [' + b'{"role":"u","content":""},' * 20_000,
)
PARAMETERS = (
    {"priority": 2**63},
    {"timeout": 1},
    {"timeout": -1},
    {"sequence_id": "x"},
    {"binary_data_output": "yes"},
    {KEY_HEADER: 5},
    {KEY_HEADER: [1]},
    {"triton_enable_empty_final_response": True},
    {"unknown": {"a": 1}},
)
OUTPUTS = ("nothing", "", *(output.name for output in contract.OUTPUTS))
JSON_VALUES = (
    [],
    [[1, 2], [3]],
    [1.5],
    [None],
    [{}],
    [2**70],
    {"a": 1},
    [True],
    ["\ud800\x1b"],
    5,
)
BODIES = (
    b"",
    b"{}",
    b"[]",
    b'{"inputs": 5}',
    b'{"inputs": [{}]}',
    b'{"inputs": []}',
    b"\xff" * 100,
    b'{"inputs": [{"name": "tokens"',
    b"[" * 500,
    b'{"inputs": [{"name": 5, "shape": "x", "datatype": [], "data": {}}]}',
    b'{"id": "' + b"i" * 10_000 + b'"}',
)
HEADERS = (
    {"Inference-Header-Content-Length": "5"},
    {"Inference-Header-Content-Length": "99999999"},
    {"Inference-Header-Content-Length": "-1"},
    {KEY_HEADER: "5"},
    {KEY_HEADER: "\x7f"},
    {"x-triton-odd": "a" * 4000},
    {"Content-Encoding": "gzip"},
    {"Accept-Encoding": "gzip"},
)


@dataclass
class Tensor:
    """An input: `data` is sent as raw bytes; if `values` is set, it is sent as JSON instead."""

    name: str
    datatype: str
    shape: list[int]
    data: bytes = field(repr=False)
    values: Any = field(default=None, repr=False)


@dataclass
class Request:
    """A request to a model."""

    model: str
    tensors: list[Tensor]
    outputs: list[str] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    version: str = ""
    body: bytes | None = field(default=None, repr=False)
    """Raw HTTP body that replaces tensors, outputs and parameters."""


@st.composite
def bad_requests(draw, models, key, defect):
    """Return a strategy of requests with a defect, of DEFECTS, and up to two others; of valid ones if it is None.

    Args:
        models: models to choose from.
        key: training key, which half of the requests have.
    """
    request = _good(draw, draw(st.sampled_from(models)))
    if draw(st.booleans()):
        request.headers[KEY_HEADER] = key
    if defect is not None:
        others = draw(st.lists(st.sampled_from([*DEFECTS]), max_size=2))
        for name in dict.fromkeys([defect, *others]):
            DEFECTS[name](draw, request)
    return request


def array_tensor(name, array):
    """Return a tensor with the content of an int64 or float32 array."""
    return Tensor(name, {"i": "INT64", "f": "FP32"}[array.dtype.kind], list(array.shape), array.tobytes())


def texts_tensor(name, texts):
    """Return a tensor of texts, one in each row."""
    data = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return Tensor(name, "BYTES", [len(texts), 1], data)


def _good(draw, model):
    if model == contract.CRITIC_SAVE:
        return Request(model, [array_tensor("dummy_var", np.zeros(1, np.int64))])
    rows = draw(st.integers(1, 4))
    width = draw(st.integers(2, POSITIONS))
    numbers = np.random.default_rng(draw(SEEDS))
    tokens = array_tensor(contract.TOKENS, numbers.integers(0, VOCAB_SIZE, (rows, width), dtype=np.int64))
    if model == contract.CRITIC_TRAIN:
        targets = numbers.normal(size=(2, rows, width - 1)).astype(np.float32)
        arrays = {
            contract.RETURNS: targets[0],
            contract.PREV_VALUES: targets[1],
            contract.MASK: np.ones_like(targets[0]),
        }
        return Request(model, [tokens, *(array_tensor(name, array) for name, array in arrays.items())])
    if model != contract.REFERENCE and draw(st.booleans()):
        return Request(model, [texts_tensor(contract.SENTENCES, [b"A list of words"] * rows)])
    lengths = numbers.integers(1, width + 1, (rows, 1), dtype=np.int64)
    return Request(model, [tokens, array_tensor(contract.SEQUENCE_LENGTHS, lengths)])


def _pick(draw, request):
    if not request.tensors:
        request.tensors.append(array_tensor(contract.TOKENS, np.zeros((1, 2), np.int64)))
    return draw(st.sampled_from(request.tensors))


def _of_request(attribute, values):
    """Return a change that replaces an attribute of the request; to a dictionary it adds."""

    def change(draw, request):
        before = getattr(request, attribute)
        value = draw(values)
        setattr(request, attribute, before | value if isinstance(before, dict) else value)

    return change


def _of_tensor(attribute, values):
    """Return a change that replaces an attribute of one of the tensors."""
    return lambda draw, request: setattr(_pick(draw, request), attribute, draw(values))


def _odd_data(draw, request):
    """Cut the data of one of the tensors and continue it with other bytes, to its length or another one."""
    tensor = _pick(draw, request)
    kept = draw(st.integers(0, len(tensor.data)))
    num_other = draw(st.sampled_from((0, len(tensor.data) - kept, 1, 4, 8, 4096)))
    tensor.data = tensor.data[:kept] + random.Random(draw(SEEDS)).randbytes(num_other)


def _of_number(datatype, dtype, values):
    """Return a change of one number in each tensor of the type."""

    def change(draw, request):
        for tensor in request.tensors:
            if tensor.datatype == datatype and tensor.data and len(tensor.data) % np.dtype(dtype).itemsize == 0:
                array = np.frombuffer(tensor.data, dtype).copy()
                array[draw(st.integers(0, array.size - 1))] = draw(st.sampled_from(values))
                tensor.data = array.tobytes()

    return change


def _more(tensors):
    """Return a change that adds a tensor, made for the number of rows of the first one, at least 1 and at most 8."""

    def change(draw, request):
        rows = request.tensors[0].shape[0] if request.tensors and request.tensors[0].shape else 1
        request.tensors.append(draw(tensors(min(8, max(1, rows)))))

    return change


def _integers(names, *shape):
    """Return tensors of one of these names, with edge values."""
    edges = st.sampled_from(EDGES).map(lambda value: np.full(shape, value, np.int64))
    return st.builds(array_tensor, st.sampled_from(names), edges)


def _texts(name, texts, least, most):
    drawn = st.lists(st.sampled_from(texts), min_size=least, max_size=most)
    return drawn.map(lambda rows: texts_tensor(name, rows))


def _sentences(rows, text):
    return [texts_tensor(contract.SENTENCES, [*[text] * rows, b"word " * 100])]


def _rows(count, width, length):
    tokens = array_tensor(contract.TOKENS, np.ones((count, width), np.int64))
    return [tokens, array_tensor(contract.SEQUENCE_LENGTHS, np.full((count, 1), length, np.int64))]


def _as_json(draw, request):
    tensor = _pick(draw, request)
    tensor.values = draw(st.sampled_from(JSON_VALUES))
    if draw(st.booleans()):
        tensor.shape = [1, max(1, len(tensor.values))] if isinstance(tensor.values, list) else [1, 1]


SEEDS = st.integers(0, 2**32 - 1)
MANY = (2000, 8192, 8193, 100_000)  # rows; Triton takes 8192
RUN_IDS = _texts(contract.RUN_ID, TEXTS[:9], 1, 1).map(lambda tensor: replace(tensor, shape=[1]))
DEFECTS = {
    "drop_tensor": lambda draw, request: request.tensors.remove(_pick(draw, request)),
    "repeat_tensor": lambda draw, request: request.tensors.append(_pick(draw, request)),
    "rename_tensor": _of_tensor("name", st.sampled_from(NAMES)),
    "change_datatype": _of_tensor("datatype", st.sampled_from(DATATYPES)),
    "change_shape": _of_tensor("shape", st.lists(st.sampled_from((0, 1, 2, 5, 8193, -1, -5)), max_size=4)),
    "odd_data": _odd_data,
    "edge_values": _of_number("INT64", np.int64, EDGES),
    "bad_floats": _of_number("FP32", np.float32, (np.nan, np.inf, -np.inf, 3e38, -1.0)),
    "as_json": _as_json,
    "odd_outputs": _of_request("outputs", st.lists(st.sampled_from(OUTPUTS), min_size=1, max_size=3)),
    "odd_parameters": _of_request("parameters", st.sampled_from(PARAMETERS)),
    "odd_demands": _of_request(
        "parameters",
        st.dictionaries(
            st.sampled_from((contract.MIN_VERSION, contract.EXACT_VERSION)),
            st.sampled_from((*EDGES, *JSON_VALUES, True, 1.5, None)),
            min_size=1,
        ),
    ),
    "odd_version": _of_request("version", st.sampled_from(("2", "0", "-1", "99999999999999999999", "x"))),
    "odd_body": _of_request("body", st.sampled_from(BODIES) | st.binary(min_size=200, max_size=200)),
    "odd_headers": _of_request("headers", st.sampled_from(HEADERS)),
    "odd_sentences": _of_request("tensors", _texts(contract.SENTENCES, TEXTS, 1, 3).map(lambda tensor: [tensor])),
    "many_rows": _of_request("tensors", st.builds(_rows, st.sampled_from(MANY), st.just(1), st.just(1))),
    "wide_rows": _of_request(
        "tensors", st.builds(_rows, st.sampled_from((1, 64, 4000)), st.just(1100), st.sampled_from((1, 100, 1100)))
    ),
    "many_sentences": _of_request("tensors", st.builds(_sentences, st.sampled_from(MANY[:3]), st.just(b"a"))),
    "long_sentences": _of_request(
        "tensors", st.builds(_sentences, st.sampled_from((4, 12, 30)), st.just(b"word " * 190_000))
    ),
    "odd_pairs": _more(lambda rows: _texts(contract.TEXT_PAIRS, TEXTS, rows, rows)),
    "odd_metadata": _more(lambda rows: _texts(contract.METADATA, METADATA_TEXTS, rows, rows)),
    "prompt_lengths": _more(lambda rows: _integers([contract.PROMPT_LENGTHS], rows, 1)),
    "odd_run_id": _more(lambda rows: RUN_IDS),
    "odd_step": _more(lambda rows: _integers([contract.STEP, "rewind_to", "keep_steps"], 1)),
}
"""What may be wrong with a request, by name."""


# ---- senders ----

HANG_S = 120.0
LARGEST_MESSAGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


HUNG = "DEADLINE_EXCEEDED"


@dataclass
class Answer:
    """Answer to a request.

    `status` is the HTTP status code or the name of the gRPC status, HUNG for both if no answer came in time, and None
    if the connection broke.
    """

    status: str | None
    text: str
    outputs: dict[str, list[int]] = field(default_factory=dict)
    """Shapes of the outputs, by name."""


def send_http(url, request):
    """Send a request over HTTP; return the answer as `call` does, with the shapes of the outputs."""
    body, headers = _http_body(request)
    version = f"/versions/{request.version}" if request.version else ""
    answer = call(url, f"/v2/models/{request.model}{version}/infer", body, {**headers, **request.headers})
    if answer.status == "200" and answer.text.startswith("{"):  # it may be compressed
        answer.outputs = {item["name"]: item["shape"] for item in json.loads(answer.text).get("outputs", [])}
    return answer


def call(url, path, body, headers):
    """Send a POST request, or GET without a body."""
    with contextlib.closing(http.client.HTTPConnection(url, timeout=HANG_S)) as connection:
        try:
            connection.request("GET" if body is None else "POST", path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        except TimeoutError:
            return Answer(HUNG, "")
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Answer(None, f"{type(error).__name__}: {error}")
    length = int(answer.headers.get("Inference-Header-Content-Length") or len(content))
    return Answer(str(answer.status), content[:length].decode("utf-8", "replace"))


def _http_body(request):
    if request.body is not None:
        return request.body, {}
    inputs = []
    parts = []
    for tensor in request.tensors:
        described = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if tensor.values is not None:
            described["data"] = tensor.values
        else:
            described["parameters"] = {"binary_data_size": len(tensor.data)}
            parts.append(tensor.data)
        inputs.append(described)
    header = {"inputs": inputs, "parameters": {"binary_data_output": True, **request.parameters}}
    if request.outputs:
        header["outputs"] = [{"name": name} for name in request.outputs]
    encoded = json.dumps(header).encode()
    return encoded + b"".join(parts), {"Inference-Header-Content-Length": str(len(encoded))}


@contextlib.contextmanager
def grpc_sender(url):
    """Yield a function that sends a request over one gRPC channel; each thread needs its own."""
    with grpc.insecure_channel(url, options=[*LARGEST_MESSAGE, ("grpc.enable_http_proxy", 0)]) as channel:
        yield partial(_send_grpc, service_pb2_grpc.GRPCInferenceServiceStub(channel))


def _send_grpc(stub, request):
    try:
        metadata = [(name.lower(), value) for name, value in request.headers.items() if value.isprintable()]
        answer = stub.ModelInfer(_message(request), timeout=HANG_S, metadata=metadata)
    except grpc.RpcError as error:
        return Answer(error.code().name, str(error.details()))
    shapes = {output.name: list(output.shape) for output in answer.outputs}
    return Answer("200", "", shapes)


def _message(request):
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
