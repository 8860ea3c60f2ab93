"""Requests of the fuzz test: valid ones with up to three defects, in tensors, parameters, headers or the JSON body.

Needs only numpy and the standard library. The same seed gives the same requests.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from python_backend.rewards.function import Sample
from python_backend.wire.contract import (
    CRITIC_SAVE,
    CRITIC_TRAIN,
    MASK,
    METADATA,
    OUTPUTS,
    PREV_VALUES,
    PROMPT_LENGTHS,
    REFERENCE,
    RETURNS,
    REWARDS,
    RUN_ID,
    SENTENCES,
    SEQUENCE_LENGTHS,
    STEP,
    TEXT_PAIRS,
    TOKENS,
)

VOCAB_SIZE, POSITIONS = 300, 128
KEY_HEADER = "x-triton-training-key"
EDGES = (0, -1, 1, VOCAB_SIZE, 2**31, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))
DATATYPES = (
    "BOOL",
    "UINT8",
    "INT8",
    "INT32",
    "INT64",
    "UINT64",
    "FP16",
    "BF16",
    "FP32",
    "FP64",
    "BYTES",
    "NONSENSE",
    "",
)
NAMES = (
    TOKENS,
    SEQUENCE_LENGTHS,
    SENTENCES,
    TEXT_PAIRS,
    METADATA,
    PROMPT_LENGTHS,
    RETURNS,
    STEP,
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
PARAMETERS: tuple[dict[str, Any], ...] = (
    {"priority": 2**63},
    {"timeout": 1},
    {"timeout": -1},
    {"sequence_id": "x"},
    {"sequence_start": True},
    {"binary_data_output": "yes"},
    {KEY_HEADER: 5},
    {KEY_HEADER: [1]},
    {"triton_enable_empty_final_response": True},
    {"unknown": {"a": 1}},
)


@dataclass
class Tensor:
    """An input: `data` is sent as raw bytes; if `values` is set, it is sent as JSON instead."""

    name: str
    datatype: str
    shape: list[int]
    data: bytes
    values: Any = None


@dataclass
class Request:
    """A request; `wrong` holds the names of its defects."""

    model: str
    tensors: list[Tensor]
    outputs: list[str] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    version: str = ""
    body: bytes | None = None
    """Raw HTTP body that replaces tensors, outputs and parameters."""
    wrong: list[str] = field(default_factory=list)


def num_tokens(sample: Sample) -> float:
    """Reward function of the fuzz test: return the number of tokens, unless the metadata makes it fail or fork."""
    if sample.metadata.get("do") == "raise":
        raise ValueError("as the metadata says")
    if sample.metadata.get("do") == "fork":
        os.fork()  # both processes return
    return float(len(sample.tokens))


def make_request(generator: random.Random, models: Sequence[str], key: str | None, *, kills: bool) -> Request:
    """Return a request with up to three defects.

    Args:
        models: models to choose from.
        key: training key, which half of the requests have; None for a server without one.
        kills: include defects that are known to kill tritonserver 2.51 itself.
    """
    request = _good(generator, generator.choice(models))
    if key is not None and generator.random() < 0.5:
        request.headers[KEY_HEADER] = key
    changes = {**CHANGES, **(KILLING if kills else {})}
    request.wrong = generator.sample([*changes], generator.randint(0, 3))
    for name in request.wrong:
        changes[name](generator, request)
    return request


def array_tensor(name: str, array: np.ndarray) -> Tensor:
    """Return a tensor with the content of an int64 or float32 array."""
    return Tensor(name, {"i": "INT64", "f": "FP32"}[array.dtype.kind], list(array.shape), array.tobytes())


def texts_tensor(name: str, texts: Sequence[bytes]) -> Tensor:
    """Return a tensor of texts, one in each row."""
    data = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return Tensor(name, "BYTES", [len(texts), 1], data)


def _good(generator: random.Random, model: str) -> Request:
    if model == CRITIC_SAVE:
        return Request(model, [array_tensor("dummy_var", np.zeros(1, np.int64))])
    rows, width = generator.randint(1, 4), generator.randint(2, POSITIONS)
    numbers = np.random.default_rng(generator.getrandbits(32))
    tokens = array_tensor(TOKENS, numbers.integers(0, VOCAB_SIZE, (rows, width), dtype=np.int64))
    if model == CRITIC_TRAIN:
        targets = numbers.normal(size=(3, rows, width - 1)).astype(np.float32)
        parts = [array_tensor(name, part) for name, part in zip((RETURNS, PREV_VALUES), targets[:2], strict=True)]
        return Request(model, [tokens, *parts, array_tensor(MASK, np.ones((rows, width - 1), np.float32))])
    if model != REFERENCE and generator.random() < 0.4:
        return Request(model, [texts_tensor(SENTENCES, [b"A list of words"] * rows)])
    lengths = array_tensor(SEQUENCE_LENGTHS, numbers.integers(1, width + 1, (rows, 1), dtype=np.int64))
    return Request(model, [tokens, lengths])


def _pick(generator: random.Random, request: Request) -> Tensor:
    if not request.tensors:
        request.tensors.append(array_tensor(TOKENS, np.zeros((1, 2), np.int64)))
    return generator.choice(request.tensors)


def _drop_tensor(generator: random.Random, request: Request) -> None:
    request.tensors.remove(_pick(generator, request))


def _repeat_tensor(generator: random.Random, request: Request) -> None:
    request.tensors.append(_pick(generator, request))


def _rename_tensor(generator: random.Random, request: Request) -> None:
    _pick(generator, request).name = generator.choice(NAMES)


def _change_datatype(generator: random.Random, request: Request) -> None:
    _pick(generator, request).datatype = generator.choice(DATATYPES)


def _change_shape(generator: random.Random, request: Request) -> None:
    tensor = _pick(generator, request)
    tensor.shape = [generator.choice((0, 1, 2, 5, 8193, -1, -5)) for _ in range(generator.randint(0, 4))]


def _empty(generator: random.Random, request: Request) -> None:
    tensor = _pick(generator, request)
    tensor.shape, tensor.data = generator.choice(([0, 0], [0, 5], [1, 0], [0], [0, 1])), b""


def _cut_data(generator: random.Random, request: Request) -> None:
    tensor = _pick(generator, request)
    tensor.data = tensor.data[: generator.randrange(len(tensor.data) + 1)]


def _extend_data(generator: random.Random, request: Request) -> None:
    _pick(generator, request).data += generator.randbytes(generator.choice((1, 4, 8, 4096)))


def _scramble_data(generator: random.Random, request: Request) -> None:
    tensor = _pick(generator, request)
    tensor.data = generator.randbytes(len(tensor.data))


def _edge_values(generator: random.Random, request: Request) -> None:
    _change_one_number(generator, _pick(generator, request), "INT64", np.dtype(np.int64), EDGES)


def _bad_floats(generator: random.Random, request: Request) -> None:
    for tensor in request.tensors:
        _change_one_number(generator, tensor, "FP32", np.dtype(np.float32), (np.nan, np.inf, -np.inf, 3e38, -1.0))


def _change_one_number(
    generator: random.Random, tensor: Tensor, datatype: str, dtype: np.dtype, values: Sequence[float]
) -> None:
    if tensor.datatype == datatype and tensor.data and len(tensor.data) % dtype.itemsize == 0:
        array = np.frombuffer(tensor.data, dtype).copy()
        array[generator.randrange(array.size)] = generator.choice(values)
        tensor.data = array.tobytes()


def _replace_tensors(make: Callable[[random.Random], list[Tensor]], generator: random.Random, request: Request) -> None:
    request.tensors = make(generator)


def _add_tensor(make: Callable[[random.Random, int], Tensor], generator: random.Random, request: Request) -> None:
    """Add what `make` returns for the number of rows of the request's first tensor, at least 1 and at most 8."""
    rows = request.tensors[0].shape[0] if request.tensors and request.tensors[0].shape else 1
    request.tensors.append(make(generator, min(8, max(1, rows))))


