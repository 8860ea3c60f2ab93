"""The health checks on a real process, with a scripted server and a clock that only the test moves."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from python_backend.config import ServerSection
from tools.server import health as server_health
from tools.server.health import (
    COMPUTING_SILENT_S,
    FAILED_PROBES,
    IDLE_PROBE_S,
    MISSED_PROBES,
    SERVER_SILENT_S,
    SILENT_S,
    STOPPED_S,
    ServerHealth,
)
from trainer.control_plane import ControlPlaneError, ModelFailed, ModelProcessDied

Script = Iterator[float]


class Rig:
    """A server with one model, critic, and its control plane. `script` yields the seconds until the next check."""

    section = ServerSection()

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.loads: list[float] = []
        self.failures = 0
        self.frozen = self.lost = False
        self.grpc = True
        self.probe_s = 0.0
        self.start_process()
        self.beside: list[psutil.Process] = []
        monkeypatch.setattr(server_health, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(server_health, "_switches", lambda processes: [str(0 if self.held() else self.now)])
        monkeypatch.setattr(server_health, "get_page", lambda url, path: "OK")

    def start_process(self) -> None:
        self.child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        self.process = psutil.Process(self.child.pid)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def held(self) -> bool:
        return self.frozen or self.process.status() == psutil.STATUS_STOPPED

    def end_process(self) -> None:
        self.child.kill()
        self.child.communicate()

    def run(self, script: Script) -> str | None:
        """Run the checks; return their trouble."""

        def wait(seconds: float) -> bool:
            pause = next(script, None)
            self.now += pause or 0.0
            return pause is None

        health = ServerHealth(self, print)  # type: ignore[arg-type]
        health._stopping = SimpleNamespace(wait=wait, is_set=lambda: False)  # type: ignore[assignment]
        health._watch()
        return health.trouble

    def models(self) -> list[str]:
        return ["critic"]

    def control(self) -> Rig:
        return self

    def close(self) -> None:
        pass

    def processes(self) -> dict[str, list[psutil.Process]]:
        return {"critic": [self.process, *self.beside] if self.child.poll() is None else []}

    def poll(self) -> None:
        pass

    def answers_inference(self, timeout_s: float) -> bool:
        return self.grpc

    def num_instances(self, model: str) -> int:
        return 1

    def statistics(self, model: str) -> Any:
        return SimpleNamespace(success_count=0, failure_count=self.failures)

    def probe_scoring(self, model: str, outputs: tuple[str, ...], timeout_s: float) -> None:
        self.now += self.probe_s
        self.request()
        if self.lost or self.child.poll() is not None:
            raise ModelProcessDied(model)

    def request(self) -> None:
        """As a process that is held for a second does: fail for good."""
        if self.held():
            self.failures += 1
            self.lost = True

    def load(self, model: str, **_: object) -> None:
        self.loads.append(self.now)
        self.end_process()
        self.frozen = self.lost = False
        self.start_process()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(monkeypatch)
    yield rig
    rig.end_process()


def suspend(process: psutil.Process) -> None:
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:  # the signal is on its way
        pass


def stop(rig: Rig) -> None:
    suspend(rig.process)


def freeze(rig: Rig) -> None:
    """As the cgroup freezer and a busy machine do: the state is not that of a stopped process."""
    rig.frozen = True


def resume(rig: Rig) -> None:
    rig.process.resume()
    while rig.process.status() == psutil.STATUS_STOPPED:
        pass
    rig.frozen = False


@pytest.mark.parametrize("hold", [stop, freeze])
def test_no_freeze_of_up_to_5_s_replaces_a_process_and_a_hang_or_a_crash_does(rig: Rig, hold: Callable[[Rig], None]):
    def script() -> Script:
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
        assert rig.loads[1:] == [rig.now], "a process that is gone is replaced at once"
        yield from (1.0, IDLE_PROBE_S)
        hold(rig)
        rig.request()
        yield 1.0
        assert rig.loads[2:] == [rig.now], "a process that lost a request is replaced before it runs again"

    assert rig.run(script()) is None


@pytest.mark.parametrize(
    ("metrics", "longest_s"),
    [([server_health.FORWARDS, server_health.CARD], SILENT_S), ([server_health.FORWARDS], COMPUTING_SILENT_S)],
)
def test_a_process_that_waits_for_its_card_does_not_count_as_computing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, metrics: list[str], longest_s: float
):
    """It uses the CPU all the time, and answers no probe. On a card, only forward passes are progress."""
    done = 0

    def hang(*_: object) -> None:
        raise ControlPlaneError("no answer")

    page = lambda *_: "\n".join(f'{name}{{model="critic"}} {done}' for name in metrics)  # noqa: E731
    monkeypatch.setattr(server_health, "get_page", page)
    monkeypatch.setattr(server_health, "_cpu_s", lambda _: rig.now)
    monkeypatch.setattr(rig, "probe_scoring", hang)

    def script() -> Script:
        nonlocal done
        for _ in range(100):
            done += 1
            yield COMPUTING_SILENT_S / 10
        assert rig.loads == [], "it computes"
        begin = rig.now
        while not rig.loads:
            yield 1.0
        assert longest_s < rig.loads[0] - begin < longest_s + IDLE_PROBE_S

    assert rig.run(script()) is None


def test_a_model_that_answers_with_errors_only_is_replaced(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """As one whose card's context is broken: errors come at once, and raise Triton's own counters of requests."""
    requests = forwards = 0  # answered with an error; passes for others

    def fail(*_: object) -> None:
        nonlocal requests
        requests += 1
        raise ModelFailed("CUDA error: an illegal memory access was encountered")

    page = lambda *_: f'{server_health.FORWARDS}{{model="critic"}} {forwards}\nnv_x{{model="critic"}} {requests}'  # noqa: E731
    monkeypatch.setattr(server_health, "get_page", page)
    monkeypatch.setattr(rig, "probe_scoring", fail)
    monkeypatch.setattr(
        rig, "statistics", lambda _: SimpleNamespace(success_count=requests + forwards, failure_count=requests)
    )

    def script() -> Script:
        nonlocal forwards
        while forwards < 8:
            forwards += 1
            yield IDLE_PROBE_S
        assert (requests, rig.loads) == (0, []), "it scores rows for others"
        for _ in range(FAILED_PROBES):  # the first one only notes the number of passes
            yield IDLE_PROBE_S
        assert rig.loads == []
        yield IDLE_PROBE_S
        assert (requests, len(rig.loads)) == (FAILED_PROBES + 1, 1)

    assert rig.run(script()) is None


def test_one_missed_probe_after_a_long_round_is_no_hang_of_the_server(rig: Rig):
    def script() -> Script:
        yield 1.0
        rig.probe_s = 2 * SERVER_SILENT_S
        yield IDLE_PROBE_S
        for rig.grpc in (False, True, False, False):
            yield SERVER_SILENT_S
        yield 1.0

    assert rig.run(script()) == "tritonserver has not answered over gRPC for 21 s"


def test_a_stopped_process_beside_one_that_answers_is_killed(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """During a reload: the process that is loading would keep the reload waiting, the one that ends its requests."""
    page = lambda *_: f'{server_health.FORWARDS}{{model="critic"}} {rig.now}'  # noqa: E731
    monkeypatch.setattr(server_health, "get_page", page)
    monkeypatch.setattr(rig, "statistics", lambda _: SimpleNamespace(success_count=rig.now, failure_count=0))

    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as second:
        process = psutil.Process(second.pid)
        rig.beside = [process]

        def script() -> Script:
            for seconds in (1.0, STOPPED_S - 1.0):
                suspend(process)
                yield from (1.0, seconds)
                process.resume()
                while process.status() == psutil.STATUS_STOPPED:
                    pass
                yield 1.0
            assert second.poll() is None
            suspend(process)
            yield from (1.0, STOPPED_S + 1.0)

        try:
            assert rig.run(script()) is None
            assert second.wait(20) == -signal.SIGKILL
        finally:
            second.kill()
    assert (rig.loads, rig.child.poll()) == ([], None)


def test_checks_stop_during_a_reload(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    loading, closed = threading.Event(), threading.Event()

    def load(model: str, **_: object) -> None:
        loading.set()
        assert closed.wait(20.0)
        raise ControlPlaneError("the channel is closed")

    monkeypatch.setattr(server_health, "PROBE_EVERY_S", 0.0)
    monkeypatch.setattr(rig, "load", load)
    monkeypatch.setattr(rig, "close", closed.set)
    rig.end_process()
    health = ServerHealth(rig, print)  # type: ignore[arg-type]
    health.start()
    assert loading.wait(20.0)
    health.stop()
    assert closed.is_set()
    assert not health._thread.is_alive()


def test_a_signal_before_the_checks_run_does_not_keep_them_from_stopping(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    health = ServerHealth(rig, print)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            health.start()
    health.stop()
    assert not health._thread.is_alive()
