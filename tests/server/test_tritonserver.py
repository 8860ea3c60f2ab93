"""Starting, filling and stopping the real tritonserver, and its shared memory."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from settled import settled_statistics
from tiny_models import (
    regions,
    server_processes,
    tiny_server,
    write_repository,
    write_scoring_model,
)
from waiting import wait_for

from rlhf_triton.client.control_plane import ControlPlane, ControlPlaneError, Failure
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.sections import ServerSection
from rlhf_triton.tools.render_configs import render_repository
from rlhf_triton.tools.server import shared_memory
from rlhf_triton.tools.server.ports import PORT_KEYS, check_ports, free_port, with_free_ports
from rlhf_triton.tools.server.server_log import stub_failure, tail
from rlhf_triton.tools.server.shared_memory import SHARED_MEMORY, remove_abandoned
from rlhf_triton.tools.server.triton_home import ServerStartError, find_tritonserver, lay_out_backends
from rlhf_triton.tools.server.tritonserver import server_command


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert (server_processes(os.getpid()), regions(os.getpid())) == ([], [])


def test_tritonserver_starts_loads_answers_probes_and_stops(tmp_path):
    write_repository(tmp_path / "repository")
    lines = []
    state = tmp_path / "server.json"
    killed = f"rlhf-{os.getpid()}-00000000-"  # prefix of a server that has left its shared memory behind
    for name in (f"{killed}region", f".{killed}owner"):
        (SHARED_MEMORY / name).touch()
    with tiny_server(tmp_path, lines.append) as server:
        assert not list(SHARED_MEMORY.glob(f"*{killed}*"))
        server.wait_ready(state)
        assert server.poll() is None
        assert json.loads(state.read_text()) == {
            "pid": server.pid,
            "http": server.section.http_url,
            "grpc": server.section.grpc_url,
            "metrics": server.section.metrics_url,
        }
        # The server, and a stub for each model but the ensemble, which loads no model a second time.
        assert len(server_processes(os.getpid())) == 5
        assert len(regions(os.getpid())) == 4
        assert server.log_path.read_bytes().count(b'"loading: ') == 5
        for model in ("reward_model", "critic", "critic_infer"):
            assert settled_statistics(server.section.http_url, model).success_count >= 1
        for port in (server.section.http_port, server.section.grpc_port, server.section.metrics_port):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                assert connection.getpeername()[0] == "127.0.0.1"
    assert not state.exists()
    answered = [line.removesuffix(" answers") for line in lines if line.endswith(" answers")]
    assert answered == ["critic", "critic_infer", "critic_save", "critic_train", "reward_model"]
    server.stop()  # once more does nothing


def test_users_files_replace_no_module_that_served_models_import(tmp_path, monkeypatch):
    """A stub has the working directory first in its module path, where a user's function is found, and its files."""
    for name in ("token", "types", "tokenizers", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError(__file__)")
    (tmp_path / "mine.py").write_text("def score(sample): return float(open('score.txt').read())")
    (tmp_path / "score.txt").write_text("7")
    monkeypatch.chdir(tmp_path)
    rewards = {"mine": {"function": "mine:score", "workers": 1}}
    render_repository(RunConfig.model_validate({"rewards": rewards}), tmp_path / "repository")
    text = {"name": "sentences", "shape": [1, 1], "datatype": "BYTES", "data": ["It is 7."]}
    with tiny_server(tmp_path) as server:
        server.wait_ready()
        url = f"http://{server.section.http_url}/v2/models/reward_model/infer"
        answer = json.load(urllib.request.urlopen(url, json.dumps({"inputs": [text]}).encode(), timeout=100))
    assert {tensor["name"]: tensor["data"] for tensor in answer["outputs"]}["rewards"] == [7.0]


def test_taken_or_equal_ports_are_refused_before_the_start(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = tiny_server(tmp_path, metrics_port=port)
        message = (
            rf"port {port} \(server\.metrics_port\) on 127\.0\.0\.1 cannot be used: Address already in use; stop the"
        )
        with pytest.raises(ServerStartError, match=message):
            server.start()
    assert not server.log_path.exists()
    section = server.section
    with pytest.raises(ServerStartError, match=r"server\.http_port and server\.metrics_port are both"):
        check_ports(section.model_copy(update={"metrics_port": section.http_port}))


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("192.0.2.1", "server.host: '192.0.2.1' is not an address of this machine (Cannot assign requested address)"),
        ("no.such.host.invalid", "server.host: 'no.such.host.invalid' has no IPv4 address, which tritonserver needs"),
        ("::1", "server.host: '::1' has no IPv4 address"),
        ("a" * 70, "has no IPv4 address"),
    ],
)
@pytest.mark.parametrize("port", [0, 45678])
def test_a_host_that_cannot_be_bound_is_refused_before_the_start(host, told, port):
    section = ServerSection(host=host, http_port=port, grpc_port=45679, metrics_port=45680)
    with pytest.raises(ServerStartError, match=re.escape(told)):
        check_ports(with_free_ports(section))


