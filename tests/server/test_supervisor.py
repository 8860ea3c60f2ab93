"""The supervisor on the real server: killed models and killed servers come back, without a command."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import (
    regions,
    server_processes,
    stub_of,
    tiny_server,
    write_repository,
    write_scoring_model,
)

from tools.server import health as server_health
from tools.server import supervisor as supervisor_module
from tools.server.log import LOG_LIMIT_BYTES
from tools.server.supervisor import Supervisor
from tools.server.triton_home import ServerStartError
from tools.server.tritonserver import TritonServer
from trainer.control_plane import ControlPlane, ControlPlaneError, ModelFailed


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


@contextlib.contextmanager
def supervised(folder: Path, log: Callable[[str], None] = print) -> Iterator[Supervisor]:
    """Supervise a server on `folder/repository`, of which nothing must be left at the end."""
    supervisor = Supervisor(starter(folder), log=log)
    try:
        yield supervisor
    finally:
        supervisor.stop()
    assert (server_processes(os.getpid()), regions(os.getpid())) == ([], [])


@pytest.mark.slow
def test_the_servers_log_stays_within_its_bound(tmp_path: Path) -> None:
    write_scoring_model(tmp_path / "repository", "critic")
    with supervised(tmp_path) as supervisor:
        log = supervisor.server.log_path
        os.truncate(log, LOG_LIMIT_BYTES + 1)
        supervisor.look()
        assert log.stat().st_size < 1 << 20
        assert log.with_suffix(".previous.log").stat().st_size == LOG_LIMIT_BYTES
        with supervisor.server.control() as control:
            control.load("critic", parameters={"again": "1"}, timeout_s=60.0)
        until(lambda: b"loading: critic:1" in log.read_bytes())
        assert b"\0" not in log.read_bytes()


def test_a_killed_model_is_replaced_while_the_others_answer(tmp_path: Path) -> None:
    write_repository(tmp_path / "repository")
    lines: list[str] = []
    with supervised(tmp_path, lines.append) as supervisor:
        server = supervisor.server
        before = {name: stub_of(server, name).pid for name in server.models()}
        os.kill(before["critic"], signal.SIGKILL)
        with ControlPlane(server.section.grpc_url) as control:
            while not any("serves again" in line for line in lines):
                control.probe_scoring("reward_model", ("rewards",), 5.0)
            control.probe_scoring("critic", ("values",), 60.0)
            control.probe_rejection("critic_train", 5.0)
        assert "the process of critic has died: reloading the model" in lines
        after = {name: stub_of(server, name).pid for name in server.models()}
        assert [name for name in before if before[name] != after[name]] == ["critic"]
        assert supervisor.server is server


def test_a_killed_server_is_started_again_on_its_ports(tmp_path: Path) -> None:
    write_repository(tmp_path / "repository")
    lines: list[str] = []
    with supervised(tmp_path, lines.append) as supervisor:
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


class Scripted:
    """A server that runs until the test marks it as dead."""

    def __init__(self) -> None:
        self.dead = self.killed = self.stopped = False

    def models(self) -> list[str]:
        return []

    def raise_if_dead(self) -> None:
        if self.dead:
            raise ServerStartError("tritonserver was killed by SIGKILL; its log is x\nthe log ends with:\nno more")

    def bound_log(self) -> None:
        pass

    def kill(self) -> None:
        self.killed = True

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The supervisor's clock; nothing is watched."""
    now = [1000.0]
    health = SimpleNamespace(start=lambda: None, stop=lambda: None, trouble=None)
    monkeypatch.setattr(supervisor_module, "ServerHealth", lambda server, log: health)
    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_server_that_dies_again_and_again_is_never_given_up(now: list[float]) -> None:
    """The pauses grow to a minute, and are forgotten once a server has lived a while."""
    supervisor = Supervisor(Scripted, log=lambda line: None)  # type: ignore[arg-type]
    pauses = []
    for _ in range(12):
        server = supervisor.server
        server.dead = True  # type: ignore[attr-defined]
        down = now[0]
        while supervisor.server is server:
            supervisor.look()
            now[0] += 0.25
        pauses.append(now[0] - down - 0.25)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60]
    now[0] += 11
    supervisor.server.dead = True  # type: ignore[attr-defined]
    dead = supervisor.server
    supervisor.look()
    assert supervisor.server is not dead


