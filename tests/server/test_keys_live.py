"""Each endpoint of a real server and gateway with each key; the table in docs/operating.md is what was observed.

`RLHF_WRITE_KEYS=1` writes the table instead of comparing it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import numpy as np
import pytest
from live_system import (
    KEY,
    TRAINING_KEY,
    Checkpoints,
    System,
    identity,
    make_run,
    random_rows,
    scoring_inputs,
    start_system,
    training_inputs,
)
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from python_backend.store.control_key import GRPC_HEADER, HEADER, control_key

pytestmark = pytest.mark.slow
PAGE = Path(__file__).resolve().parents[2] / "docs" / "operating.md"
BEGIN, END = "<!-- written by tests/server/test_keys_live.py -->\n\n", "\n<!-- end of the table of keys -->\n"
WRITE = "RLHF_WRITE_KEYS"
GATEWAY_KEY = "gateway secret"
HOLDERS = ("none", "wrong", "training", "control", "gateway")
YES, NO = "yes", "no"
TIMEOUT_S = 60
SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
SHARED = "rlhf_keys_test"
TEXT = {"input": "Good day."}

Probe = Callable[[Mapping[str, str]], str]
"""Sends a request with the given headers; returns YES, or the status if a key is missing. Fails on other errors."""


@dataclass(frozen=True)
class Endpoints:
    """Endpoints that every key treats alike, as one row of the table says."""

    what: str
    http: Mapping[str, Probe]
    grpc: Mapping[str, Probe]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Iterator[System]:
    """Not shared with other tests, since models are unloaded here."""
    with mock.patch.dict(os.environ, {"KEYS_TEST_TRAINING": TRAINING_KEY}):
        sections = {"server": {"training_key_env": "KEYS_TEST_TRAINING"}}
        started = start_system(make_run(tmp_path_factory.mktemp("keys"), checkpoints, **sections))
        yield started
        started.stop()


@pytest.fixture(scope="module")
def gateway(system: System) -> Iterator[str]:
    """Address of a gateway with a key."""
    command = [sys.executable, "-m", "tools", "gateway", "--config", str(system.run.path)]
    command += ["gateway.port=0", "gateway.key_env=KEYS_TEST_GATEWAY"]
    environment = {**os.environ, "KEYS_TEST_GATEWAY": GATEWAY_KEY}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().partition("gateway: ")[2].partition(",")[0]
        finally:
            process.terminate()


# ---- probes ----


def judged(status: str, text: str, bogus: bool = False) -> str:
    lacks_key = any(words in text for words in ("restricted", "key: missing or wrong", "no valid key"))
    assert lacks_key or bogus, (status, text)
    return status if lacks_key else YES


def http(url: str, body: Callable[[], Any] | Any = None, bogus: bool = False) -> Probe:
    """GET, or POST of a body as JSON; `bogus`: invalid, so that only an error about a key is a refusal."""

    def probe(headers: Mapping[str, str]) -> str:
        given = body() if callable(body) else body
        data = None if given is None else json.dumps(given).encode()
        request = urllib.request.Request(url, data, {"content-type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                assert answer.status == 200
                return YES
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode()
            return judged(str(error.code), text, bogus)

    return probe


def call(channel: grpc.Channel, method: str, make: Callable[[], Any], bogus: bool = False) -> Probe:
    """A method of Triton's gRPC service; `bogus`: as in `http`."""

    def probe(headers: Mapping[str, str]) -> str:
        stub = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), method)
        streams = SERVICE.methods_by_name[method].client_streaming
        try:
            answer = stub(iter([make()]) if streams else make(), metadata=[*headers.items()], timeout=TIMEOUT_S)
            for error in [part.error_message for part in answer if part.error_message] if streams else ():
                return judged("INVALID_ARGUMENT", error)  # a message in the stream, without a code
        except grpc.RpcError as error:
            return judged(error.code().name, error.details(), bogus)
        return YES

    return probe


