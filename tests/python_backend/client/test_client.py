"""The client over HTTP, against a server that fails on demand: retries, deadlines, order, closing."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_triton import Behaviour, FakeTriton, client_of
from live_system import training_inputs
from scripted_servers import until

from python_backend.client.client import TritonClient
from python_backend.client.errors import OverBudget, RequestFailed, ServerFailed
from python_backend.client.retry import RequestCounters
from python_backend.wire.contract import CRITIC_SAVE, CRITIC_TRAIN, REWARD_MODEL

ROOT = Path(__file__).resolve().parents[3]
ROWS = [np.asarray([3, 4, 5])]


def first(*answers: str) -> Behaviour:
    """These to the first requests, `ok` from then on."""
    return lambda model, number: answers[number - 1] if number <= len(answers) else "ok"


def counted(**counters: float) -> RequestCounters:
    return RequestCounters(**counters)  # type: ignore[arg-type]


# ---- one server ----


async def test_answers_travel_uncompressed():
    """Where a client accepts gzip, Triton compresses: CPU time of server and client, for floats that hardly shrink."""

    async with FakeTriton() as server, client_of(server) as client:
        await client.rewards(ROWS)
        await client.train(training_inputs(seed=1), run_id="test", step=1)
        assert server.encodings == {"identity"}


@pytest.mark.parametrize(
    ("answers", "error", "num_asked"),
    [
        (["busy", "busy"], None, 3),
        (["drop", "drop"], None, 3),
        (["failed", "failed"], None, 3),
        (["dead", "dead"], None, 3),
        (["busy"] * 4, "^reward_model at URL refused after 3 attempts: no room$", 3),
        (["wrong"], "^reward_model at URL refused: tokens: missing$", 1),
    ],
)
async def test_what_may_pass_is_repeated_and_what_is_final_is_not(
    answers: list[str], error: str | None, num_asked: int
):
    async with FakeTriton(first(*answers)) as server, client_of(server, retries=2) as client:
        told = (error or "").replace("URL", re.escape(server.url))
        with pytest.raises(RequestFailed, match=told) if error else contextlib.nullcontext():
            assert (await client.rewards(ROWS))["rewards"] == [[0.5]]
        assert len(server.asked) == num_asked
        seen = client.counters
        assert (seen.requests, seen.retries, seen.failed_requests) == (1, num_asked - 1, bool(error))


async def test_every_attempt_has_a_deadline():
    """Each kind its own: with the other's, this would not end."""

    async with FakeTriton(lambda *_: "hang") as server:
        async with client_of(server, retries=1, deadline_s=0.05, train_deadline_s=1000) as client:
            with pytest.raises(RequestFailed, match=r"did not respond within 0\.05 s after 2 attempts$"):
                await client.rewards(ROWS)
            assert client.counters == counted(requests=1, retries=1, failed_requests=1)
        async with client_of(server, retries=1, deadline_s=1000, train_deadline_s=0.05) as client:
            with pytest.raises(RequestFailed, match=r"did not respond within 0\.05 s after 2 attempts$"):
                await client.train(training_inputs(seed=1), run_id="r", step=1)


async def test_no_more_requests_than_allowed_are_under_way_on_connections_that_are_kept():
    async with FakeTriton(lambda *_: "wait") as server, client_of(server, max_in_flight=3) as client:
        asking = [asyncio.create_task(client.rewards(ROWS)) for _ in range(12)]
        await until(lambda: server.in_flight == 3)
        await asyncio.sleep(0.05)
        assert len(server.asked) == 3
        server.go.set()
        await asyncio.gather(*asking)
        assert server.most_in_flight == 3
        assert len(server.connections) == 3


async def test_the_budget_ends_a_storm():
    """Forty requests that each may be repeated six times: 240 more attempts without a budget, here 5 + 20 % of 40."""

    limits = {"retries": 6, "retry_budget": 0.2, "retry_reserve": 5}
    async with FakeTriton(lambda *_: "busy") as server, client_of(server, **limits) as client:
        asking = [client.rewards(ROWS) for _ in range(40)]
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(answer, RequestFailed) for answer in answers)
        assert 5 <= client.counters.retries <= 5 + 8
        assert len(server.asked) == 40 + client.counters.retries
        assert client.counters.over_budget >= 40 - 5 - 8
        assert client.counters.failed_requests == 40
        spent = [str(answer) for answer in answers if "retry_budget is exhausted" in str(answer)]
        assert len(spent) == client.counters.over_budget
        assert all("no room" in sentence for sentence in spent)


