"""`client.pool` with scripted connections (least-loaded choice, probes, outages, names), and `client.retry`."""

import asyncio
import contextlib
import logging
import re
import socket
from contextlib import AsyncExitStack

import pytest
from scripted_servers import BUSY, DEAD, LOST, REFUSED, UNLOADED, Rig, Scripted
from waiting import until

from rlhf_triton.backoff import MAX_PAUSE_S
from rlhf_triton.client import retry
from rlhf_triton.client.errors import AttemptFailed, ErrorKind, RequestFailed
from rlhf_triton.client.retry import PER_REQUEST, Attempts, RetryBudget
from rlhf_triton.client.training_queue import TrainingQueue
from rlhf_triton.config.client import ClientSettings

WRONG = AttemptFailed(ErrorKind.WRONG, "refused", "step: 9")
RESET = AttemptFailed(ErrorKind.LOST, "cannot be reached", "Connection reset by peer", hint="; is it there?")


# ---- retries ----


def attempts(retries, *, budget=None, **settings):
    return Attempts("critic", ClientSettings(**settings), budget or RetryBudget(100), retries=retries)


def test_retry_budget_is_bounded_and_refilled_per_request():
    budget = RetryBudget(10)
    spent = 0
    reserve = 10
    for _ in range(1000):  # the first is earned into a full bucket
        budget.earn()
        while budget.spend():
            spent += 1
    assert spent == pytest.approx(reserve + 1000 * PER_REQUEST, abs=1)
    for _ in range(1000):
        budget.earn()
    assert sum(budget.spend() for _ in range(1000)) == reserve


@pytest.mark.parametrize(
    ("failures", "retries", "reserve", "error"),
    [
        ([BUSY] * 2, 2, 2, None),
        ([BUSY] * 3, 2, 2, r"^critic at here:1 refused after 3 attempts: no room$"),
        ([BUSY] * 2, 5, 1, r"refused after 2 attempts: no room; not retried: .*the retry budget is exhausted"),
        ([RESET], 1, 0, None),
        ([RESET] * 2, 1, 0, r"^critic at here:1 cannot be reached after 2 attempts: Connection reset by peer; is it"),
        ([REFUSED] * 100, 0, 0, None),
        ([WRONG], 5, 9, r"^critic at here:1 refused: step: 9$"),
    ],
)
def test_attempts_spend_the_retry_budget_only_for_pauses(failures, retries, reserve, error):
    one = attempts(retries, budget=RetryBudget(reserve))
    record = {BUSY: one.pause_s, WRONG: one.pause_s, RESET: one.record_failover, REFUSED: one.record_failover}
    for failure in failures[:-1]:
        record[failure](failure, "here:1")
    with pytest.raises(RequestFailed, match=error) if error else contextlib.nullcontext():
        record[failures[-1]](failures[-1], "here:1")
    assert one.budget.spend() == (failures == [WRONG]), "a failover takes from the retry budget"


def test_retry_pauses_double_up_to_a_limit_with_jitter(monkeypatch):
    monkeypatch.setattr(retry, "BACKOFF_S", 1.0)
    one = attempts(20)
    longest = [1.0, 2.0, 4.0, MAX_PAUSE_S, MAX_PAUSE_S]
    pauses = [one.pause_s(BUSY, "here:1") for _ in longest]
    assert all(most / 2 <= pause <= most for pause, most in zip(pauses, longest, strict=True))
    firsts = {attempts(1).pause_s(BUSY, "here:1") for _ in range(20)}
    assert len(firsts) > 10, "requests that failed together retry together"


def test_attempts_end_at_max_outage_s_if_servers_refuse_connections(monkeypatch):
    times = iter(
        (0, 50, 50, 100, 111)
    )  # when the failures below happen; the one at 50 reached a server, which restarts the clock
    monkeypatch.setattr("rlhf_triton.client.retry.time.monotonic", lambda: now)
    one = attempts(5, max_outage_s=60)
    for failure in (REFUSED, RESET, REFUSED, REFUSED):
        now = next(times)
        one.record_failover(failure, "here:1")
    now = next(times)
    with pytest.raises(RequestFailed, match=r"cannot be reached after 5 attempts: Connection refused"):
        one.record_failover(REFUSED, "here:1")


# ---- training requests keep their order ----


