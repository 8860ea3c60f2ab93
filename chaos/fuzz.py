"""`python -m tools fuzz --count N --seed S --out DIR`: sends bad requests while a client scores valid rows.

A third of the requests each: to all models of a plain server and of one with `rewards`, a training key and a reference,
over HTTP and gRPC; and to the gateway. Exit code 0: every request was answered within 30 s, no answer was wrong, the
scoring client was always served and never waited long, no process had to be restarted, and the gateway stayed small.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import re
import resource
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import numpy as np
import yaml
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.measurement import Record, peak_rss_bytes
from benchmarks.processes import free_ports, wait_until
from benchmarks.workload import random_llama, train_bpe
from chaos.system import Background, Verdict, run_test, verdict
from python_backend.config import RunConfig, load_config
from python_backend.config.command_line import reporting
from python_backend.config.sections import UNMEASURED
from python_backend.monitoring.log_lines import say
from python_backend.wire import contract
from python_backend.wire.contract import CRITIC_INFER
from tools.arguments import parse_or_complete
from tools.serve import start_server
from tools.server.child import Child
from tools.server.ports import free_port, is_open
from tools.server.supervisor import Supervisor

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
OUTPUTS = ("nothing", "", *(output.name for output in contract.OUTPUTS))
JSON_VALUES: tuple[Any, ...] = (
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
BODIES = (
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
    b"[" * 500,
    b'{"inputs": [{"name": 5, "shape": "x", "datatype": [], "data": {}}]}',
    b'{"id": "' + b"i" * 10_000 + b'"}',
)
HEADERS = (
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
FATAL_BODIES = (  # tritonserver 2.51 crashes on these
    *(
        b'{"inputs": [{"name": "tokens", "shape": [1, %d], "datatype": "INT64", "data": [1]}]}' % size
        for size in (2**31, 2**37)
    ),
    b"[" * 400_000,
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


Draw = Callable[[st.SearchStrategy[Any]], Any]
Change = Callable[[Draw, Request], None]


def requests(models: Sequence[str], key: str | None, *, kills: bool) -> list[st.SearchStrategy[Request]]:
    """Return a strategy of valid requests, and one for each defect, of requests that have it and up to two others.

    Args:
        models: models to choose from.
        key: training key, which half of the requests have; None for a server without one.
        kills: include bodies that are known to kill tritonserver 2.51 itself.
    """
    changes = {**CHANGES, **(KILLING if kills else {})}
    others = st.lists(st.sampled_from([*changes]), max_size=2)
    return [_request(models, key, changes, first, others) for first in (None, *changes)]


@st.composite
def _request(
    draw: Draw,
    models: Sequence[str],
    key: str | None,
    changes: Mapping[str, Change],
    first: str | None,
    others: st.SearchStrategy[list[str]],
) -> Request:
    request = _good(draw, draw(st.sampled_from(models)))
    if key is not None and draw(st.booleans()):
        request.headers[KEY_HEADER] = key
    request.wrong = [*dict.fromkeys([first, *draw(others)])] if first else []
    for name in request.wrong:
        changes[name](draw, request)
    return request


def array_tensor(name: str, array: np.ndarray) -> Tensor:
    """Return a tensor with the content of an int64 or float32 array."""
    return Tensor(name, {"i": "INT64", "f": "FP32"}[array.dtype.kind], list(array.shape), array.tobytes())


def texts_tensor(name: str, texts: Sequence[bytes]) -> Tensor:
    """Return a tensor of texts, one in each row."""
    data = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return Tensor(name, "BYTES", [len(texts), 1], data)


def _good(draw: Draw, model: str) -> Request:
    if model == contract.CRITIC_SAVE:
        return Request(model, [array_tensor("dummy_var", np.zeros(1, np.int64))])
    rows, width = draw(st.integers(1, 4)), draw(st.integers(2, POSITIONS))
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


def _pick(draw: Draw, request: Request) -> Tensor:
    if not request.tensors:
        request.tensors.append(array_tensor(contract.TOKENS, np.zeros((1, 2), np.int64)))
    return draw(st.sampled_from(request.tensors))


def _of_request(attribute: str, values: st.SearchStrategy[Any]) -> Change:
    """Return a change that replaces an attribute of the request; to a dictionary it adds."""

    def change(draw: Draw, request: Request) -> None:
        before, value = getattr(request, attribute), draw(values)
        setattr(request, attribute, before | value if isinstance(before, dict) else value)

    return change


def _of_tensor(attribute: str, values: st.SearchStrategy[Any]) -> Change:
    """Return a change that replaces an attribute of one of the tensors."""
    return lambda draw, request: setattr(_pick(draw, request), attribute, draw(values))


def _of_data(change_of: Callable[[bytes, random.Random], bytes]) -> Change:
    """Return a change of the data of one of the tensors."""

    def change(draw: Draw, request: Request) -> None:
        tensor = _pick(draw, request)
        tensor.data = change_of(tensor.data, random.Random(draw(SEEDS)))

    return change


def _of_number(datatype: str, dtype: type, values: Sequence[float]) -> Change:
    """Return a change of one number in each tensor of the type."""

    def change(draw: Draw, request: Request) -> None:
        for tensor in request.tensors:
            if tensor.datatype == datatype and tensor.data and len(tensor.data) % np.dtype(dtype).itemsize == 0:
                array: np.ndarray = np.frombuffer(tensor.data, dtype).copy()
                array[draw(st.integers(0, array.size - 1))] = draw(st.sampled_from(values))
                tensor.data = array.tobytes()

    return change


def _more(tensors: Callable[[int], st.SearchStrategy[Tensor]]) -> Change:
    """Return a change that adds a tensor, made for the number of rows of the first one, at least 1 and at most 8."""

    def change(draw: Draw, request: Request) -> None:
        rows = request.tensors[0].shape[0] if request.tensors and request.tensors[0].shape else 1
        request.tensors.append(draw(tensors(min(8, max(1, rows)))))

    return change


def _integers(names: Sequence[str], *shape: int) -> st.SearchStrategy[Tensor]:
    """Return tensors of one of these names, with edge values."""
    edges = st.sampled_from(EDGES).map(lambda value: np.full(shape, value, np.int64))
    return st.builds(array_tensor, st.sampled_from(names), edges)


def _texts(name: str, texts: Sequence[bytes], least: int, most: int) -> st.SearchStrategy[Tensor]:
    drawn = st.lists(st.sampled_from(texts), min_size=least, max_size=most)
    return drawn.map(lambda rows: texts_tensor(name, rows))


def _many_rows(rows: int) -> list[Tensor]:
    return [array_tensor(contract.TOKENS, np.ones((rows, 1), np.int64))]


def _many_sentences(rows: int, text: bytes) -> list[Tensor]:
    return [texts_tensor(contract.SENTENCES, [*[text] * rows, b"word " * 100])]


def _wide_rows(rows: int, length: int) -> list[Tensor]:
    tokens = array_tensor(contract.TOKENS, np.ones((rows, 1100), np.int64))
    return [tokens, array_tensor(contract.SEQUENCE_LENGTHS, np.full((rows, 1), length, np.int64))]


def _as_json(draw: Draw, request: Request) -> None:
    tensor = _pick(draw, request)
    tensor.values = draw(st.sampled_from(JSON_VALUES))
    if draw(st.booleans()):
        tensor.shape = [1, max(1, len(tensor.values))] if isinstance(tensor.values, list) else [1, 1]


SEEDS = st.integers(0, 2**32 - 1)
RUN_IDS = _texts(contract.RUN_ID, TEXTS[:9], 1, 1).map(lambda tensor: replace(tensor, shape=[1]))
CHANGES: dict[str, Change] = {
    "drop_tensor": lambda draw, request: request.tensors.remove(_pick(draw, request)),
    "repeat_tensor": lambda draw, request: request.tensors.append(_pick(draw, request)),
    "rename_tensor": _of_tensor("name", st.sampled_from(NAMES)),
    "change_datatype": _of_tensor("datatype", st.sampled_from(DATATYPES)),
    "change_shape": _of_tensor("shape", st.lists(st.sampled_from((0, 1, 2, 5, 8193, -1, -5)), max_size=4)),
    "empty_shape": _of_tensor("shape", st.sampled_from(([0, 0], [0, 5], [1, 0], [0], [0, 1]))),
    "empty_data": _of_data(lambda data, random: b""),
    "cut_data": _of_data(lambda data, random: data[: random.randrange(len(data) + 1)]),
    "extend_data": _of_data(lambda data, random: data + random.randbytes(random.choice((1, 4, 8, 4096)))),
    "scramble_data": _of_data(lambda data, random: random.randbytes(len(data))),
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
    "many_rows": _of_request("tensors", st.sampled_from((2000, 8192, 8193, 100_000)).map(_many_rows)),
    "many_sentences": _of_request(
        "tensors", st.builds(_many_sentences, st.sampled_from((2000, 8192, 20_000)), st.just(b"a"))
    ),
    "long_sentences": _of_request(
        "tensors", st.builds(_many_sentences, st.sampled_from((4, 12, 30)), st.just(b"word " * 190_000))
    ),
    "wide_rows": _of_request(
        "tensors", st.builds(_wide_rows, st.sampled_from((1, 64, 4000)), st.sampled_from((1, 100, 1100)))
    ),
    "odd_pairs": _more(lambda rows: _texts(contract.TEXT_PAIRS, TEXTS, rows, rows)),
    "odd_metadata": _more(lambda rows: _texts(contract.METADATA, METADATA_TEXTS, rows, rows)),
    "prompt_lengths": _more(lambda rows: _integers([contract.PROMPT_LENGTHS], rows, 1)),
    "odd_run_id": _more(lambda rows: RUN_IDS),
    "odd_step": _more(lambda rows: _integers([contract.STEP, "rewind_to", "keep_steps"], 1)),
}
"""What may be wrong with a request, by name."""
KILLING = {"fatal_body": _of_request("body", st.sampled_from(FATAL_BODIES))}


# ---- attacks on the gateway ----

GATEWAY_KEY_VARIABLE, GATEWAY_KEY = "FUZZ_GATEWAY_KEY", "sesame"
GATEWAY_HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {GATEWAY_KEY}"}
GATEWAY_TEXTS = ("a", "word ", '"\\', "\u00e4\U0001f600")
ROWS = (1, 2, 1500, 4096, 4097, 200_000)
INVALID: tuple[Any, ...] = ({}, [], 5, {"text": 1}, {"tokens": ["a"] * 100}, {"messages": [{}] * 100})
ITEMS: tuple[Any, ...] = ({}, [], "", "\u0101", {"a": 1}, 1000, 1.5)
PLACES = (  # of many items; `**`: as fields, a quarter of them
    b'{"inputs": [{"text": "a", "metadata": {"a": %s}}]}',
    b'{"inputs": [{"tokens": %s}]}',
    b'{"inputs": %s}',
    b'{"inputs": [{"text": "a"}], **}',
    b'{"inputs": [{"text": "a", "metadata": {**}}]}',
)


@dataclass
class Attack:
    """Content of one connection, or of several that are left open, as no answer is expected."""

    name: str
    content: bytes
    left_open: int = 0


def attacks() -> st.SearchStrategy[Attack]:
    """Return attacks of all kinds."""
    kinds = [st.builds(Attack, st.just(name), content, st.just(0)) for name, content in ATTACKS.items()]
    open_heads = (b"", b"GET /hea", _head("/healthz", 10, {}) + b"{", _head("/get_reward", 10, GATEWAY_HEADERS))
    left_open = st.builds(Attack, st.just("left open"), st.sampled_from(open_heads), st.sampled_from((10, 100, 300)))
    return st.one_of(*kinds, left_open)


def _head(path: str, length: int, headers: dict[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: fuzz", f"Content-Length: {length}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()


def _post(path: str, body: Any, headers: dict[str, str] = GATEWAY_HEADERS) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    return _head(path, len(content), headers) + content


def _repeated(item: Any, number: int) -> bytes:
    """Return the JSON of a list; `json` would hold the interpreter's lock for seconds, which the good client needs."""
    return b"[%s]" % b", ".join([json.dumps(item, ensure_ascii=False).encode()] * number)