async def test_a_storm_of_scoring_leaves_training_its_retries():
    """Of 200 rounds in which scoring had spent the budget, every critic_train failed at its first 503."""

    turned_down = {REWARD_MODEL: 10_000, CRITIC_TRAIN: 2, CRITIC_SAVE: 2}

    def behave(model: str, number: int) -> str:
        turned_down[model] -= 1
        return "busy" if turned_down[model] >= 0 else "ok"

    async with (
        FakeTriton(behave) as server,
        client_of(server, retry_reserve=5, retries=6, train_retries=2, retry_budget=0.0) as client,
    ):
        storm = await asyncio.gather(*(client.rewards(ROWS) for _ in range(20)), return_exceptions=True)
        assert any(isinstance(answer, OverBudget) for answer in storm)
        await client.train(training_inputs(seed=1), run_id="r", step=1)
        await client.save(run_id="r", step=1)
        assert [server.asked.count(model) for model in (CRITIC_TRAIN, CRITIC_SAVE)] == [3, 3]


async def test_a_step_that_failed_at_the_sidecar_is_told_from_a_refused_one():
    async with FakeTriton(first("failed", "wrong")) as server, client_of(server) as client:
        with pytest.raises(ServerFailed, match=r"critic_train at .* refused: the gradients are not finite"):
            await client.train(training_inputs(seed=1), run_id="r", step=1)
        with pytest.raises(RequestFailed, match="tokens: missing") as refused:
            await client.train(training_inputs(seed=1), run_id="r", step=2)
        assert not isinstance(refused.value, ServerFailed)
        assert len(server.asked) == 2, "neither is repeated"


# ---- a server that goes away ----


async def test_requests_wait_for_a_server_that_comes_back_and_burn_nothing():
    async with FakeTriton(lambda *_: "wait") as server, client_of(server, retries=1, retry_reserve=0) as client:
        asking = [asyncio.create_task(client.rewards(ROWS)) for _ in range(10)]
        await until(lambda: server.in_flight == 10)
        await server.stop()  # breaks ten connections
        asking += [asyncio.create_task(client.rewards(ROWS)) for _ in range(10)]
        await until(lambda: client.counters.outages == 1)
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in asking)
        server.ready = lambda model: False
        server.go.set()
        await server.start()
        await until(lambda: server.probes >= 3)
        assert len(server.asked) == 10, "it listens, but its models are not ready"
        server.ready = lambda model: True
        await asyncio.gather(*asking)
        assert client.counters.failed_requests == client.counters.over_budget == 0
        assert client.counters.outages == 1
        assert client.counters.outage_seconds > 0


async def test_a_server_that_stays_away_is_an_error():
    async with FakeTriton() as server, client_of(server, max_outage_s=0.1) as client:
        await client.rewards(ROWS)
        await server.stop()
        sentence = r"^reward_model: no healthy server for \d+ s \(max_outage_s\)"
        with pytest.raises(RequestFailed, match=sentence) as caught:
            await client.rewards(ROWS)
        assert f"{server.url}: Connection refused; is `python -m tools serve` running there?" in str(caught.value)
        assert client.counters.failed_requests == 1


async def test_the_first_contact_is_impatient():
    async with FakeTriton() as server, client_of(server, retries=6) as client:
        await server.stop()
        with pytest.raises(RequestFailed, match=r"cannot be reached after 2 attempts: Connection refused; is `python"):
            await client.describe(REWARD_MODEL)
        await server.start()
        assert (await client.describe(REWARD_MODEL)).parameters == server.parameters
        assert client.counters.outages == 0


async def test_without_patience_retries_are_all_there_is():
    async with FakeTriton() as server, client_of(server, retries=2, max_outage_s=0) as client:
        await server.stop()
        with pytest.raises(RequestFailed, match=r"cannot be reached after 3 attempts: Connection refused"):
            await client.rewards(ROWS)
        assert client.counters == counted(requests=1, retries=2, failed_requests=1)


# ---- several servers ----


async def test_requests_are_balanced_and_go_on_elsewhere_when_a_server_is_lost():
    """Not one of the requests is given a retry or a budget: failing over takes neither pause nor budget."""

    lost, other = FakeTriton(lambda *_: "wait"), FakeTriton(lambda *_: "wait")
    async with lost, other, client_of(lost, other, retries=1, retry_reserve=0, backoff_s=60.0) as client:
        asking = [asyncio.create_task(client.rewards(ROWS)) for _ in range(20)]
        await until(lambda: lost.in_flight + other.in_flight == 20)
        assert (lost.in_flight, other.in_flight) == (10, 10)
        await lost.stop()
        await until(lambda: other.in_flight == 20)
        other.go.set()
        await asyncio.gather(*asking)
        for _ in range(5):
            await client.rewards(ROWS)
        assert client.counters == counted(requests=25, retries=10, failovers=10)
        assert len(lost.asked) == 10