@pytest.mark.parametrize(
    "script",
    [
        # What is repeated waits for the answers to those before it, and nothing overtakes it.
        "add a: a, add b: ab, lost b: ab, lost a: aba, add c: aba, done a: abab, done b: ababc, done c: ababc",
        # The next step goes to another server only after the answer.
        "add a: a, writer two: a, add b: a, lost a: aa, done a: aab, done b: aab",
        # Those that were held up go one by one: sent in the same moment, the last might arrive first.
        "add a: a, lost a: aa, add b: aa, add c: aa, done a: aab, done b: aabc, done c: aabc",
        # A request that is given up leaves the line.
        "add a: a, add b: ab, lost b: ab, cancel a: abb, done b: abb",
    ],
)
async def test_training_requests_are_sent_in_order(script):
    """Each step of the script is an event and the attempts so far, in the order in which they were sent."""
    queue = TrainingQueue()
    sent = []
    writer = ["one"]
    orders = {}
    tasks = {}

    async def request(name):
        with queue.join() as queued:
            while True:
                await queue.wait_for(queued, lambda: writer[0])
                with queue.in_flight(queued, writer[0]):
                    sent.append(name)
                    if await orders[name].get() == "done":
                        return

    for step in script.split(", "):
        what, name, expected = step.replace(":", "").split()
        if what == "add":
            orders[name], tasks[name] = asyncio.Queue(), asyncio.create_task(request(name))
        elif what == "writer":
            writer[0] = name
        elif what == "cancel":
            tasks.pop(name).cancel()
        else:
            orders[name].put_nowait(what)
        for _ in range(10):
            await asyncio.sleep(0)
        assert "".join(sent) == expected, step
    await asyncio.gather(*tasks.values())


# ---- the choice of a server ----


async def test_idle_servers_alternate_per_model():
    """Reward and critic score every row: each server gets half of the requests for either."""
    async with Rig() as servers:
        taken = []
        for _ in range(6):
            async with AsyncExitStack() as row:
                for model in ("reward", "critic"):
                    server = await row.enter_async_context(servers.select(model, writes=False, patient=True))
                    taken.append((model, server.url))
    assert [taken.count((model, "a:1")) for model in ("reward", "critic")] == [3, 3]


async def test_pool_chooses_the_server_with_the_fewest_requests_in_flight():
    async with Rig("a:1", "b:1", "a:1") as servers, AsyncExitStack() as held:
        first = await held.enter_async_context(servers.select("m", writes=False, patient=True))
        other = ({"a:1", "b:1"} - {first.url}).pop()
        assert [await servers.take() for _ in range(4)] == [other] * 4
        async with servers.select("m", writes=False, patient=True, avoid=[other]) as server:
            assert server is first, "the server to avoid gets the request"
        for _ in range(5):
            await held.enter_async_context(servers.select("m", writes=False, patient=True))
        assert [(server.url, server.in_flight) for server in servers.servers] == [("a:1", 3), ("b:1", 3)]
        assert not servers._tasks, "addresses without a name are resolved again"


async def test_training_requests_stay_with_one_server_while_it_is_healthy():
    async with Rig() as servers:
        assert [await servers.take(writes=True) for _ in range(3)] == ["a:1"] * 3
        servers["a:1"].connection.refuses = True
        await servers.fail("a:1", REFUSED)
        assert await servers.take(writes=True) == "b:1"
        servers["a:1"].connection.refuses = False
        await until(lambda: servers["a:1"].down is None)
        assert await servers.take(writes=True) == "b:1"


# ---- set aside, and back ----


async def test_a_lost_server_gets_no_requests_until_all_models_are_ready(caplog):
    caplog.set_level(logging.INFO)
    async with Rig() as servers:
        await servers.take("m")
        await servers.take("critic_train", writes=True)
        lost = servers["a:1"]
        lost.connection.not_ready = {"critic_train"}
        assert await servers.fail("a:1", REFUSED)
        await until(lambda: lost.connection.asked.count("m") >= 3)
        assert {await servers.take() for _ in range(4)} == {"b:1"}, (
            "a server with a model that is not ready gets requests"
        )
        assert lost.down == "critic_train not ready"
        assert lost.losses >= 3, "failed probes do not make the pause longer"
        lost.connection.not_ready.clear()
        await until(lambda: lost.down is None)
        assert {await servers.take() for _ in range(4)} == {"a:1", "b:1"}
        assert servers.counters.outages == 0
    assert "a:1 gets no requests until it is ready again: Connection refused" in caplog.text
    assert "a:1 is ready again" in caplog.text


async def test_a_server_that_drains_is_set_aside_without_a_probe_or_a_warning(caplog):
    async with Rig() as servers:
        await servers.take()
        connection = servers["a:1"].connection
        connection.not_ready = {"m"}
        assert await servers.fail("a:1", UNLOADED)
        assert not connection.asked
        assert {await servers.take() for _ in range(4)} == {"b:1"}
        connection.not_ready.clear()  # its successor on the same address
        await until(lambda: servers["a:1"].down is None)
    assert caplog.records == []


