"""The server's supervisor: health checks with a scripted server and clock, and real servers that are killed or hang."""

import contextlib
import os
import signal
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from tiny_models import regions, server_processes, stub_of, tiny_server, write_repository

from rlhf_triton.client.control_plane import ControlPlane, ControlPlaneError, Failure
from rlhf_triton.config.sections import ServerSection
from rlhf_triton.tools.server import health as server_health
from rlhf_triton.tools.server import supervisor as supervisor_module
from rlhf_triton.tools.server.health import (
    ANSWERED,
    COMPUTING_SILENT_S,
    FAILED,
    FAILED_PROBES,
    FORWARDS,
    IDLE_PROBE_S,
    MISSED_PROBES,
    SERVER_SILENT_S,
    SILENT_S,
    STOPPED_S,
    ServerHealth,
)
from rlhf_triton.tools.server.supervisor import Supervisor
from rlhf_triton.tools.server.triton_home import ServerStartError


class Rig:
    """A server with one model, critic, and its control plane. Scripts yield the seconds until the next check."""

    section = ServerSection()
    models = staticmethod(lambda: ["critic"])
    num_instances = staticmethod(lambda model: 1)
    poll = close = staticmethod(lambda: None)

    def __init__(self, monkeypatch):
        self.now = 1000.0
        self.loads = []
        self.failures = 0
        self.frozen = self.lost = False
        self.grpc = True
        self.probe_s = 0.0
        self.start_process()
        monkeypatch.setattr(server_health, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(server_health, "_switches", lambda processes: [str(0 if self.held() else self.now)])
        monkeypatch.setattr(server_health, "get_page", lambda url, path: f'{FAILED}{{model="critic"}} {self.failures}')

    def start_process(self):
        self.child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        self.process = psutil.Process(self.child.pid)

    def sleep(self, seconds):
        self.now += seconds

    def held(self):
        return self.frozen or self.process.status() == psutil.STATUS_STOPPED

    def end_process(self):
        self.child.kill()
        self.child.communicate()

    def run(self, script):
        """Run the checks; return why the server must be restarted."""

        def wait(seconds):
            pause = next(script, None)
            self.now += pause or 0.0
            return pause is None

        health = ServerHealth(self, print)
        health._stopping = SimpleNamespace(wait=wait, is_set=lambda: False)
        health._watch()
        return health.restart_reason

    def control(self):
        return self

    def processes(self):
        return {"critic": [self.process] if self.child.poll() is None else []}

    def answers_inference(self, timeout_s):
        return self.grpc

    def probe(self, model, timeout_s):
        self.now += self.probe_s
        self.request()
        if self.lost or self.child.poll() is not None:
            raise ControlPlaneError(model, Failure.DIED)

    def request(self):
        """Fail for good, as a process that hangs for a second does."""
        if self.held():
            self.failures += 1
            self.lost = True

    def load(self, model, **_):
        self.loads.append(self.now)
        self.end_process()
        self.frozen = self.lost = False
        self.start_process()


@pytest.fixture
def rig(monkeypatch):
    rig = Rig(monkeypatch)
    yield rig
    rig.end_process()


def suspend(process):
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:  # the signal is on its way
        pass


def stop(rig):
    suspend(rig.process)


def freeze(rig):
    """Freeze the process as the cgroup freezer or a busy machine does: its state is not that of a stopped process."""
    rig.frozen = True


def resume(rig):
    rig.process.resume()
    while rig.process.status() == psutil.STATUS_STOPPED:
        pass
    rig.frozen = False


@pytest.mark.parametrize("hold", [stop, freeze])
def test_health_check_tolerates_5_s_freezes_but_replaces_hung_and_dead_processes(rig, hold):
    def script():
        for seconds in np.linspace(1, 5, 20):
            yield 7.0
            hold(rig)
            begin = rig.now
            while rig.now < begin + seconds:
                yield 0.5
            resume(rig)
        yield IDLE_PROBE_S
        assert (rig.loads, rig.failures) == ([], 0)
        hold(rig)
        begin = rig.now
        while not rig.loads:
            yield 1.0
        assert STOPPED_S < rig.loads[0] - begin < STOPPED_S + IDLE_PROBE_S + 2 * MISSED_PROBES
        yield from (1.0, 1.0)
        rig.end_process()
        yield 1.0
        assert rig.loads[1:] == [rig.now], "a process that is gone is not replaced at once"
        yield from (1.0, IDLE_PROBE_S)
        hold(rig)
        rig.request()
        yield 1.0
        assert rig.loads[2:] == [rig.now], "a process that lost a request is not replaced before it resumes"

    assert rig.run(script()) is None


@pytest.mark.parametrize(
    ("metrics", "longest_s"),
    [([FORWARDS, server_health.GPU_BYTES], SILENT_S), ([FORWARDS], COMPUTING_SILENT_S)],
)
def test_process_without_forward_progress_on_its_gpu_is_replaced(rig, monkeypatch, metrics, longest_s):
    """It uses CPU time but answers no probe. On a GPU, only forward passes count as progress."""
    done = 0

    def hang(*_):
        raise ControlPlaneError("no answer")

    page = lambda *_: "\n".join(f'{name}{{model="critic"}} {done}' for name in metrics)  # noqa: E731
    monkeypatch.setattr(server_health, "get_page", page)
    monkeypatch.setattr(server_health, "_cpu_s", lambda _: rig.now)
    monkeypatch.setattr(rig, "probe", hang)

    def script():
        nonlocal done
        for _ in range(100):
            done += 1
            yield COMPUTING_SILENT_S / 10
        assert rig.loads == [], "a model that computes was reloaded"
        begin = rig.now
        while not rig.loads:
            yield 1.0
        assert longest_s < rig.loads[0] - begin < longest_s + IDLE_PROBE_S

    assert rig.run(script()) is None


def test_model_that_answers_only_errors_is_reloaded(rig, monkeypatch):
    """A model with a broken GPU context fails at once, which raises Triton's own counters of requests."""
    requests = forwards = 0  # answered with an error; passes for others

    def fail(*_):
        nonlocal requests
        requests += 1
        raise ControlPlaneError("CUDA error: an illegal memory access was encountered", Failure.FAILED)

    def page(*_):
        counts = {FORWARDS: forwards, ANSWERED: requests + forwards, FAILED: requests}
        return "\n".join(f'{name}{{model="critic"}} {count}' for name, count in counts.items())

    monkeypatch.setattr(server_health, "get_page", page)
    monkeypatch.setattr(rig, "probe", fail)

    def script():
        nonlocal forwards
        while forwards < 8:
            forwards += 1
            yield IDLE_PROBE_S
        assert (requests, rig.loads) == (0, []), "a model that scores rows was probed or reloaded"
        for _ in range(FAILED_PROBES):  # the first one only notes the number of passes
            yield IDLE_PROBE_S
        assert rig.loads == []
        yield IDLE_PROBE_S
        assert (requests, len(rig.loads)) == (FAILED_PROBES + 1, 1)

    assert rig.run(script()) is None


def test_one_missed_probe_does_not_restart_the_server(rig):
    def script():
        yield 1.0
        rig.probe_s = 2 * SERVER_SILENT_S
        yield IDLE_PROBE_S
        for rig.grpc in (False, True, False, False):
            yield SERVER_SILENT_S
        yield 1.0

    assert rig.run(script()) == "tritonserver has not answered over gRPC for 21 s"


def test_health_checks_stop_before_their_start_and_during_a_reload(rig, monkeypatch):
    ServerHealth(rig, print).stop()  # a signal arrived before their thread was started
    loading = threading.Event()
    closed = threading.Event()

    def load(model, **_):
        loading.set()
        assert closed.wait(120)
        raise ControlPlaneError("the channel is closed")

    monkeypatch.setattr(server_health, "PROBE_EVERY_S", 0.0)
    monkeypatch.setattr(rig, "load", load)
    monkeypatch.setattr(rig, "close", closed.set)
    rig.end_process()
    health = ServerHealth(rig, print)
    health.start()
    assert loading.wait(120)
    health.stop()
    assert closed.is_set()
    assert not health._thread.is_alive()


def test_model_that_hangs_right_after_its_reload_needs_a_new_server(rig, monkeypatch):
    load = rig.load

    def load_in_vain(model, **more):
        load(model, **more)
        freeze(rig)

    monkeypatch.setattr(rig, "load", load_in_vain)
    freeze(rig)
    assert rig.run(iter([1.0] * 1000)).endswith(", although it has just been reloaded")
    assert len(rig.loads) == 2


# ---- starting again ----


class Scripted:
    """A server that runs until the test marks it as dead."""

    models = list
    log_path = Path("none.log")
    dead = killed = stopped = False

    def raise_if_dead(self):
        if self.dead:
            raise ServerStartError("tritonserver was killed by SIGKILL; its log is x\nthe log ends with:\nno more")

    def kill(self):
        self.killed = True

    def stop(self):
        self.stopped = True


@pytest.fixture
def now(monkeypatch):
    """The supervisor's clock."""
    now = [1000.0]
    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_supervisor_keeps_restarting_with_growing_pauses(now):
    """The pauses grow to a minute, and are forgotten once a server has lived a while."""
    supervisor = Supervisor(Scripted, log=lambda line: None)
    pauses = []
    for _ in range(12):
        server = supervisor.server
        server.dead = True
        down = now[0]
        while supervisor.server is server:
            supervisor.restart_if_down()
            now[0] += 0.25
        pauses.append(now[0] - down - 0.25)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60]
    now[0] += 11
    supervisor.server.dead = True
    dead = supervisor.server
    supervisor.restart_if_down()
    assert supervisor.server is not dead