def test_a_start_that_fails_is_tried_again(now: list[float]) -> None:
    lines: list[str] = []
    starts = iter([Scripted(), ServerStartError("no memory"), ServerStartError("no memory"), Scripted()])

    def start() -> Scripted:
        made = next(starts)
        if isinstance(made, ServerStartError):
            raise made
        return made

    supervisor = Supervisor(start, log=lines.append)  # type: ignore[arg-type]
    first = supervisor.server
    first.dead = True  # type: ignore[attr-defined]
    for _ in range(100):
        supervisor.look()
        now[0] += 0.25
    assert supervisor.server is not first
    assert (first.killed, first.stopped, supervisor.failed_starts) == (True, True, 2)  # type: ignore[attr-defined]
    assert [line.splitlines()[-1] for line in lines[1:]] == [
        "trying again in 1 s",
        "trying again in 2 s",
        "serving again after 3.0 s",
    ]
    supervisor.stop()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs is noticed within seconds."""
    for name, value in {
        "PROBE_EVERY_S": 0.2,
        "IDLE_PROBE_S": 0.2,
        "PROBE_TIMEOUT_S": 1.0,
        "SERVER_SILENT_S": 3.0,
        "SILENT_S": 3.0,
        "STOPPED_S": 1.0,
    }.items():
        monkeypatch.setattr(server_health, name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_model_that_hangs_again_takes_a_new_server(tmp_path: Path) -> None:
    """It is alive, and the server calls itself ready. The first time, the model is reloaded."""
    block = tmp_path / "block"
    hang = f"while os.path.exists({str(block)!r}): time.sleep(0.1)"
    write_scoring_model(tmp_path / "repository", "critic", on_request=hang)
    with supervised(tmp_path) as supervisor:
        first = supervisor.server
        block.touch()
        until(lambda: "although it has just been reloaded" in str(supervisor._health.trouble))
        block.unlink()
        until(lambda: supervisor.look() or supervisor.server is not first)
        with supervisor.server.control() as control:
            control.probe_scoring("critic", ("values",), 60.0)


@pytest.mark.usefixtures("impatient")
def test_a_server_that_hangs_is_started_again(tmp_path: Path) -> None:
    write_scoring_model(tmp_path / "repository", "critic")
    lines: list[str] = []
    with supervised(tmp_path, lines.append) as supervisor:
        first = supervisor.server
        os.kill(first.pid, signal.SIGSTOP)
        until(lambda: supervisor.look() or supervisor.server is not first)
        assert lines[0].startswith("tritonserver has not answered over ")
        assert first.poll() == -signal.SIGKILL
        with supervisor.server.control() as control:
            control.probe_scoring("critic", ("values",), 60.0)


def test_nobody_meets_a_server_without_its_models(tmp_path: Path) -> None:
    write_scoring_model(tmp_path / "repository", "critic", on_load="time.sleep(1.5)")
    with tiny_server(tmp_path) as server, ControlPlane(server.section.grpc_url) as control:
        while not control.is_live():
            time.sleep(0.01)
        assert control.is_ready("critic")
        control.probe_scoring("critic", ("values",), 60.0)


def test_a_dead_model_is_told_from_other_errors(tmp_path: Path) -> None:
    write_scoring_model(tmp_path / "repository", "critic", on_request="raise RuntimeError('no luck')")
    with tiny_server(tmp_path) as server, ControlPlane(server.section.grpc_url) as control:
        until(control.is_live)
        with pytest.raises(ControlPlaneError, match="no luck") as caught:
            control.probe_scoring("critic", ("values",), 60.0)
        assert type(caught.value) is ModelFailed
