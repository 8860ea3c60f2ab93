"""The control plane against a real tritonserver with tiny models."""

import contextlib
import functools
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tiny_models import ready_server, stub_of, write_journal_model, write_scoring_model

from rlhf_triton.client import control_plane
from rlhf_triton.client.control_plane import ControlPlane, ControlPlaneError, root_cause
from rlhf_triton.tools.server.ports import with_free_ports

OUTPUTS = ("values", "weights_version")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ready_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def control(server):
    with server.control() as connection:
        yield connection


def test_control_plane_connects_to_a_server_with_a_slow_handshake(server):
    """Half a second passes before the server sees the connection, which the kernel has accepted."""
    host, port = server.section.grpc_url.split(":")

    def pass_on(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def serve():
        with listener.accept()[0] as client:
            time.sleep(0.5)
            with socket.create_connection((host, int(port))) as upstream, ThreadPoolExecutor(1) as other:
                other.submit(pass_on, client, upstream)
                pass_on(upstream, client)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as proxy:
        served = proxy.submit(serve)
        with ControlPlane(f"127.0.0.1:{listener.getsockname()[1]}") as control:
            assert control.is_ready("critic")
        served.result()


def test_a_failed_reload_names_the_cause_and_keeps_the_old_instance(server, control):
    control.load("critic", parameters={"weights_version": "8"}, timeout_s=120)
    for value, message in (
        ("8", r"critic was not reloaded: .*'8'.* already.*a value that differs"),
        ("no number", r"critic could not be loaded: ValueError: invalid literal .*: 'no number' \(model\.py line 9\)"),
    ):
        with pytest.raises(ControlPlaneError, match=message):
            control.load("critic", parameters={"weights_version": value}, timeout_s=120)
    assert control.probe("critic", 120, OUTPUTS)["weights_version"] == 8
    assert control.is_ready("critic")
    for ask in (functools.partial(control.load, timeout_s=120), control.config):
        with pytest.raises(ControlPlaneError, match="'nothing'"):
            ask("nothing")
    free = with_free_ports(server.section.model_copy(update={"grpc_port": 0})).grpc_url
    with ControlPlane(free) as lost:
        assert not lost.is_live()
        with pytest.raises(ControlPlaneError, match=f"critic: the server on {free} cannot be reached"):
            lost.config("critic")


def test_probe_accepts_only_the_models_own_refusal(server, control):
    control.probe("critic_train", 120)
    control.probe("critic_save", 120)
    shutil.rmtree(server.repository / "critic_save")
    write_journal_model(server.repository, "critic_save", refuse=False)
    control.load("critic_save", timeout_s=120)
    with pytest.raises(ControlPlaneError, match="critic_save accepted dummy_var = -1"):
        control.probe("critic_save", 120)
    config = server.repository / "critic_save" / "config.pbtxt"
    config.write_text(config.read_text().replace(" optional: true", ""))
    control.load("critic_save", timeout_s=120)
    with pytest.raises(ControlPlaneError, match="critic_save: expected 2 inputs but got 1"):  # the server's refusal
        control.probe("critic_save", 120)


def test_dead_stub_is_ready_but_fails_the_probe_until_a_reload(server, control):
    stub = stub_of(server, "critic_train")
    stub.kill()
    with pytest.raises(ControlPlaneError, match="critic_train: its process has died"):
        control.probe("critic_train", 120)
    assert control.is_ready("critic_train")
    control.load("critic_train", parameters={"nonce": "1"}, timeout_s=120)
    control.probe("critic_train", 120)


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "load failed for model 'bad': version 1 is at UNAVAILABLE state: Internal: ValueError: 3 labels"
            "\n\nAt:\n  /somewhere/bad/1/model.py(3): initialize\n;\n",
            "ValueError: 3 labels (model.py line 3)",
        ),
        ("Internal: CheckpointError: m: no head\n\nAt:\n  /a/loading.py(322): load\n", "m: no head"),
        (
            "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: SyntaxError: invalid "
            "syntax (model.py, line 1);\n",
            "SyntaxError: invalid syntax (model.py, line 1)",
        ),
        (
            "[request id: <id_unknown>] expected 2 inputs but got 1 inputs for model 'a'.",
            "expected 2 inputs but got 1 inputs for model 'a'.",
        ),
        ("tokens[0]: -1 is outside the vocabulary", "tokens[0]: -1 is outside the vocabulary"),
    ],
)
def test_root_cause_extracts_the_exception_from_tritons_message(message, cause):
    assert root_cause(message) == cause


def test_probe_fails_on_an_empty_output(control, monkeypatch):
    """NumPy 2 makes every output empty; it cannot be installed beside the other packages, so it is simulated."""
    empty = type("Answer", (), {"as_numpy": lambda self, name: np.zeros((0,), np.float32)})()
    monkeypatch.setattr(control, "_call", lambda *_, **__: empty)
    with pytest.raises(ControlPlaneError, match="critic returned empty values; the usual cause is NumPy 2"):
        control.probe("critic", 120, ("values",))


def test_control_calls_have_deadlines_and_a_hanging_load_blocks_no_other(server, control, monkeypatch):
    """Release 2.51 never ends the load of a version folder without model.py, and queues later loads of that model."""
    monkeypatch.setattr(control_plane, "CALL_TIMEOUT_S", 5.0)
    write_scoring_model(server.repository, "slow", on_request="time.sleep(2)")
    control.load("slow", timeout_s=120)
    with pytest.raises(ControlPlaneError, match=r"slow: no answer within 0\.1 s"):
        control.probe("slow", 0.1, OUTPUTS)
    shutil.rmtree(server.repository / "slow")
    write_scoring_model(server.repository, "hanging")
    control.load("hanging", timeout_s=120)
    (server.repository / "hanging" / "1" / "model.py").unlink()
    for nonce in "12":
        with pytest.raises(ControlPlaneError, match=r"hanging could not be loaded: no answer within 1 s"):
            control.load("hanging", parameters={"nonce": nonce}, timeout_s=1)
    assert control.probe("hanging", 120, OUTPUTS)["values"].size  # the old process serves on
    for ask in (control.is_ready, control.config):
        with contextlib.suppress(ControlPlaneError):  # an answer or an error, but not a hang
            ask("hanging")
    assert control.probe("critic", 120, OUTPUTS)["values"].size