def test_supervisor_retries_a_failed_start(now):
    lines = []
    unreadable = FileNotFoundError(2, "No such file or directory", "models/reward")
    starts = iter([Scripted(), ServerStartError("no memory"), unreadable, Scripted()])

    def start():
        made = next(starts)
        if isinstance(made, Exception):
            raise made
        return made

    supervisor = Supervisor(start, log=lines.append)
    first = supervisor.server
    first.dead = True
    for _ in range(100):
        supervisor.restart_if_down()
        now[0] += 0.25
    assert supervisor.server is not first
    assert (first.killed, first.stopped, supervisor.failed_starts) == (True, True, 2)
    assert lines[1:] == [
        "error: no memory\ntrying again in 1 s",
        "error: models/reward: No such file or directory\ntrying again in 2 s",
        "serving again after 3.0 s",
    ]
    supervisor.stop()


def test_supervisor_restarts_a_server_that_fails_its_health_checks(now):
    watch = SimpleNamespace(restart_reason=None, start=lambda: None, stop=lambda: None)
    supervisor = Supervisor(Scripted, log=lambda line: None, watch=lambda *_: watch)
    first = supervisor.server
    supervisor.restart_if_down()
    assert supervisor.server is first
    watch.restart_reason = "it hangs"
    supervisor.restart_if_down()
    assert (first.killed, supervisor.server is first) == (True, False)


