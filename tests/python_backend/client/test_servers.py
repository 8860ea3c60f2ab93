"""`client.pool`: which server gets a request, which is set aside, and who waits; connections are scripted."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import AsyncExitStack

import pytest
from scripted_servers import BUSY, DEAD, LOST, REFUSED, UNLOADED, Rig, until

from python_backend.client.errors import RequestFailed, Trouble

# ---- choosing ----


async def test_idle_servers_take_turns_for_each_model():
    """Reward and critic score every row: each server gets half of the requests for either."""

    async with Rig() as servers:
        taken: dict[str, list[str]] = {"reward": [], "critic": []}
        for _ in range(6):
            async with AsyncExitStack() as row:
                for model, urls in taken.items():
                    server = await row.enter_async_context(servers.one(model, writes=False, patient=True))
                    urls.append(server.url)
    assert {model: urls.count("a:1") for model, urls in taken.items()} == {"reward": 3, "critic": 3}


async def test_the_fewest_in_flight_wins():
    async with Rig() as servers, AsyncExitStack() as held:
        first = await held.enter_async_context(servers.one("m", writes=False, patient=True))
        other = ({"a:1", "b:1"} - {first.url}).pop()
        assert [await servers.take() for _ in range(4)] == [other] * 4
        for _ in range(5):
            await held.enter_async_context(servers.one("m", writes=False, patient=True))
        assert sorted(server.in_flight for server in servers.servers) == [3, 3]


async def test_writers_stay_with_one_server_while_it_is_there():
    async with Rig() as servers:
        assert [await servers.take(writes=True) for _ in range(3)] == ["a:1"] * 3
        servers["a:1"].connection.refuses = True
        await servers.fail("a:1", REFUSED)
        assert await servers.take(writes=True) == "b:1"
        servers["a:1"].connection.refuses = False
        await until(lambda: servers["a:1"].down is None)
        assert await servers.take(writes=True) == "b:1"


# ---- set aside, and back ----


async def test_who_refuses_gets_nothing_until_all_models_are_ready(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)

    async with Rig() as servers:
        await servers.take("m")
        await servers.take("critic_train", writes=True)
        lost = servers["a:1"]
        lost.connection.not_ready = {"critic_train"}
        assert await servers.fail("a:1", REFUSED)
        assert {await servers.take() for _ in range(4)} == {"b:1"}
        await until(lambda: lost.connection.asked.count("m") >= 3)
        assert {await servers.take() for _ in range(4)} == {"b:1"}, "one of its models is not ready"
        assert lost.down == "critic_train not ready"
        assert lost.losses >= 3, "each probe in vain makes the next pause longer"
        lost.connection.not_ready.clear()
        await until(lambda: lost.down is None)
        assert {await servers.take() for _ in range(4)} == {"a:1", "b:1"}
        assert servers.counters.outages == 0
    assert "a:1 gets no requests until it is ready again: Connection refused" in caplog.text
    assert "a:1 is ready again" in caplog.text


async def test_a_server_that_drains_is_set_aside_without_a_probe_or_a_warning(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)

    async with Rig() as servers:
        await servers.take()
        connection = servers["a:1"].connection
        connection.not_ready = {"m"}
        assert await servers.fail("a:1", UNLOADED)
        assert not connection.asked
        assert {await servers.take() for _ in range(4)} == {"b:1"}
        connection.not_ready.clear()  # its successor on the same address
        await until(lambda: servers["a:1"].down is None)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert caplog.text.count("a:1 gets no requests until it is ready again") == 1


@pytest.mark.parametrize("trouble", [LOST, BUSY])
async def test_who_is_only_slow_or_busy_stays(trouble: Trouble):
    async with Rig() as servers:
        await servers.take()
        assert not await servers.fail("a:1", trouble)
        assert servers["a:1"].takes("m")
        servers["a:1"].connection.refuses = True
        assert await servers.fail("a:1", trouble)
        assert not servers["a:1"].takes("m")


async def test_many_that_fail_together_share_one_probe():
    async with Rig() as servers:
        await servers.take()
        connection = servers["a:1"].connection
        connection.gate.clear()
        failing = [asyncio.create_task(servers.fail("a:1", LOST)) for _ in range(50)]
        await until(lambda: bool(connection.asked))
        connection.gate.set()
        assert not any(await asyncio.gather(*failing))
        assert connection.asked == ["m"]


async def test_pauses_grow_until_a_request_is_answered():
    async with Rig("a:1") as servers:
        await servers.take()
        for losses in (1, 2, 3):  # ready each time, and gone when asked
            await servers.fail("a:1", REFUSED)
            assert servers["a:1"].losses == losses
            await until(lambda: servers["a:1"].down is None)
        await servers.take()
        assert servers["a:1"].losses == 0


# ---- a model's dead process ----


async def test_a_dead_model_is_tried_by_one_request_and_the_others_go_on():
    async with Rig("a:1", backoff_s=0.2) as servers:
        await servers.take("critic")
        assert await servers.fail("a:1", DEAD, "critic")
        assert await servers.take("reward") == "a:1"
        waiting = [asyncio.create_task(servers.take("critic", patient=True)) for _ in range(3)]
        assert await asyncio.gather(*waiting) == ["a:1"] * 3
        assert not servers["a:1"].suspended
        assert servers.counters.outages == 1


async def test_one_trial_at_a_time_and_each_failure_makes_the_pause_longer():
    async with Rig("a:1") as servers:
        await servers.take("critic")
        for _ in range(5):
            await servers.fail("a:1", DEAD, "critic")  # all that were under way when it died
        assert servers["a:1"].suspended["critic"].losses == 1
        async with servers.one("critic", writes=False, patient=True) as server:
            assert not servers.can_take("critic")
            await servers.failed(server, "critic", DEAD)
        assert server.suspended["critic"].losses == 2
        async with servers.one("critic", writes=False, patient=True):
            pass  # called off: the next one may try
        assert await servers.take("critic") == "a:1"


# ---- outages ----


async def test_an_outage_is_told_counted_and_over(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("python_backend.client.outage.REMIND_EVERY_S", 0.001)

    async with Rig() as servers:
        await servers.lose_all()
        assert servers.counters.outages == 0, "no request has had to wait"
        waiting = [asyncio.create_task(servers.take()) for _ in range(20)]
        reminder = r"no healthy server for \d+ s: a:1: Connection refused; b:1"
        await until(lambda: re.search(reminder, caplog.text) is not None)
        assert not any(task.done() for task in waiting)
        servers["b:1"].connection.refuses = False
        assert await asyncio.gather(*waiting) == ["b:1"] * 20
        assert servers.counters.outages == 1
        assert servers.counters.outage_seconds > 0
    assert caplog.text.count("requests wait up to 600 s") == 1
    assert caplog.text.count("a server is healthy again after") == 1


async def test_while_all_wait_only_the_probe_asks():
    async with Rig("a:1") as servers:
        await servers.lose_all()
        connection = servers["a:1"].connection
        connection.gate.clear()  # the probe takes its time
        waiting = [asyncio.create_task(servers.take()) for _ in range(50)]
        asked = len(connection.asked)
        await until(lambda: len(connection.asked) > asked)
        await asyncio.sleep(0.02)
        assert len(connection.asked) == asked + 1
        connection.refuses = False
        connection.gate.set()
        await asyncio.gather(*waiting)


async def test_an_outage_that_does_not_end_is_an_error_that_names_everybody():
    async with Rig(max_outage_s=0.05) as servers:
        await servers.lose_all()
        for _ in range(2):  # and the next one does not wait anew
            with pytest.raises(RequestFailed, match=r"m: no healthy server for \d+ s \(max_outage_s"):
                await servers.take()
        with pytest.raises(RequestFailed, match=r": a:1: Connection refused; b:1: Connection refused; is `python"):
            await servers.take()
        servers["a:1"].connection.refuses = False
        await until(lambda: servers["a:1"].down is None)
        assert await servers.take() == "a:1"


@pytest.mark.parametrize(("longest", "patient"), [(0.0, True), (600.0, False)])
async def test_the_impatient_try_one_that_was_lost(longest: float, patient: bool):
    async with Rig(max_outage_s=longest) as servers:
        await servers.lose_all()
        assert await servers.take(patient=patient) in ("a:1", "b:1")
        assert servers.counters.outages == 0