@pytest.mark.parametrize("failure", [LOST, BUSY])
async def test_a_slow_or_busy_server_is_probed_once_and_stays_if_it_is_ready(failure):
    async with Rig() as servers:
        await servers.take()
        connection = servers["a:1"].connection
        connection.gate.clear()
        failing = [asyncio.create_task(servers.fail("a:1", failure)) for _ in range(50)]
        await until(lambda: bool(connection.asked))
        connection.gate.set()
        assert not any(await asyncio.gather(*failing))
        assert connection.asked == ["m"], "two requests probe the same server"
        assert servers["a:1"].accepts("m")
        connection.refuses = True
        assert await servers.fail("a:1", failure)
        assert not servers["a:1"].accepts("m")


async def test_probe_pauses_grow_until_a_request_is_answered():
    async with Rig("a:1") as servers:
        await servers.take()
        for losses in (1, 2, 3):  # ready each time, and gone when asked
            await servers.fail("a:1", REFUSED)
            assert servers["a:1"].losses == losses
            await until(lambda: servers["a:1"].down is None)
        await servers.take()
        assert servers["a:1"].losses == 0


async def test_dead_model_is_tried_by_one_request_at_a_time():
    async with Rig("a:1") as servers:
        await servers.take("critic")
        for _ in range(5):
            assert await servers.fail("a:1", DEAD, "critic")  # all that were under way when it died
        assert servers["a:1"].suspended["critic"].losses == 1
        assert await servers.take("reward") == "a:1"
        async with servers.select("critic", writes=False, patient=True) as server:
            assert not servers.can_accept("critic")
            await servers.record_failure(server, "critic", DEAD)
        assert server.suspended["critic"].losses == 2, "failures do not make the pause longer"
        async with servers.select("critic", writes=False, patient=True):
            pass  # called off: the next one may try
        waiting = [asyncio.create_task(servers.take("critic")) for _ in range(3)]
        assert await asyncio.gather(*waiting) == ["a:1"] * 3
        assert not server.suspended


# ---- outages ----


async def test_outage_is_logged_counted_and_ends_with_a_healthy_server(caplog, monkeypatch):
    monkeypatch.setattr("rlhf_triton.client.outage.REMIND_EVERY_S", 0.001)
    async with Rig() as servers:
        await servers.lose_all()
        assert servers.counters.outages == 0, "an outage is counted although no request waited"
        waiting = [asyncio.create_task(servers.take()) for _ in range(20)]
        reminder = r"no healthy server for \d+ s: a:1: Connection refused; b:1"
        await until(lambda: re.search(reminder, caplog.text) is not None)
        assert not any(task.done() for task in waiting)
        servers["b:1"].connection.refuses = False
        assert await asyncio.gather(*waiting) == ["b:1"] * 20
        assert servers.counters.outages == 1
        assert servers.counters.outage_seconds > 0
    assert caplog.text.count("requests wait for one") == 1
    assert caplog.text.count("a server is healthy again after") == 1


async def test_outage_beyond_max_outage_s_raises_with_all_servers():
    async with Rig(max_outage_s=0.05) as servers:
        await servers.lose_all()
        for error in (r"m: no healthy server for \d+ s \(max_outage_s", r": a:1: Connection refused; b:1: Connection"):
            with pytest.raises(RequestFailed, match=error):  # and the next one does not wait anew
                await servers.take()
        servers["a:1"].connection.refuses = False
        await until(lambda: servers["a:1"].down is None)
        assert await servers.take() == "a:1"


async def test_each_model_waits_out_its_own_outage(monkeypatch):
    async with Rig("a:1", max_outage_s=0.2) as servers:
        await servers.take("reward")
        monkeypatch.setattr(retry, "BACKOFF_S", 100.0)
        await servers.fail("a:1", DEAD, "reward")
        with pytest.raises(RequestFailed, match="reward: no healthy server for 0 s"):
            await servers.take("reward")
        monkeypatch.setattr(retry, "BACKOFF_S", 0.01)
        await servers.fail("a:1", DEAD, "critic")
        assert await servers.take("critic") == "a:1"  # the reward's outage goes on


async def test_requests_wait_for_the_one_that_tries_a_model_after_a_long_pause():
    """It was replaced long ago, but no request was sent meanwhile: those that waited were cancelled."""
    async with Rig("a:1", max_outage_s=0.05) as servers:
        await servers.take()
        await servers.fail("a:1", DEAD)
        cancelled = asyncio.create_task(servers.take())
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0.3)
        assert servers.outage
        async with servers.select("m", writes=False, patient=True) as server:
            waiting = asyncio.create_task(servers.take())
            await asyncio.sleep(0)
            servers.record_success(server, "m")
        assert await waiting == "a:1"
        assert not servers.outage