# ---- real servers ----


@contextlib.contextmanager
def supervised(folder, log=print):
    """Supervise a server on `folder/repository`, always on the same ports; no process of it may be left at the end."""
    section = tiny_server(folder).section
    ports = {name: getattr(section, name) for name in ("http_port", "grpc_port", "metrics_port")}

    def start():
        server = tiny_server(folder, **ports)
        server.start()
        server.wait_ready()
        return server

    supervisor = Supervisor(start, log=log, watch=ServerHealth)
    try:
        yield supervisor
    finally:
        supervisor.stop()
    assert (server_processes(os.getpid()), regions(os.getpid())) == ([], [])


def test_a_killed_model_is_replaced_while_the_others_answer(tmp_path):
    """tests/tools/test_server.py kills a whole server."""
    write_repository(tmp_path / "repository")
    lines = []
    with supervised(tmp_path, lines.append) as supervisor:
        server = supervisor.server
        before = {name: stub_of(server, name).pid for name in server.models()}
        os.kill(before["critic"], signal.SIGKILL)
        with ControlPlane(server.section.grpc_url) as control:
            while not any("serves again" in line for line in lines):
                control.probe("reward_model", 120.0, ("rewards",))
            control.probe("critic", 120.0, ("values",))
            control.probe("critic_train", 120.0)
        assert "the process of critic has died: reloading the model" in lines
        after = {name: stub_of(server, name).pid for name in server.models()}
        assert [name for name in before if before[name] != after[name]] == ["critic"]
        supervisor.restart_if_down()
        assert supervisor.server is server