def _many_items(item: Any, number: int, place: bytes) -> bytes:
    if b"**" not in place:
        return _post("/v1/rewards", place % _repeated(item, number))
    value = json.dumps(item, ensure_ascii=False).encode()
    fields = b", ".join(b'"%d": %s' % (i, value) for i in range(number // 4))
    return _post("/v1/rewards", place.replace(b"**", fields))


def _long(*lengths: int) -> st.SearchStrategy[str]:
    return st.builds(lambda text, length: text * length, st.sampled_from(GATEWAY_TEXTS), st.sampled_from(lengths))


def _invalid(path: str, name: str) -> st.SearchStrategy[bytes]:
    def content(item: Any, number: int) -> bytes:
        return _post(path, b'{"%s": %s}' % (name.encode(), _repeated(item, number)))

    return st.builds(content, st.sampled_from(INVALID), st.sampled_from(ROWS))


def _headers(sizes: Iterable[int], headers_of: Any) -> st.SearchStrategy[bytes]:
    return st.sampled_from(list(sizes)).map(lambda size: _head("/get_reward", 0, headers_of(size)))


ATTACKS: dict[str, st.SearchStrategy[bytes]] = {
    "product": st.builds(
        lambda text, rows: _post("/score", {"text_1": text, "text_2": ["b"] * rows}),
        _long(1, 100, 1_000_000),
        st.sampled_from(ROWS),
    ),
    "long texts": st.builds(
        lambda text, rows: _post("/get_reward", {"query": [text] * rows}),
        _long(10_000, 300_000, 3_000_000),
        st.sampled_from((1, 5)),
    ),
    "invalid inputs": _invalid("/v1/rewards", "inputs"),
    "invalid query": _invalid("/get_reward", "query"),
    "items": st.builds(
        _many_items, st.sampled_from(ITEMS), st.sampled_from((1000, 400_000, 2_000_000)), st.sampled_from(PLACES)
    ),
    "metadata": st.sampled_from(METADATA_TEXTS).map(
        lambda text: _post("/v1/rewards", b'{"inputs": [{"text": "a"}, {"text": "a", "metadata": %s}]}' % text)
    ),
    "long head": _headers((60_000, 1_000_000, 50_000_000), lambda size: {"X": "a" * size}),
    "many headers": _headers((1000, 100_000), lambda size: {f"X{i}": "a" for i in range(size)}),
    "no key": st.builds(
        lambda path, size: _post(path, b" " * size, {}),
        st.sampled_from(("/get_reward", "/healthz")),
        st.sampled_from((10, 100_000, 17_000_000)),
    ),
}
"""What is sent over one connection, by kind."""


LONGEST_WAIT_S = {"plain": 1.0, "guarded": 1.0, "gateway": 2.0}
GATEWAY_MB = 300.0  # above its memory at the start
# A status 500 counts as a defect, unless its message contains one of these, which tritonserver's own parsers send.
TRITONS_OWN = ("failed to parse the request JSON buffer", "Unable to parse", "unexpected", "Unexpected")
PAUSE_S = 0.05
TOLERANCE = 1e-4
HANG_S = 120.0
LARGEST_MESSAGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
SENDERS = 4
LOOK_EVERY_S = 0.1
ROWS_AT_GATEWAY = {"inputs": [{"text": "A list of words"}, {"prompt": "A list", "response": " of words"}]}
KEY_VARIABLE, KEY = "FUZZ_TRAINING_KEY", "open sesame"
MIXTURE: dict[str, Any] = {
    "rewards": {"model": {}, "length": {"function": "benchmarks.reward_functions:num_tokens", "weight": 0.1}},
    "reward": {"text": "pair"},
}
STAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "guarded": {
        **MIXTURE,
        "server": {"training_key_env": KEY_VARIABLE},
        "actor": {"kl": {"reference": "triton"}},
    },
    "gateway": {**MIXTURE, "gateway": {"port": 0, "key_env": GATEWAY_KEY_VARIABLE}},
}
MOST_OPEN = 2500  # connections left open: more than the gateway takes
Send = Callable[[Any], tuple[str, "Answer"]]


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Run all stages, print their findings; return 1 if one failed (not with `--kill-server`), 2 after an error."""
    parser = argparse.ArgumentParser(description="Send bad requests while a client scores valid rows.")
    parser.add_argument("--count", type=int, default=5000, help="number of requests; default: 5000, about ten minutes")
    parser.add_argument("--seed", type=int, default=1, help="seed of the requests; default: 1")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="default: runs/fuzz")
    parser.add_argument(
        "--kill-server", action="store_true", help="also send requests that are known to kill tritonserver 2.51 itself"
    )
    args = parse_or_complete(parser, argv)
    code = run_test(args.out, args.seed, partial(_run_stages, args))
    return 0 if code == 1 and args.kill_server else code


def _run_stages(args: argparse.Namespace, enough: threading.Event, record: Record) -> list[Verdict]:
    make_models(record.out / "checkpoints")
    resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1:] * 2)
    verdicts = []
    for number, stage in enumerate(STAGES):
        if not enough.is_set():
            outcome = StageOutcome(stage)
            run_stage(outcome, record.out, args.count // len(STAGES), args.seed + number, kills=args.kill_server)
            record.add(vars(outcome))
            say(f"{stage}: {dict(outcome.sent)}; longest wait of the good client {outcome.longest_good_wait_s:.2f} s")
            verdicts += outcome.verdicts()
    return verdicts


def run_stage(outcome: StageOutcome, out: Path, count: int, seed: int, *, kills: bool) -> None:
    """Start a server, send it the requests, and stop it. Call from the main thread."""
    os.environ[KEY_VARIABLE] = KEY  # read at each start of the server, when the repository is rendered
    config = write_config(out, outcome.stage)
    strategies: Sequence[st.SearchStrategy[Any]]
    with contextlib.ExitStack() as running:
        supervisor = Supervisor(lambda: start_server(config, log=lambda line: None), log=partial(_note, outcome))
        running.callback(supervisor.stop)
        if outcome.stage == "gateway":
            address = running.enter_context(running_gateway(outcome, config, out / outcome.stage / "fuzz.yaml"))
            good = GoodClient(outcome, address, "/v1/rewards", ROWS_AT_GATEWAY, _rewards_of, GATEWAY_HEADERS)
            strategies, sender = [attacks()], partial(_to_gateway, address)
        else:
            rows = np.random.default_rng(seed).integers(0, VOCAB_SIZE, (3, 17), dtype=np.int64)
            tensor = {"name": "tokens", "datatype": "INT64", "shape": list(rows.shape), "data": rows.ravel().tolist()}
            url, path = config.server.http_url, f"/v2/models/{CRITIC_INFER}/infer"
            good = GoodClient(outcome, url, path, {"inputs": [tensor]}, numbers_of, {})
            models = sorted(path.parent.name for path in config.run.repository_dir.glob("*/config.pbtxt"))
            strategies = requests(models, KEY if outcome.stage == "guarded" else None, kills=kills)
            sender = partial(_to_server, config)
        send = partial(send_examples, outcome, strategies, sender)
        senders = [
            Background(f"sender {i}", partial(send, len(range(i, count, SENDERS)), seed * SENDERS + i))
            for i in range(SENDERS)
        ]
        running.callback(good.thread.give_up)
        for thread in (good.thread, *senders):
            thread.start()
        while any(sender.is_alive() for sender in senders):
            supervisor.look()
            time.sleep(LOOK_EVERY_S)
    for thread in (good.thread, *senders):
        if thread.error is not None:
            raise thread.error


def send_examples(
    outcome: StageOutcome,
    strategies: Sequence[st.SearchStrategy[Any]],
    sender: Callable[[], contextlib.AbstractContextManager[Send]],
    count: int,
    number: int,
) -> None:
    """Send `count` examples, as many of each strategy, and judge the answers; `number` decides which examples."""

    def send_of(strategy: st.SearchStrategy[Any], share: int) -> None:
        @hypothesis.seed(number)
        @hypothesis.settings(
            max_examples=share,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(strategy)
        def send_one(example: Any) -> None:
            what, answer = send(example)
            outcome.judge(f"{number}: {what}", answer)

        send_one()

    order = random.Random(number).sample(strategies, len(strategies))  # which ones get one more, or none of a few
    with sender() as send:
        for i in range(min(count, len(order))):
            send_of(order[i], len(range(i, count, len(order))))


@contextlib.contextmanager
def _to_server(config: RunConfig) -> Iterator[Send]:
    """Yield a function that sends every other request over gRPC, if that can carry it."""
    turn = itertools.cycle((True, False))
    with grpc_sender(config.server.grpc_url) as send_grpc:

        def send(request: Request) -> tuple[str, Answer]:
            over_grpc = next(turn) and request.body is None
            answer = send_grpc(request) if over_grpc else send_http(config.server.http_url, request)
            way = "gRPC" if over_grpc else "HTTP"
            return f"{request.model} over {way}, {'+'.join(request.wrong) or 'nothing wrong'}", answer

        yield send


@contextlib.contextmanager
def _to_gateway(address: str) -> Iterator[Send]:
    """Yield a function that sends an attack; the status of its answer is None if the connection broke."""
    host, port = address.split(":")
    with contextlib.ExitStack() as opened:
        newest = deque[socket.socket]()

        def send(attack: Attack) -> tuple[str, Answer]:
            what, begin, status = f"{attack.name} at the gateway", time.monotonic(), b""
            try:
                for _ in range(attack.left_open or 1):
                    connection = opened.enter_context(socket.create_connection((host, int(port)), HANG_S))
                    newest.append(connection)
                    connection.sendall(attack.content)
                if not attack.left_open:
                    status = connection.recv(4096)
            except OSError as error:
                return what, Answer(None, f"{type(error).__name__}: {error}", time.monotonic() - begin)
            while len(newest) > MOST_OPEN // SENDERS:
                newest.popleft().close()
            found = re.match(rb"HTTP/1.1 (\d+)", status)
            code = found[1].decode() if found else attack.name
            return what, Answer(code, status.decode("latin-1"), time.monotonic() - begin)

        yield send


@contextlib.contextmanager
def running_gateway(outcome: StageOutcome, config: RunConfig, path: Path) -> Iterator[str]:
    """Run `python -m tools gateway`; yield its `host:port`, and note at the end how much its memory has grown."""
    port = free_port()
    arguments = ["--config", str(path), f"server.http_port={config.server.http_port}", f"gateway.port={port}"]
    key, log = {GATEWAY_KEY_VARIABLE: GATEWAY_KEY}, path.with_name("gateway.log")
    child, address = Child("gateway", ["tools", "gateway", *arguments], log, key), f"127.0.0.1:{port}"
    try:
        wait_until(partial(is_open, address), child)
        before = peak_rss_bytes(child.process.pid)
        yield address
        outcome.gateway_mb = (peak_rss_bytes(child.process.pid) - before) / 1e6
    finally:
        child.stop(signal.SIGTERM, 20)


def _note(outcome: StageOutcome, line: str) -> None:
    say(f"  {line}")
    if "restarting the server" in line or "reloading the model" in line:
        outcome.restarts.append(line)


def numbers_of(answer: Any) -> dict[str, Any]:
    """Return the outputs of an inference request that are numbers, by name."""
    return {item["name"]: item["data"] for item in answer["outputs"] if item["datatype"] == "FP32"}


def _rewards_of(answer: Any) -> dict[str, Any]:
    return {"rewards": answer["rewards"], **answer["components"]}


def write_config(out: Path, stage: str) -> RunConfig:
    """Return the configuration of a stage, on free ports; version 0 is written here, so no sidecar is needed."""
    from python_backend.store.weights import WeightsStore
    from trainer.publish import initialise_store  # torch: not for --help

    folder, checkpoints = out / stage, out / "checkpoints"
    data: dict[str, Any] = {
        "run": {"dir": str(folder)},
        "server": free_ports(),
        **{name: {"model": str(checkpoints / name), **UNMEASURED} for name in ("reward", "critic")},
        "reference": dict(UNMEASURED),
        "actor": {"policy": {"model": str(checkpoints / "policy")}},
    }
    for section, values in STAGES[stage].items():
        data[section] = {**data.get(section, {}), **values}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fuzz.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    config = load_config(path)
    initialise_store(WeightsStore(config.run.weights_dir), config.critic, run_id=config.run.identity)
    return config


def make_models(folder: Path) -> None:
    """Write tiny random checkpoints with a byte-level tokenizer and a chat template, unless they exist."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_bpe([]),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template="{% for m in messages %}{{ m.role }} {{ m.content }}</s>{% endfor %}",
    )
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": POSITIONS, "initializer_range": 0.2}
    for name in ("reward", "critic", "policy"):
        if not (folder / name / "config.json").is_file():
            random_llama(name, seed=len(name), **sizes).save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)


# ---- what a stage finds ----


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
        yield partial(_send_grpc, service_pb2_grpc.GRPCInferenceServiceStub(channel))


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
