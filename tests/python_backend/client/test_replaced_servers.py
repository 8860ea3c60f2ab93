"""The client over HTTP while servers drain and come back: nothing is lost, and nothing unlike joins."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from fake_triton import FakeTriton, client_of
from live_system import training_inputs
from scripted_servers import until

from python_backend.client import pool
from python_backend.client.retry import RequestCounters
from python_backend.wire.contract import REWARD_MODEL

ROWS = [np.asarray([3, 4, 5])]


async def test_draining_servers_one_after_the_other_costs_nothing():
    """No pause (each would take a minute), no retry of a request's own, nothing of the budget."""

    first, second = FakeTriton(), FakeTriton()
    async with first, second, client_of(first, second, retries=0, retry_reserve=0, backoff_s=0.01) as client:
        for draining in (first, second, first, second):
            draining.behaviour, draining.ready = lambda *_: "unloaded", lambda _: False
            await asyncio.gather(*(client.rewards(ROWS) for _ in range(20)))
            steps = [client.train(training_inputs(seed=1), run_id="r", step=step) for step in range(1, 4)]
            await asyncio.gather(*steps)
            draining.behaviour, draining.ready = lambda *_: "ok", lambda _: True
            refused = len(draining.asked)
            while len(draining.asked) == refused:  # until it has come back
                await client.rewards(ROWS)
        assert client.counters.failed_requests == client.counters.over_budget == client.counters.outages == 0
        assert client.counters.failovers == client.counters.retries >= 4


async def test_the_same_server_is_no_failover(monkeypatch: pytest.MonkeyPatch):
    """The pause of a server whose model died may be over before the next attempt chooses a server."""
    monkeypatch.setattr(pool, "backoff_s", lambda first_s, doublings: 0.0)

    async with FakeTriton(lambda _, number: "dead" if number == 1 else "ok") as server, client_of(server) as client:
        await client.rewards(ROWS)
        assert client.counters == RequestCounters(requests=1, retries=1)


@pytest.mark.parametrize("setting", ["tokenizer_fingerprint", "text", "append_eos", "groupwise"])
async def test_a_server_whose_scores_mean_something_else_does_not_come_back(
    setting: str, caplog: pytest.LogCaptureFixture
):
    async with FakeTriton() as first, FakeTriton() as second, client_of(first, second) as client:
        first.parameters[setting] = second.parameters[setting] = "ours"
        await client.describe(REWARD_MODEL)
        await second.stop()
        await asyncio.gather(*(client.rewards(ROWS) for _ in range(4)))
        second.parameters[setting] = "theirs"
        second.asked.clear()
        await second.start()
        await until(lambda: f"reward_model has {setting} theirs" in caplog.text)
        await until(lambda: second.probes >= 5)
        await asyncio.gather(*(client.rewards(ROWS) for _ in range(4)))
        assert second.asked == []
        second.parameters[setting] = "ours"
        while not second.asked:
            await client.rewards(ROWS)
    assert caplog.text.count("but ours is expected") == 1
