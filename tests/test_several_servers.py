"""Two tritonservers behind one sidecar: every reload reaches both, one that was down catches up before it is ready."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from bare_client import ask
from live_system import (
    Checkpoints,
    LiveRun,
    System,
    identity,
    make_run,
    random_rows,
    scoring_inputs,
    start_system,
    stop_process,
    training_inputs,
    wait_for,
)

from python_backend.config import load_config
from python_backend.contract import CRITIC, CRITIC_SAVE, CRITIC_TRAIN
from tools.child import Child
from tools.weights import main as weights
from trainer.control_plane import ControlPlaneError
from trainer.servers import Servers

SAVE = {"dummy_var": np.zeros(1, np.int64)}
ROWS = random_rows([3, 17], seed=0)


class Pair:
    """The first server with its sidecar, and a second server on the same store."""

    def __init__(self, folder: Path, checkpoints: Checkpoints) -> None:
        self.other = make_run(folder / "second", checkpoints)
        run = make_run(folder / "first", checkpoints)
        servers = [run.config.server.grpc_url, self.other.config.server.grpc_url]
        run.path.write_text(run.path.read_text().replace("trainer:\n", f"trainer:\n  servers: {servers}\n"))
        self.run = LiveRun(run.path, load_config(run.path))
        self.first: System = start_system(self.run)
        self.second: Child | None = None
        # The second machine sees the same volume; its repository is the one that was rendered for the first.
        for name in ("weights", "journal", "model_repository"):
            (self.other.config.run.dir / name).symlink_to(self.run.config.run.dir / name)

    def start_second(self) -> None:
        state = self.other.config.run.dir / "server.json"
        state.unlink(missing_ok=True)
        self.second = self.other.start("server", module="serve_rendered", PYTHONPATH=str(Path(__file__).parent))
        wait_for(state.is_file, self.second)

    def kill_second(self) -> None:
        """All of it at once, as when a machine goes away."""
        assert self.second is not None
        whole = [psutil.Process(self.second.process.pid)]
        whole += whole[0].children(recursive=True)
        for process in whole:
            process.send_signal(signal.SIGKILL)
        self.second.process.wait()
        for process in whole:
            process.wait(10)

    def train(self, step: int) -> int:
        answer = ask(self.run.url, CRITIC_TRAIN, {**training_inputs(seed=step), **identity("test", step)})
        return int(answer["weights_version"][0])

    def served(self, run: LiveRun) -> int:
        answer = ask(run.url, CRITIC, scoring_inputs(ROWS), ["values", "weights_version"])
        return int(answer["weights_version"][0, 0])

    def stop(self) -> None:
        if self.second is not None:
            stop_process(self.second)
        self.first.stop()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"), checkpoints)
    yield made
    made.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_server_serves_what_an_answer_says(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    version = pair.train(1)  # the second server is not there yet: it does not hold up the first
    assert pair.served(pair.run) == version

    pair.start_second()
    assert pair.served(pair.other) == version, "ready means: serves CURRENT"
    version = pair.train(2)
    assert [pair.served(run) for run in (pair.run, pair.other)] == [version, version]
    records = pair.run.store.serving()
    assert len({record.pid for record in records}) == 2
    line = [line for line in pair.run.critic_metrics() if "loss_mean" in line][-1]
    assert line["served_by"] == {record.name: version for record in records}

    ask(pair.run.url, CRITIC_SAVE, SAVE)  # and with it a reload through Triton, on both
    wait_for(lambda: any(line.get("reason") == "save" for line in pair.run.critic_metrics()), pair.first.sidecar)
    line = [line for line in pair.run.critic_metrics() if line.get("reason") == "save"][-1]
    urls = pair.run.config.trainer.servers
    assert line["served_by"] == {url: version for url in urls}
    old = {record.pid for record in records}
    wait_for(lambda: not old & {record.pid for record in pair.run.store.serving()}, pair.first.sidecar)  # they unload
    assert len(pair.run.store.serving()) == 2

    pair.kill_second()
    version = pair.train(3)
    assert pair.served(pair.run) == version, "a dead server holds nobody up"
    outcomes = Servers(urls).versions()
    assert [outcome.version for outcome in outcomes] == [version, None]
    assert "cannot be reached" in str(outcomes[1].error)
    config = ["--config", str(pair.run.path)]
    assert weights(["ready", *config, "--server", urls[1]]) == 1
    assert "not ready" in capsys.readouterr().out

    pair.start_second()
    assert weights(["ready", *config, "--server", urls[1]]) == 0
    assert weights(["list", *config]) == 0
    told = capsys.readouterr().out
    print(told)
    assert f"ready: {urls[1]} serves version {version}" in told
    (current,) = [line for line in told.splitlines() if "CURRENT" in line]
    assert current.split()[0] == str(version)
    assert current.count("(pid ") == 2


def test_a_dns_name_means_all_its_addresses(monkeypatch: pytest.MonkeyPatch):
    def lookup(name: str, port: int, **_: object) -> list[tuple]:
        assert (name, port) == ("critic.svc", 8001)
        hosts = [("10.0.0.2", 0), ("10.0.0.1", 0), ("10.0.0.2", 0), ("fd00::1", 0, 0, 0)]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", host) for host in hosts]

    monkeypatch.setattr("python_backend.addresses.socket.getaddrinfo", lookup)
    servers = Servers(["here:9001", "dns:critic.svc:8001", "here:9001"])
    assert servers.urls() == ["here:9001", "10.0.0.1:8001", "10.0.0.2:8001", "[fd00::1]:8001"]


def test_a_name_that_nobody_knows_is_told(monkeypatch: pytest.MonkeyPatch):
    def lookup(*_: object, **__: object) -> list[tuple]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("python_backend.addresses.socket.getaddrinfo", lookup)
    with pytest.raises(ControlPlaneError, match=r"trainer\.servers: 'dns:critic\.svc:8001' cannot be resolved"):
        Servers(["dns:critic.svc:8001"]).urls()
