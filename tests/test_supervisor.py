"""The supervisor on the real server: killed models and killed servers come back, without a word from anybody."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import regions, server_processes, stub_of, tiny_server, write_repository, write_scoring_model

from tools.supervisor import Supervisor
from tools.triton_home import ServerStartError
from tools.tritonserver import TritonServer
from trainer.control_plane import ControlPlane, ControlPlaneError


def starter(folder: Path, **settings: int) -> Callable[[], TritonServer]:
    """What starts a server on `folder/repository`, always on the same ports."""
    section = tiny_server(folder).section
    ports = {name: getattr(section, name) for name in ("http_port", "grpc_port", "metrics_port")}

    def start() -> TritonServer:
        server = tiny_server(folder, **ports, **settings)
        server.start()
        server.wait_ready()
        return server

    return start


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_the_servers_log_stays_within_its_bound(tmp_path: Path) -> None:
    write_repository(tmp_path / "repository")
    supervisor = Supervisor(starter(tmp_path, log_limit_mb=1), log=print)
    try:
        log = supervisor.server.log_path
        with log.open("ab") as file:
            file.write(b"x" * (1 << 20))
        supervisor.look()
        assert log.stat().st_size < 1 << 20
        assert log.with_suffix(".previous.log").stat().st_size == 1 << 20
        with ControlPlane(supervisor.server.section.grpc_url) as control:
            control.load("critic", parameters={"again": "1"}, timeout_s=60.0)
        until(lambda: b"loading: critic:1" in log.read_bytes())
        assert b"\0" not in log.read_bytes()
    finally:
        supervisor.stop()


@pytest.mark.parametrize("model", ["critic", "critic_train"])
def test_a_killed_model_is_replaced_while_the_others_answer(tmp_path: Path, model: str) -> None:
    write_repository(tmp_path / "repository")
    lines: list[str] = []
    supervisor = Supervisor(starter(tmp_path), log=lines.append)
    try:
        server = supervisor.server
        others = {name: stub_of(server, name).pid for name in server.models() if name != model}
        killed = stub_of(server, model)
        killed.send_signal(signal.SIGKILL)
        with ControlPlane(server.section.grpc_url) as control:
            while not any("serves again" in line for line in lines):
                control.probe_scoring("reward_model", ("rewards",), 5.0)
            assert f"the process of {model} has died: loading the model anew" in lines
            assert stub_of(server, model).pid != killed.pid
            control.probe_scoring("critic", ("values",), 5.0)
            control.probe_rejection("critic_train", 5.0)
        assert {name: stub_of(server, name).pid for name in others} == others
        assert supervisor.server is server
    finally:
        supervisor.stop()


def test_a_signal_before_the_watcher_runs_does_not_keep_it_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes as the watcher of a server that was started again is to be started."""

    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    write_repository(tmp_path / "repository")
    supervisor = Supervisor(starter(tmp_path), log=lambda line: None)
    os.kill(supervisor.server.pid, signal.SIGKILL)
    until(lambda: supervisor.server.poll() is not None)
    again = starter(tmp_path)
    try:
        server = again()
        monkeypatch.setattr(supervisor, "_start", lambda: server)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                supervisor.look()
    finally:
        supervisor.stop()
    assert server.poll() is not None


def test_a_killed_server_is_started_again_on_its_ports(tmp_path: Path) -> None:
    write_repository(tmp_path / "repository")
    lines: list[str] = []
    supervisor = Supervisor(starter(tmp_path), log=lines.append)
    try:
        supervisor.look()
        assert lines == []
        first = supervisor.server
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: first.poll() is not None)
        supervisor.look()
        second = supervisor.server
        assert (second.pid != first.pid, second.section) == (True, first.section)
        assert lines[0].startswith("tritonserver was killed by SIGKILL")
        assert lines[1].startswith("serving again after")
        with ControlPlane(second.section.grpc_url) as control:
            control.probe_scoring("critic_infer", ("values", "rewards"), 5.0)
        stub_of(second, "reward_model").send_signal(signal.SIGKILL)  # the new one is watched, too
        until(lambda: any("reward_model serves again" in line for line in lines))
    finally:
        supervisor.stop()
    assert server_processes(os.getpid()) == []
    assert regions(os.getpid()) == []


def test_a_server_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    write_scoring_model(tmp_path / "repository", "critic")
    supervisor = Supervisor(starter(tmp_path), log=lambda line: None, max_restarts=1)
    try:
        for may_restart in (True, False):
            server = supervisor.server
            os.kill(server.pid, signal.SIGKILL)
            until(lambda server=server: server.poll() is not None)  # type: ignore[misc]
            if may_restart:
                supervisor.look()
        with pytest.raises(ServerStartError, match=r"SIGKILL(.|\n)*It was started again 1 times before that"):
            supervisor.look()
    finally:
        supervisor.stop()


def test_nobody_meets_a_server_without_its_models(tmp_path: Path) -> None:
    write_scoring_model(tmp_path / "repository", "critic", on_load="time.sleep(1.5)")
    with tiny_server(tmp_path) as server, ControlPlane(server.section.grpc_url) as control:
        while not control.is_live():
            time.sleep(0.01)
        assert control.is_ready("critic")
        control.probe_scoring("critic", ("values",), 5.0)


def test_a_dead_model_is_told_from_other_errors(tmp_path: Path) -> None:
    write_scoring_model(tmp_path / "repository", "critic", on_request="raise RuntimeError('no luck')")
    with tiny_server(tmp_path) as server, ControlPlane(server.section.grpc_url) as control:
        until(control.is_live)
        with pytest.raises(ControlPlaneError, match="no luck") as caught:
            control.probe_scoring("critic", ("values",), 5.0)
        assert type(caught.value) is ControlPlaneError