def _odd_outputs(generator: random.Random, request: Request) -> None:
    known = [REWARDS, "nothing", "", *(output.name for output in OUTPUTS)]
    request.outputs = generator.choices(known, k=generator.randint(1, 3))


def _odd_parameters(generator: random.Random, request: Request) -> None:
    request.parameters |= generator.choice(PARAMETERS)


def _odd_version(generator: random.Random, request: Request) -> None:
    request.version = generator.choice(("2", "0", "-1", "99999999999999999999", "x"))


def _as_json(generator: random.Random, request: Request) -> None:
    values: tuple[Any, ...] = (
        [],
        [1],
        [[1, 2], [3]],
        [1.5],
        ["text"],
        [None],
        [{}],
        [2**70],
        "text",
        {"a": 1},
        [True],
        ["\ud800\x1b"],
        5,
    )
    tensor = _pick(generator, request)
    tensor.values = generator.choice(values)
    if generator.random() < 0.5:
        tensor.shape = [1, max(1, len(tensor.values))] if isinstance(tensor.values, list) else [1, 1]


def _odd_body(generator: random.Random, request: Request) -> None:
    bodies: tuple[bytes, ...] = (
        b"",
        b"{}",
        b"null",
        b"[]",
        b'{"inputs": 5}',
        b'{"inputs": [{}]}',
        b'{"inputs": [5]}',
        b'{"inputs": []}',
        b"\xff" * 100,
        b'{"inputs": [{"name": "tokens"',
        generator.randbytes(200),
        b"[" * 500,
        b'{"inputs": [{"name": 5, "shape": "x", "datatype": [], "data": {}}]}',
        b'{"id": "' + b"i" * 10_000 + b'"}',
    )
    request.body = generator.choice(bodies)


