"""Training requests: they outlast a sidecar that is away, and a model process that is killed while they wait in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from fake_triton import FakeTriton, client_of
from live_system import training_inputs

from python_backend.client import client as client_module
from python_backend.client.client import TritonClient
from python_backend.client.errors import RequestFailed


def answers(*first: str) -> Callable[[str, int], str]:
    """`first`, then `ok`."""
    left: Iterator[str] = iter(first)
    return lambda model, number: next(left, "ok")


async def train(client: TritonClient, step: int) -> None:
    await client.train(training_inputs(seed=step), run_id="r", step=step)


async def test_a_sidecar_that_is_away_costs_no_retries_once_the_run_has_trained():
    async with FakeTriton(answers("ok", *["busy"] * 9)) as server, client_of(server, train_retries=1) as client:
        await train(client, 1)
        await train(client, 2)
        assert len(server.asked) == 1 + 9 + 1


async def test_before_the_first_update_a_missing_sidecar_is_an_error_after_few_retries():
    async with FakeTriton(lambda model, number: "busy") as server, client_of(server, train_retries=1) as client:
        with pytest.raises(RequestFailed, match="after 2 attempts: no room"):
            await train(client, 1)


async def test_a_sidecar_that_stays_away_is_an_error():
    behaviour = lambda model, number: "ok" if number == 1 else "busy"  # noqa: E731
    async with FakeTriton(behaviour) as server, client_of(server, max_outage_s=0.05) as client:
        await train(client, 1)
        with pytest.raises(RequestFailed, match="no room"):
            await train(client, 2)
        assert len(server.asked) > 3, "repeated more often than train_retries allows"


async def test_a_request_whose_process_was_killed_is_sent_again(monkeypatch: pytest.MonkeyPatch):
    """Triton never answers it: a run stood still until train_deadline_s."""
    monkeypatch.setattr(client_module, "REPEAT_AFTER_S", 0.02)

    async with FakeTriton(answers("hang", "hang")) as server, client_of(server, train_retries=0) as client:
        await train(client, 1)
        assert len(server.asked) == 3
        assert (client.counters.retries, client.counters.failed_requests) == (0, 0)


async def test_a_step_that_overtakes_a_lost_one_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    """Step 2 reached the new process of critic_train before the repeated step 1, and its refusal ended the actor."""
    monkeypatch.setattr(client_module, "REPEAT_AFTER_S", 0.2)

    async with FakeTriton(answers("hang", "early")) as server, client_of(server, train_retries=0) as client:
        first = asyncio.create_task(train(client, 1))
        while not server.in_flight:
            await asyncio.sleep(0.001)
        await train(client, 2)
        assert first.done(), "step 2 is sent again only after the answer to step 1"
        assert len(server.asked) == 4


async def test_a_step_that_is_ahead_of_the_journal_alone_is_an_error():
    async with FakeTriton(answers("early")) as server, client_of(server, train_retries=1) as client:
        with pytest.raises(RequestFailed, match="send step 1 first"):
            await train(client, 2)
