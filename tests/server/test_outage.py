"""Real servers that go away while an actor runs: balanced over both before, failed over after, waited for, given up."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator, Sequence

import pytest
from live_system import Checkpoints, LiveRun, stop_process, wait_for
from server_pair import Pair

from python_backend.store.jsonl import read_jsonl
from python_backend.wire.contract import CRITIC_INFER
from tools.server.child import Child

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NUM_STEPS = 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("outage"), checkpoints, trainer={"reload_on_save": "none"})
    try:
        made.start_second()
        yield made
    finally:
        made.first.sidecar.process.kill()  # it would wait for the servers, which are gone
        made.stop()


class Run:
    """An actor on some of the servers, for a number of further steps."""

    def __init__(
        self, pair: Pair, *servers: LiveRun, steps: int = NUM_STEPS, settings: Sequence[str] = (), **client: float
    ) -> None:
        self.folder = pair.run.config.run.dir
        self.done = max((int(path.name) for path in self.folder.glob("checkpoints/actor/[0-9]*")), default=0)
        self.last = self.done + steps
        urls = json.dumps([server.url for server in servers])
        settings = [*settings, *(f"actor.client.{key}={value}" for key, value in {"servers": urls, **client}.items())]
        self.actor: Child = pair.run.start(
            "actor", f"actor.steps={self.last}", "actor.validation.every=0", *settings, module="actor"
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        stop_process(self.actor)

    @property
    def log(self) -> str:
        return self.actor.log_path.read_text()

    def metrics(self) -> list[dict[str, float]]:
        """Of this actor's steps."""
        return [line for line in read_jsonl(self.folder / "metrics.jsonl") if line["step"] > self.done]

    def wait_for_steps(self, count: int) -> None:
        """So many steps are behind it, and not all."""
        wait_for(lambda: f"step {self.done + count}/" in self.log, self.actor)

    def wait_for_words(self, words: str) -> None:
        wait_for(lambda: words in self.log, self.actor)

    def ends(self) -> int:
        """Its exit code."""
        code = self.actor.process.wait(120)
        print(self.log)
        assert "Traceback" not in self.log
        assert not [words for words in ("destroyed", "nclosed", "never retrieved") if words in self.log]
        return code

    def ends_well(self) -> dict[str, float]:
        """The last step's metrics of a run in which no request failed and no step was trained twice or not at all."""
        assert self.ends() == 0
        summary = json.loads((self.folder / "actor_summary.json").read_text())
        assert (summary["failed_requests"], summary["masked_samples"]) == (0, 0)
        lines = self.metrics()
        assert [line["step"] for line in lines] == list(range(self.done + 1, self.last + 1))
        trained = [
            json.loads(line)["step"]
            for line in (self.folder / "critic_metrics.jsonl").read_text().splitlines()
            if "loss_mean" in line
        ]
        assert trained[-len(lines) :] == [line["step"] for line in lines]
        assert lines[-1]["client/failed_requests"] == 0
        return lines[-1]


def num_answered(run: LiveRun, model: str) -> int:
    """Requests that a server has answered, by its own count."""
    with urllib.request.urlopen(f"http://{run.url}/v2/models/{model}/stats", timeout=60) as answer:
        (stats,) = json.load(answer)["model_stats"]
    return int(stats["inference_stats"]["success"]["count"])


def test_a_rolling_update_costs_no_request_and_trains_each_step_once(pair: Pair) -> None:
    """Each server drains and is replaced on its address, the one that training goes to first."""
    with Run(pair, pair.run, pair.other, steps=5000) as run:
        run.wait_for_steps(2)
        for server, drain in ((pair.run, pair.drain_first), (pair.other, pair.drain_second)):
            assert "s: all requests are answered" in drain()
            run.wait_for_words(f"{server.url} is ready again")
        steps = len(run.metrics())
        run.wait_for_steps(steps + 2)
        run.actor.process.send_signal(signal.SIGINT)
        assert run.ends() == 130
        last = run.metrics()[-1]
        counts = ("failed_requests", "over_budget", "failed_critic_updates", "outages")
        assert [last[f"client/{name}"] for name in counts] == [0, 0, 0, 0]
        trained = [line["step"] for line in pair.run.critic_metrics() if "loss_mean" in line]
        assert trained == list(range(1, len(trained) + 1))
        assert len(trained) >= steps
        assert "WARNING" not in run.log


def test_a_server_that_is_lost_costs_no_request_and_the_last_one_a_pause(pair: Pair) -> None:
    """The first is the one that training goes to; the last one comes back."""
    servers = (pair.run, pair.other)
    before = [num_answered(server, CRITIC_INFER) for server in servers]
    with Run(pair, *servers) as run:
        run.wait_for_steps(2)
        scored = [num_answered(server, CRITIC_INFER) - old for server, old in zip(servers, before, strict=True)]
        assert min(scored) > 0, "both get requests; how they share is in tests/python_backend/client/test_servers.py"
        pair.kill_first()
        run.wait_for_words(f"{pair.run.url} gets no requests until it is ready again")
        run.wait_for_steps(len(run.metrics()) + 3)
        assert run.metrics()[-1]["client/outages"] == 0
        pair.kill_second()
        run.wait_for_words("no healthy server; requests wait up to 600 s for one")
        pair.start_second()
        last = run.ends_well()
        events = ("no healthy server; requests wait", "a server is healthy again after")
        assert [run.log.count(event) for event in events] == [1, 1]
        assert last["client/outages"] == 1
        summary = json.loads((run.folder / "actor_summary.json").read_text())
        assert summary["outage_seconds"] == last["client/outage_seconds"] > 0


def test_ctrl_c_while_requests_wait_leaves_nothing(pair: Pair) -> None:
    """Nor a checkpoint of the critic, so the grace passes."""
    with Run(pair, pair.other, steps=5000, settings=["actor.stop_grace_s=2"]) as run:
        run.wait_for_steps(1)
        pair.kill_second()
        run.wait_for_words("no healthy server; requests wait")
        run.actor.process.send_signal(signal.SIGINT)
        assert run.ends() == 130
        assert run.log.rstrip().endswith("the next start resumes from the newest checkpoint")
