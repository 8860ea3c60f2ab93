"""Failing servers: two tritonservers behind one sidecar and a training actor."""

import json
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest
from bare_client import ask
from live_system import LiveRun, make_run, start_system, stop_process
from model_inputs import identity, random_rows, scoring_inputs, training_inputs
from settled import statistics
from waiting import wait_for

from rlhf_triton.actor.run.staleness import needed_update
from rlhf_triton.client.control_plane import ControlPlaneError
from rlhf_triton.client.model_servers import ModelServers
from rlhf_triton.config.loading import load_config
from rlhf_triton.store.jsonl import read_jsonl
from rlhf_triton.tools.weights import main as weights
from rlhf_triton.wire.contract import CRITIC, CRITIC_INFER, CRITIC_TRAIN

pytestmark = pytest.mark.timeout(900)
SUPPORT = Path(__file__).parents[1] / "support"
ROWS = random_rows([3, 17], seed=0)


class Pair:
    """Two tritonservers with one weights store, journal and sidecar; the second server is not started yet."""

    def __init__(self, folder, checkpoints):
        other = make_run(folder / "second", checkpoints)
        run = make_run(folder / "first", checkpoints)
        urls = [run.config.server.grpc_url, other.config.server.grpc_url]
        run.path.write_text(run.path.read_text().replace("trainer:\n", f"trainer:\n  servers: {urls}\n"))
        self.run = LiveRun(run.path, load_config(run.path))
        self.runs = [self.run, other]
        self.system = start_system(self.run)
        self.servers = {0: self.system.server}
        # As on a second machine with the same volume; it uses the repository rendered for the first.
        for name in ("weights", "journal", "model_repository"):
            (other.config.run.dir / name).symlink_to(run.config.run.dir / name)

    def start(self, number):
        """Start a server that is not running; the sidecar still runs."""
        run = self.runs[number]
        state = run.config.run.dir / "server.json"
        state.unlink(missing_ok=True)
        self.servers[number] = run.start("server", module="serve_rendered", PYTHONPATH=str(SUPPORT))
        wait_for(state.is_file, self.servers[number])

    def drain(self, number):
        """Stop a server as in a rolling update, and start its successor; return what it logged."""
        server = self.servers[number]
        assert server.stop(signal.SIGTERM, 120.0) == 0
        log = server.log_path.read_text()
        self.start(number)
        return log

    def kill(self, number):
        """Kill all processes of a server at once, as if its machine failed."""
        server = psutil.Process(self.servers[number].process.pid)
        whole = [server, *server.children(recursive=True)]
        for process in whole:
            process.kill()
        self.servers[number].process.wait()
        for process in whole:
            process.wait(120)


@pytest.fixture
def pair(tmp_path, checkpoints):
    made = Pair(tmp_path, checkpoints)
    yield made
    made.system.sidecar.process.kill()  # it would wait for the servers, which are gone
    for child in (made.system.sidecar, *made.servers.values()):
        stop_process(child)


def train(run, step):
    """Train `step`; return the version that serves it."""
    inputs = {**training_inputs(seed=step), **identity("test", step)}
    return int(ask(run.url, CRITIC_TRAIN, inputs, ("loss_mean", "weights_version"))["weights_version"][0])


def served(run):
    answer = ask(run.url, CRITIC, scoring_inputs(ROWS), ["values", "weights_version"])
    return int(answer["weights_version"][0, 0])


@pytest.mark.slow
def test_answer_means_that_every_live_server_serves_the_version(pair, capsys):
    version = train(pair.run, 1)  # the second server is not there yet: it does not hold up the first
    assert served(pair.run) == version
    pair.start(1)
    assert served(pair.runs[1]) == version, "a server that does not serve CURRENT is ready"
    version = train(pair.run, 2)
    assert [served(run) for run in pair.runs] == [version, version]
    records = pair.run.store.serving()
    assert len({record.pid for record in records}) == 2
    assert pair.run.critic_updates(up_to=2)[-1]["served_by"] == {record.name: version for record in records}

    urls = pair.run.config.trainer.servers
    pair.kill(1)
    version = train(pair.run, 3)
    assert served(pair.run) == version, "a dead server delayed the other one"
    outcomes = ModelServers(urls).versions()
    assert [outcome.version for outcome in outcomes] == [version, None]
    assert "cannot be reached" in str(outcomes[1].error)
    config = ["--config", str(pair.run.path)]
    assert weights(["ready", *config, "--server", urls[1]]) == 1
    assert "not ready" in capsys.readouterr().out

    pair.system.stop_sidecar()  # after a while it would have the critic loaded anew, for the server that died
    pair.start(1)
    wait_for(lambda: len(pair.run.store.serving()) == 2)
    assert weights(["ready", *config, "--server", urls[1]]) == 0
    assert weights(["list", *config]) == 0
    told = capsys.readouterr().out
    assert f"ready: {urls[1]} serves version {version}" in told
    assert [line.count("(pid ") for line in told.splitlines() if "CURRENT" in line] == [2]