def as_json(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    def data(array: np.ndarray) -> list[Any]:
        return [item.decode() if isinstance(item, bytes) else item for item in array.ravel().tolist()]

    inputs = [
        {"name": name, "shape": list(array.shape), "datatype": np_to_triton_dtype(array.dtype), "data": data(array)}
        for name, array in arrays.items()
    ]
    return {"inputs": inputs}


def as_message(model: str, arrays: Mapping[str, np.ndarray]) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, array in arrays.items():
        request.inputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        raw = serialize_byte_tensor(array).item() if array.dtype == np.object_ else array.tobytes()
        request.raw_input_contents.append(raw)
    return request


# ---- endpoints ----


def endpoints(system: System, channel: grpc.Channel, gateway: str) -> list[Endpoints]:
    """Return all of them; requests are valid, so that nothing but a key can be missing."""
    run = system.run
    server, model = f"http://{run.url}/v2", f"http://{run.url}/v2/models/critic"

    def get(*paths: str) -> dict[str, Probe]:
        return {path: http(path) for path in paths}

    def rpc(*methods: str, bogus: bool = False, **fields: Any) -> dict[str, Probe]:
        def request(method: str) -> Callable[[], Any]:
            name = SERVICE.methods_by_name[method].input_type.name
            return lambda: getattr(service_pb2, name)(**fields)

        return {method: call(channel, method, request(method), bogus) for method in methods}

    def infer(model: str, arrays: Callable[[], Mapping[str, np.ndarray]]) -> tuple[dict[str, Probe], dict[str, Probe]]:
        url = f"{server}/models/{model}/infer"
        message = lambda: as_message(model, arrays())  # noqa: E731
        methods = ("ModelInfer", "ModelStreamInfer")
        return (
            {url: http(url, lambda: as_json(arrays()))},
            {f"{method} {model}": call(channel, method, message) for method in methods},
        )

    def step() -> dict[str, np.ndarray]:
        return {**training_inputs(seed=1), **identity(run.run_id, run.next_step())}

    rows = scoring_inputs(random_rows([5, 9], seed=1))
    scoring = [infer(name, lambda: rows) for name in ("reward_model", "critic", "critic_infer")]
    training = [infer("critic_train", step), infer("critic_save", lambda: {"dummy_var": np.zeros(1, np.int64)})]
    control = f"{server}/repository"
    region = {"key": f"/{SHARED}", "offset": 0, "byte_size": 16}
    memory = f"{server}/systemsharedmemory"
    cuda = {"raw_handle": {"b64": ""}, "device_id": 0, "byte_size": 16}
    chat = {"messages": [{"role": "user", "content": "Good day."}]}
    return [
        Endpoints(
            "health, readiness",
            get(f"{server}/health/live", f"{server}/health/ready", f"{model}/ready"),
            {**rpc("ServerLive", "ServerReady"), **rpc("ModelReady", name="critic")},
        ),
        Endpoints(
            "metadata, configuration, statistics",
            get(server, model, f"{model}/config", f"{model}/stats"),
            {**rpc("ServerMetadata"), **rpc("ModelMetadata", "ModelConfig", "ModelStatistics", name="critic")},
        ),
        Endpoints("Prometheus metrics", get(f"http://{run.config.server.metrics_url}/metrics"), {}),
        Endpoints("`reward_model`, `critic`, `critic_infer`", *merged(scoring)),
        Endpoints("`critic_train`, `critic_save`", *merged(training)),
        Endpoints(
            "model control: index, unload, load",
            {
                url: http(url, {})
                for url in (f"{control}/index", *(f"{control}/models/critic_save/{do}" for do in ("unload", "load")))
            },
            {
                **rpc("RepositoryIndex"),
                **rpc("RepositoryModelUnload", "RepositoryModelLoad", model_name="critic_save"),
            },
        ),
        Endpoints(
            "shared memory",
            {
                **get(f"{memory}/status", f"{server}/cudasharedmemory/status"),
                "register": http(f"{memory}/region/http/register", region),
                "cuda": http(f"{server}/cudasharedmemory/region/cuda/register", cuda, bogus=True),
                **{url: http(url, {}) for url in (f"{memory}/unregister", f"{server}/cudasharedmemory/unregister")},
            },
            {
                **rpc("SystemSharedMemoryStatus", "CudaSharedMemoryStatus", "CudaSharedMemoryUnregister"),
                **rpc("SystemSharedMemoryRegister", name="grpc", **region),
                **rpc("SystemSharedMemoryUnregister"),
                **rpc("CudaSharedMemoryRegister", name="cuda", byte_size=16, bogus=True),
            },
        ),
        Endpoints(
            "trace and log settings",
            {
                **get(f"{server}/trace/setting", f"{server}/logging", f"{model}/trace/setting"),
                **{f"POST {path}": http(f"{server}/{path}", {}) for path in ("trace/setting", "logging")},
            },
            rpc("TraceSetting", "LogSettings"),
        ),
        Endpoints(
            "gateway: `/healthz`, `/readyz`, `/docs`, `/openapi.json`",
            get(*(f"{gateway}/{path}" for path in ("healthz", "readyz", "docs", "openapi.json"))),
            {},
        ),
        Endpoints(
            "gateway: every other path",
            {
                **get(f"{gateway}/v1/models"),
                f"{gateway}/v1/rewards": http(f"{gateway}/v1/rewards", {"inputs": [{"text": "Good day."}]}),
                f"{gateway}/get_reward": http(f"{gateway}/get_reward", {"query": ["Good day."]}),
                f"{gateway}/remote_rm": http(f"{gateway}/remote_rm", {"prompt": "Good", "response": " day."}),
                f"{gateway}/classify": http(f"{gateway}/classify", {"model": "reward_model", **TEXT}),
                f"{gateway}/pooling": http(f"{gateway}/pooling", {"model": "reward_model", **chat}),
                f"{gateway}/score": http(
                    f"{gateway}/score", {"model": "reward_model", "text_1": "a", "text_2": "b"}, bogus=True
                ),
            },
            {},
        ),
    ]


def merged(pairs: list[tuple[dict[str, Probe], dict[str, Probe]]]) -> tuple[dict[str, Probe], dict[str, Probe]]:
    over_http, over_grpc = {}, {}
    for one, other in pairs:
        over_http |= one
        over_grpc |= other
    return over_http, over_grpc


# ---- the table ----


def headers_of(key: str) -> dict[str, str]:
    """A holder tries the key wherever a key can be sent."""
    (training_header,) = KEY
    names = (training_header, HEADER, GRPC_HEADER) if key else ()
    return {**dict.fromkeys(names, key), **({"authorization": f"Bearer {key}"} if key else {})}


def observe(group: Mapping[str, Probe], keys: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """Return what each holder gets from all endpoints of the group, YES or NO, and the status of the refusals."""
    cells, statuses = [], set()
    for holder in HOLDERS:
        seen = {name: probe(headers_of(keys[holder])) for name, probe in group.items()}
        assert len(set(seen.values())) == 1, f"with the key {holder}: {seen}"
        status = next(iter(seen.values()))
        cells.append(YES if status == YES else NO)
        statuses |= {status} - {YES}
    assert len(statuses) <= 1, statuses
    return tuple(cells), "".join(statuses)


def rows_of(group: Endpoints, keys: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield one row if a key opens the same over HTTP and gRPC, else two."""
    found = {over: observe(probes, keys) for over, probes in (("HTTP", group.http), ("gRPC", group.grpc)) if probes}
    for cells in dict.fromkeys(cells for cells, _ in found.values()):
        overs = [over for over in found if found[over][0] == cells]
        refusals = ", ".join(f"{over} {found[over][1]}" for over in overs if found[over][1])
        yield (group.what, ", ".join(overs), *cells, refusals)


def table(rows: list[tuple[str, ...]]) -> str:
    lines = [("endpoint", "over", "no key", "wrong", *HOLDERS[2:], "a refusal"), *rows]
    shown = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([shown[0], f"|{'---|' * len(lines[0])}", *shown[1:]]) + "\n"


@pytest.fixture(scope="module")
def observed(system: System, gateway: str) -> str:
    """The table of every endpoint and key."""
    control = control_key(system.run.config.run.weights_dir)
    keys = {"none": "", "wrong": "guessed", "training": TRAINING_KEY, "control": control, "gateway": GATEWAY_KEY}
    assert len(set(keys.values())) == len(HOLDERS)
    rows: list[tuple[str, ...]] = []
    memory = Path("/dev/shm") / SHARED
    memory.write_bytes(bytes(16))
    try:
        with grpc.insecure_channel(system.run.config.server.grpc_url) as channel:
            for group in endpoints(system, channel, gateway):
                rows += rows_of(group, keys)
    finally:
        memory.unlink()
    return table(rows)


def test_the_documentation_has_what_each_key_opens(observed: str) -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    written, _, after = rest.partition(END)
    assert after, f"{PAGE.name} has no table between {BEGIN!r} and {END!r}"
    if os.environ.get(WRITE) == "1":
        PAGE.write_text(f"{before}{BEGIN}{observed}{END}{after}")
        written = observed
    assert written == observed, f"run it again with {WRITE}=1"


def test_every_endpoint_is_asked(system: System, gateway: str) -> None:
    with grpc.insecure_channel(system.run.config.server.grpc_url) as channel:
        groups = endpoints(system, channel, gateway)
    asked = {name.partition(" ")[0] for group in groups for name in group.grpc}
    assert asked == set(SERVICE.methods_by_name)
    with urllib.request.urlopen(f"{gateway}/openapi.json", timeout=TIMEOUT_S) as answer:
        routes = {f"{gateway}{path}" for path in json.load(answer)["paths"]}
    assert routes <= {url for group in groups for url in group.http}