def test_host_names_are_resolved_to_addresses_for_the_server(tmp_path):
    """tritonserver binds 255.255.255.255 for a name."""
    for host, address in {"localhost": "127.0.0.1", "127.1": "127.0.0.1", "0.0.0.0": "0.0.0.0"}.items():
        section = with_free_ports(ServerSection(host=host, http_port=0, grpc_port=0, metrics_port=0))
        check_ports(section)
        command = server_command(find_tritonserver(), tmp_path, tmp_path, section, "key", None)
        found = [argument for argument in command if "-address=" in argument]
        assert found == [f"--{name}-address={address}" for name in ("http", "grpc", "metrics")]


FORK = multiprocessing.get_context("fork")


def claim(section, connection):
    """Claim ports until the process ends; send the result."""
    try:
        check_ports(section)
        connection.send("claimed")
    except ServerStartError as error:
        connection.send(str(error))
    signal.pause()


@contextlib.contextmanager
def claiming(*ports, host="127.0.0.1"):
    """Yield the result of another process that claims the ports until the block, or this process, ends."""
    section = ServerSection(host=host, **dict(zip(PORT_KEYS, ports, strict=True)))
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=claim, args=[section, theirs], daemon=True)
    process.start()
    yield ours.recv()
    process.kill()
    process.join()


def test_ports_stay_claimed_while_the_server_loads():
    first, second = ([free_port() for _ in range(3)] for _ in range(2))
    with claiming(*first) as claimed:
        assert claimed == "claimed"
        for key, ports in {
            "grpc_port": [second[0], first[1], second[2]],
            "metrics_port": [*second[:2], first[0]],
        }.items():
            with claiming(*ports) as told:
                assert f"(server.{key}) on 127.0.0.1 cannot be used: Address already in use" in told
        with claiming(*first, host="127.0.0.2") as told:  # which the kernel permits
            assert told == "claimed"
        with claiming(*first, host="0.0.0.0") as told:
            assert "on 0.0.0.0 cannot be used: Address already in use" in told
    with claiming(*first) as claimed:
        assert claimed == "claimed"


def test_free_port_is_reserved_until_the_server_binds_it():
    """Until the server starts, seconds later, no connection and no other process may be given its port."""
    port = free_port()
    with socket.socket() as stranger, pytest.raises(OSError, match="Address already in use"):
        stranger.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)) as server:  # it sets SO_REUSEADDR
        socket.create_connection(server.getsockname()).close()


def write_nonsense(repository):
    write_scoring_model(repository, "critic")
    (repository / "critic" / "config.pbtxt").write_text("nonsense")


def write_loading(statement):
    return lambda repository: write_scoring_model(repository, "critic", on_load=statement)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (Path.mkdir, "contains no model; render it with tools/render_configs.py"),
        (write_nonsense, r"critic could not be loaded: .* has no field named"),
        (
            write_loading("raise ValueError('3 labels, must be 1')"),
            r"^critic could not be loaded: ValueError: 3 labels, must be 1 \(model.py line 10\); the whole log is in /",
        ),
        (write_loading("os.kill(os.getppid(), 9)"), "was killed by SIGKILL"),
    ],
)
def test_failed_start_raises_with_the_cause(tmp_path, write, reason):
    write(tmp_path / "repository")
    with tiny_server(tmp_path) as server, pytest.raises(ServerStartError, match=reason):
        server.wait_ready()