async def test_a_model_whose_process_died_is_ready_once_a_request_may_try_it(monkeypatch):
    """Otherwise a gateway that a load balancer has taken out of service would never return to it."""
    async with Rig("a:1") as servers:
        await servers.take()
        monkeypatch.setattr(retry, "BACKOFF_S", 100.0)
        await servers.fail("a:1", DEAD)
        assert await servers.why_not_ready("m") == "a:1: Stub process is not healthy."
        servers["a:1"].suspended["m"].until = 0.0
        assert await servers.why_not_ready("m") is None
        servers["a:1"].connection.not_ready.add("m")
        assert await servers.why_not_ready("m") == "a:1: m not ready"


# ---- names: servers that join and leave ----


class Names:
    """A name service that tests change."""

    def __init__(self, monkeypatch, *hosts):
        self.hosts = hosts
        self.asked = 0
        monkeypatch.setattr("rlhf_triton.config.fields.socket.getaddrinfo", self._look_up)

    def _look_up(self, name, port, **_):
        self.asked += 1
        if not self.hosts:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in self.hosts]


@pytest.fixture
def often(monkeypatch):
    """Names are resolved again every millisecond."""
    monkeypatch.setattr("rlhf_triton.client.pool.RESOLVE_EVERY_S", 0.001)


@pytest.mark.usefixtures("often")
async def test_a_server_that_joins_gets_requests_once_its_models_are_ready(monkeypatch):
    names = Names(monkeypatch, "10.0.0.1")

    def connect(url):
        made = Scripted(url)
        made.not_ready = {"m"}
        made.gate.clear()
        return made

    async with Rig("dns:critic.svc:8000") as servers:
        await servers.take()
        servers._connect = connect
        names.hosts = ("10.0.0.1", "10.0.0.2")
        await until(lambda: len(servers.servers) == 2)
        joining = servers["10.0.0.2:8000"]
        assert {await servers.take() for _ in range(4)} == {"10.0.0.1:8000"}, (
            "a new server gets requests before its probe"
        )
        joining.connection.gate.set()
        await until(lambda: len(joining.connection.asked) >= 3)
        assert {await servers.take() for _ in range(4)} == {"10.0.0.1:8000"}, (
            "a new server that is not ready gets requests"
        )
        joining.connection.not_ready.clear()
        await until(lambda: joining.down is None)
        assert {await servers.take() for _ in range(4)} == {"10.0.0.1:8000", "10.0.0.2:8000"}


@pytest.mark.usefixtures("often")
async def test_server_removed_from_dns_answers_its_requests_in_flight(monkeypatch, caplog):
    names = Names(monkeypatch, "10.0.0.1", "10.0.0.2")
    async with Rig("dns:critic.svc:8000") as servers:
        assert await servers.take(writes=True) == "10.0.0.1:8000"
        leaving = servers["10.0.0.1:8000"]
        async with servers.select("m", writes=True, patient=True) as chosen:
            assert chosen is leaving
            names.hosts = ("10.0.0.2",)
            await until(lambda: leaving not in servers.servers)
            assert {await servers.take(writes=writes) for writes in (True, False)} == {"10.0.0.2:8000"}
            assert await servers.record_failure(leaving, "m", LOST), "a server that has left is probed"
            assert not leaving.connection.closed
        names.hosts = ("10.0.0.1", "10.0.0.2")  # its address is given to another server
        await until(lambda: len(servers.servers) == 2 and not any(s.down for s in servers.servers))
        assert {await servers.take() for _ in range(4)} == {"10.0.0.1:8000", "10.0.0.2:8000"}
    assert caplog.records == [], "a slow server caused a warning"


@pytest.mark.usefixtures("often")
async def test_dns_outage_removes_no_server_and_is_logged_once(monkeypatch, caplog):
    names = Names(monkeypatch)
    async with Rig("dns:critic.svc:8000", "here:8000") as servers:
        with pytest.raises(RequestFailed, match=r"server address 'dns:critic\.svc:8000' cannot be resolved"):
            await servers.take()
        names.hosts = ("10.0.0.1", "10.0.0.2")
        await servers.take()
        for _ in range(2):
            names.hosts = ()
            names.asked = 0
            await until(lambda: names.asked >= 3)
            assert len(servers.servers) == 3
            names.hosts = ("10.0.0.1", "10.0.0.2")
            await until(lambda: not servers._names._unresolved)
    assert caplog.text.count("dns:critic.svc:8000 cannot be resolved") == 2
