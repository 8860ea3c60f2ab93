"""Two tritonservers behind one sidecar: every reload reaches both, one that was down catches up before it is ready."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest
from bare_client import ask
from live_system import (
    Checkpoints,
    LiveRun,
    identity,
    random_rows,
    scoring_inputs,
    training_inputs,
    wait_for,
)
from server_pair import Pair

from python_backend.wire.contract import CRITIC, CRITIC_SAVE, CRITIC_TRAIN
from tools.weights import main as weights
from trainer.control_plane import ControlPlaneError
from trainer.servers import ModelServers

SAVE = {"dummy_var": np.zeros(1, np.int64)}
ROWS = random_rows([3, 17], seed=0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"), checkpoints)
    yield made
    made.stop()


def train(pair: Pair, step: int) -> int:
    answer = ask(pair.run.url, CRITIC_TRAIN, {**training_inputs(seed=step), **identity("test", step)})
    return int(answer["weights_version"][0])


def served(run: LiveRun) -> int:
    answer = ask(run.url, CRITIC, scoring_inputs(ROWS), ["values", "weights_version"])
    return int(answer["weights_version"][0, 0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_server_serves_what_an_answer_says(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    version = train(pair, 1)  # the second server is not there yet: it does not hold up the first
    assert served(pair.run) == version

    pair.start_second()
    assert served(pair.other) == version, "ready means: serves CURRENT"
    version = train(pair, 2)
    assert [served(run) for run in (pair.run, pair.other)] == [version, version]
    records = pair.run.store.serving()
    assert len({record.pid for record in records}) == 2
    line = pair.run.critic_updates(up_to=2)[-1]
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
    version = train(pair, 3)
    assert served(pair.run) == version, "a dead server delays no other"
    outcomes = ModelServers(urls).versions()
    assert [outcome.version for outcome in outcomes] == [version, None]
    assert "cannot be reached" in str(outcomes[1].error)
    config = ["--config", str(pair.run.path)]
    assert weights(["ready", *config, "--server", urls[1]]) == 1
    assert "not ready" in capsys.readouterr().out

    pair.first.stop_sidecar()  # after a while it would have the critic loaded anew, for the server that died
    pair.start_second()
    wait_for(lambda: len(pair.run.store.serving()) == 2)
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

    monkeypatch.setattr("python_backend.config.addresses.socket.getaddrinfo", lookup)
    servers = ModelServers(["here:9001", "dns:critic.svc:8001", "here:9001"])
    assert servers.urls() == ["here:9001", "10.0.0.1:8001", "10.0.0.2:8001", "[fd00::1]:8001"]


def test_a_name_that_nobody_knows_is_told(monkeypatch: pytest.MonkeyPatch):
    def lookup(*_: object, **__: object) -> list[tuple]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("python_backend.config.addresses.socket.getaddrinfo", lookup)
    with pytest.raises(ControlPlaneError, match=r"trainer\.servers: 'dns:critic\.svc:8001' cannot be resolved"):
        ModelServers(["dns:critic.svc:8001"]).urls()