@pytest.mark.slow
def test_stub_of_another_python_fails_instead_of_hanging(tmp_path):
    write_scoring_model(tmp_path / "repository", "critic")
    home = find_tritonserver(None)
    other = dataclasses.replace(home, stub=home.stub.parents[1] / "3.8" / home.stub.name)
    server = tiny_server(tmp_path)
    lay_out_backends(other, tmp_path / "backends")
    with server, pytest.raises(ServerStartError, match=r"stub cannot start: .*libpython3\.8\.so"):
        server.wait_ready()


@pytest.mark.slow
def test_start_timeout_raises_and_keeps_the_previous_log(tmp_path):
    write_scoring_model(tmp_path / "repository", "critic", on_load="time.sleep(600)")
    for _ in range(2):
        with tiny_server(tmp_path, start_timeout_s=2) as server:
            while b"loading: critic:1" not in server.log_path.read_bytes():
                time.sleep(0.02)
            with pytest.raises(ServerStartError, match="not ready within 2 s: the server's log"):
                server.wait_ready()
    assert b"loading: critic:1" in server.log_path.with_suffix(".previous.log").read_bytes()


def test_wait_ready_fails_if_a_loaded_model_answers_errors(tmp_path):
    """Its log may hold bytes that are no text."""
    lines = []
    noise = r"os.write(1, b'caf\xe9 \xff\x00\n'); time.sleep(1.5)"
    write_scoring_model(tmp_path / "repository", "critic", on_load=noise, on_request="raise RuntimeError('no luck')")
    with tiny_server(tmp_path, lines.append) as server, ControlPlane(server.section.grpc_url) as control:
        wait_for(control.is_live)
        assert control.is_ready("critic")
        with pytest.raises(ControlPlaneError, match="no luck") as caught:
            control.probe("critic", 120.0, ("values",))
        assert caught.value.kind is Failure.FAILED
        with pytest.raises(ServerStartError, match="no luck"):
            server.wait_ready()
        wait_for(lambda: any("caf\\xe9 \\xff" in line for line in lines))
        assert "caf\\xe9 \\xff" in tail(server.log_path, 40)


def test_stub_failure_finds_a_fatal_python_error_in_the_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("Fatal Python error: init_fs_encoding: failed to get the Python codec\n")
    assert "Fatal Python error: init_fs_encoding" in str(stub_failure(log))
    log.write_text("all is well\n")
    assert stub_failure(log) is None


# ---- shared memory ----


# Holds the regions of a server as its owner does; the second process inherits the lock, as tritonserver does.
OWNER = """
import os, subprocess, sys
from pathlib import Path
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.sections import ServerSection
from rlhf_triton.tools.render_configs import render_repository
from rlhf_triton.tools.server import shared_memory
shared_memory.SHARED_MEMORY = Path(sys.argv[1])
regions = shared_memory.Regions()
lock = regions.lock()
(shared_memory.SHARED_MEMORY / (regions.prefix + "region")).write_text("memory")
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock])
print(child.pid, flush=True)
input()
"""


def test_shared_memory_regions_stay_while_any_owner_process_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child = psutil.Process(int(owner.stdout.readline()))
    assert remove_abandoned() == []
    owner.kill()
    owner.communicate()
    (tmp_path / "rlhf-1-aaaaaaaa-region").write_text("no owner file: not provably ours")
    (tmp_path / "rlhf-2-bbbbbbbb-region").symlink_to(tmp_path / "somewhere")
    with contextlib.suppress(psutil.NoSuchProcess):  # its input has ended with its parent
        child.kill()
    psutil.wait_procs([child], timeout=120)
    (prefix,) = remove_abandoned()
    assert prefix.startswith(f"rlhf-{owner.pid}-")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rlhf-1-aaaaaaaa-region", "rlhf-2-bbbbbbbb-region"]