def _odd_headers(generator: random.Random, request: Request) -> None:
    request.headers |= generator.choice(
        (
            {"Inference-Header-Content-Length": "5"},
            {"Inference-Header-Content-Length": "99999999"},
            {"Inference-Header-Content-Length": "-1"},
            {"Inference-Header-Content-Length": "x"},
            {KEY_HEADER: "5"},
            {KEY_HEADER: "\x7f"},
            {"x-triton-odd": "a" * 4000},
            {"Content-Encoding": "gzip"},
            {"Content-Encoding": "odd"},
            {"Accept-Encoding": "gzip"},
        )
    )


def _kill_by_shape(generator: random.Random, request: Request) -> None:
    shape = [1, generator.choice((2**31, 2**37))]
    tensor = {"name": TOKENS, "shape": shape, "datatype": "INT64", "data": [1]}
    request.body = json.dumps({"inputs": [tensor]}).encode()


def _kill_by_brackets(generator: random.Random, request: Request) -> None:
    request.body = b"[" * 400_000


def _wide_rows(rows: int, length: int) -> list[Tensor]:
    tokens = array_tensor(TOKENS, np.ones((rows, 1100), np.int64))
    return [tokens, array_tensor(SEQUENCE_LENGTHS, np.full((rows, 1), length, np.int64))]


# Changes that replace all tensors of a request.
NEW_TENSORS: dict[str, Callable[[random.Random], list[Tensor]]] = {
    "odd_sentences": lambda g: [texts_tensor(SENTENCES, [g.choice(TEXTS) for _ in range(g.randint(1, 3))])],
    "many_rows": lambda g: [array_tensor(TOKENS, np.ones((g.choice((2000, 8192, 8193, 100_000)), 1), np.int64))],
    "many_sentences": lambda g: [texts_tensor(SENTENCES, [b"a"] * g.choice((2000, 8192, 20_000)) + [b"word " * 100])],
    "long_sentences": lambda g: [texts_tensor(SENTENCES, [b"word " * 190_000] * g.choice((4, 12, 30)))],
    "wide_rows": lambda g: _wide_rows(g.choice((1, 64, 4000)), g.choice((1, 100, 1100))),
}
# Changes that add a tensor to a request; called with its number of rows.
MORE_TENSORS: dict[str, Callable[[random.Random, int], Tensor]] = {
    "odd_pairs": lambda g, rows: texts_tensor(TEXT_PAIRS, [g.choice(TEXTS) for _ in range(rows)]),
    "odd_metadata": lambda g, rows: texts_tensor(METADATA, [g.choice(METADATA_TEXTS) for _ in range(rows)]),
    "prompt_lengths": lambda g, rows: array_tensor(
        PROMPT_LENGTHS, np.asarray([[g.choice(EDGES)] for _ in range(g.randint(1, 4))], np.int64)
    ),
    "odd_run_id": lambda g, rows: replace(texts_tensor(RUN_ID, [g.choice(TEXTS[:9])]), shape=[1]),
    "odd_step": lambda g, rows: array_tensor(
        g.choice((STEP, "rewind_to", "keep_steps")), np.asarray([g.choice(EDGES)], np.int64)
    ),
}
CHANGES: dict[str, Callable[[random.Random, Request], None]] = {
    "drop_tensor": _drop_tensor,
    "repeat_tensor": _repeat_tensor,
    "rename_tensor": _rename_tensor,
    "change_datatype": _change_datatype,
    "change_shape": _change_shape,
    "empty": _empty,
    "cut_data": _cut_data,
    "extend_data": _extend_data,
    "scramble_data": _scramble_data,
    "edge_values": _edge_values,
    "bad_floats": _bad_floats,
    "odd_outputs": _odd_outputs,
    "odd_parameters": _odd_parameters,
    "odd_version": _odd_version,
    "as_json": _as_json,
    "odd_body": _odd_body,
    "odd_headers": _odd_headers,
    **{name: partial(_replace_tensors, make) for name, make in NEW_TENSORS.items()},
    **{name: partial(_add_tensor, make) for name, make in MORE_TENSORS.items()},
}
KILLING = {"kill_by_shape": _kill_by_shape, "kill_by_brackets": _kill_by_brackets}