async def test_the_first_contact_takes_the_server_that_is_there():
    async with FakeTriton() as lost, FakeTriton() as other:
        await lost.stop()
        for order in ([lost, other], [other, lost]):
            async with client_of(*order, retries=0) as client:
                for _ in range(2):
                    assert await client.describe(REWARD_MODEL)


async def test_steps_reach_the_next_server_in_order():
    """Two steps and a save are under way when the server dies: the other one gets each after the answer to the last."""

    asked: list[tuple[str, str]] = []

    def behaviour(name: str) -> Behaviour:
        def behave(model: str, number: int) -> str:
            asked.append((name, model))
            return "wait" if name == "lost" else "ok"

        return behave

    lost, other = FakeTriton(behaviour("lost")), FakeTriton(behaviour("other"))
    async with lost, other, client_of(lost, other) as client:
        work: list[asyncio.Task[Any]] = []
        for step, model in enumerate((CRITIC_TRAIN, CRITIC_SAVE, CRITIC_TRAIN), 1):
            call = client.save if model == CRITIC_SAVE else _training(client)
            work.append(asyncio.create_task(call(run_id="r", step=step)))
            await until(lambda: lost.in_flight == len(work))
        await lost.stop()
        await asyncio.gather(*work)
        assert asked[:3] == [("lost", CRITIC_TRAIN), ("lost", CRITIC_SAVE), ("lost", CRITIC_TRAIN)]
        assert asked[3:] == [("other", CRITIC_TRAIN), ("other", CRITIC_SAVE), ("other", CRITIC_TRAIN)]
        assert other.most_in_flight == 1


def _training(client: TritonClient) -> Callable[..., Coroutine[Any, Any, Any]]:
    return lambda **identity: client.train(training_inputs(seed=1), **identity)


# ---- the end ----


async def test_closing_cancels_what_is_asked_and_what_comes_too_late():
    async with FakeTriton(lambda *_: "hang") as server:
        async with client_of(server, max_in_flight=2) as client:
            asking = [asyncio.create_task(client.rewards(ROWS)) for _ in range(4)]
            asking.append(asyncio.create_task(client.train(training_inputs(seed=1), run_id="r", step=1)))
            await until(lambda: server.in_flight == 2)
            late = asyncio.create_task(client.rewards(ROWS))
        assert all(task.cancelled() for task in asking)
        with pytest.raises(asyncio.CancelledError):
            await late
    assert len(asyncio.all_tasks()) == 1


STOPPED = """
import asyncio, logging, signal, sys
import numpy as np
from python_backend.client.client import TritonClient
from python_backend.config import ClientSection

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.default_int_handler)

async def main(url, number, error):
    settings = ClientSection(backoff_s=0.001, deadline_s=60, max_in_flight=3)
    async with TritonClient(url, settings) as client:
        asking = [asyncio.create_task(client.rewards([np.asarray([3, 4])])) for _ in range(5)]
        asking.append(asyncio.create_task(client.train({"tokens": np.zeros((1, 2), int)}, run_id="r", step=1)))
        await asyncio.sleep(0.2)
        if error:
            raise ValueError("as any error of the run")
        signal.raise_signal(number)
        await asyncio.sleep(60)

try:
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "error"))
except (KeyboardInterrupt, ValueError) as error:
    print("ended by", type(error).__name__)
"""


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "error"])
@pytest.mark.parametrize("state", ["hanging", "away"])
async def test_nothing_is_left_however_it_ends(how: str, state: str):
    """In a process of its own, with asyncio's debug mode and every warning shown."""
    ended = {"SIGINT": "KeyboardInterrupt", "SIGTERM": "KeyboardInterrupt", "error": "ValueError"}[how]
    number = {"SIGINT": 2, "SIGTERM": 15, "error": 0}[how]

    async with FakeTriton(lambda *_: "hang") as server:
        if state == "away":
            await server.stop()
        command = [sys.executable, "-X", "dev", "-c", STOPPED, server.url, str(number), how]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        output, errors = (text.decode() for text in await process.communicate())
        assert output == f"ended by {ended}\n", errors
        for words in ("destroyed", "nclosed", "never retrieved", "never awaited", "Traceback", "Warning"):
            assert words not in errors, errors
