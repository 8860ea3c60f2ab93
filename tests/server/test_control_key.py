"""What can run code in the server needs a key; everything else works without."""

from __future__ import annotations

import json
import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tiny_models import tiny_server, write_repository

from python_backend.errors import RlhfError
from python_backend.store.control_key import HEADER, VARIABLE, control_key
from tools.server.tritonserver import TritonServer
from trainer.control_plane import ControlPlane, ControlPlaneError

KEY = "a-very-long-secret-key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("server")
    write_repository(folder / "repository")
    server = tiny_server(folder)
    server._control_key = KEY
    with server:
        server.wait_ready()
        yield server


def http_status(server: TritonServer, path: str, body: object = None, **headers: str) -> int:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.section.http_url}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


LOAD_CODE = {"parameters": {"config": "{}", "file:1/model.py": "cHJpbnQoMSk="}}  # brings its own model.py
LOCKED = [
    ("/v2/repository/index", {}),
    ("/v2/repository/models/critic/load", LOAD_CODE),
    ("/v2/repository/models/critic/unload", {}),
    ("/v2/systemsharedmemory/status", None),
    ("/v2/cudasharedmemory/status", None),
    ("/v2/trace/setting", None),
    ("/v2/logging", None),
]


@pytest.mark.parametrize(("path", "body"), LOCKED)
def test_http_refuses_without_the_key(server: TritonServer, path: str, body: object) -> None:
    assert http_status(server, path, body) == http_status(server, path, body, **{HEADER: "wrong"}) == 403
    assert http_status(server, "/v2/repository/index", {}, **{HEADER: KEY}) == 200


def test_grpc_refuses_loads_without_the_key_and_says_where_it_is(server: TritonServer) -> None:
    with ControlPlane(server.section.grpc_url) as control:
        assert control.is_ready("critic")
        assert control.active_parameters("critic") == {"weights_version": "0"}
        assert control.answers_inference(5.0)
        control.probe_scoring("critic", ("values",), 5.0)
        with pytest.raises(ControlPlaneError, match=r"requires a key for model control.*; set TRITON_CONTROL_KEY"):
            control.load("critic", parameters={"weights_version": "1"}, timeout_s=30)
    with ControlPlane(server.section.grpc_url, KEY) as control:
        control.load("critic", parameters={"weights_version": "1"}, timeout_s=30)
        assert control.active_parameters("critic") == {"weights_version": "1"}


def test_the_list_of_processes_does_not_show_the_key(server: TritonServer) -> None:
    shown = " ".join(psutil.Process(server.pid).cmdline())
    assert (KEY in shown, f"{HEADER}={'*' * len(KEY)}" in shown) == (False, True)


def test_the_key_is_made_once_for_all_that_share_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "weights" / "critic"
    key = control_key(weights)
    assert len(key) == 64
    assert control_key(weights) == key
    (file,) = weights.parent.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for cut in ("", " \n", key[:15]):  # such as a power failure leaves
        file.write_text(cut)
        with pytest.raises(RlhfError, match=r"control.key contains a key of (0|15) characters"):
            control_key(weights)
    monkeypatch.setenv(VARIABLE, "given")
    assert control_key(weights) == "given"