def test_model_servers_resolve_a_dns_name_to_all_its_addresses(monkeypatch):
    def lookup(name, port, **_):
        if name != "critic.svc":
            raise socket.gaierror(-2, "Name or service not known")
        hosts = [("10.0.0.2", 0), ("10.0.0.1", 0), ("10.0.0.2", 0), ("fd00::1", 0, 0, 0)]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", host) for host in hosts]

    monkeypatch.setattr("rlhf_triton.config.fields.socket.getaddrinfo", lookup)
    servers = ModelServers(["here:9001", "dns:critic.svc:8001", "here:9001"])
    assert servers.urls() == ["here:9001", "10.0.0.1:8001", "10.0.0.2:8001", "[fd00::1]:8001"]
    with pytest.raises(ControlPlaneError, match=r"trainer\.servers: 'dns:critic:8001' cannot be resolved"):
        ModelServers(["dns:critic:8001"]).urls()


def num_answered(run, model):
    """Return the number of requests that a server has answered, by its own count."""
    return statistics(run.url, model).success_count


@pytest.mark.slow
def test_actor_fails_over_between_servers_and_waits_if_none_is_healthy(pair):
    """The first is the one that training goes to; the last one comes back before Ctrl-C."""
    servers = pair.runs
    pair.start(1)
    pair.system.stop_sidecar()
    pair.system.start_sidecar()
    before = [num_answered(server, CRITIC_INFER) for server in servers]
    num_updates = sum("loss_mean" in line for line in pair.run.critic_metrics())
    urls = json.dumps([server.url for server in servers])
    settings = ["actor.steps=5000", "actor.validation.every=0", "actor.checkpoint_every=5000"]
    actor = pair.run.start("actor", f"actor.client.servers={urls}", *settings, module="rlhf_triton.actor")
    os.setpriority(os.PRIO_PROCESS, actor.process.pid, 10)  # the servers start while it trains

    def log():
        return actor.log_path.read_text()

    def steps(count):
        """Return the metrics after `count` more steps."""
        path = pair.run.config.run.dir / "metrics.jsonl"
        last = len(read_jsonl(path)) + count
        wait_for(lambda: len(read_jsonl(path)) >= last, actor)
        return read_jsonl(path)[-1]

    def words(text):
        wait_for(lambda: text in log(), actor)

    try:
        words("INFO step 2/")
        scored = [num_answered(server, CRITIC_INFER) - old for server, old in zip(servers, before, strict=True)]
        assert min(scored) > 0, "one of the servers got no requests"
        assert "s: all requests are answered" in pair.drain(0)
        words(f"{pair.run.url} is ready again")
        last = steps(2)
        counts = ("failed_requests", "over_budget", "failed_critic_updates", "outages")
        assert [last[f"client/{name}"] for name in counts] == [0, 0, 0, 0]
        about_servers = [line for line in log().splitlines() if "WARNING" in line and "no response ended" not in line]
        assert not about_servers, "a drain, which costs no request, caused a warning"
        pair.kill(0)
        words(f"{pair.run.url} gets no requests until it is ready again")
        assert steps(3)["client/outages"] == 0
        pair.kill(1)
        words("no healthy server; requests wait for one")
        pair.start(1)
        words("a server is healthy again after")
        last = steps(2)
        assert (last["client/outages"], last["client/failed_requests"]) == (1, 0)
        assert last["client/outage_seconds"] > 0
    finally:
        code = stop_process(actor)
    assert code == 130
    assert "Traceback" not in log()
    trained = [line["step"] for line in pair.run.critic_metrics() if "loss_mean" in line][num_updates:]
    assert trained == list(range(1, len(trained) + 1))
    # A step's metrics do not wait for its own update.
    assert len(trained) >= needed_update(last["step"], max_staleness=pair.run.config.actor.max_staleness, every=1)
