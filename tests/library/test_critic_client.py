"""The critic client for other trainers, with a fake server: rows, misuse, threads, closing, failures."""

import asyncio
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from aiohttp import web
from fake_triton import FakeTriton

from rlhf_triton import (
    AsyncCriticClient,
    AsyncRewardClient,
    ClientSettings,
    ContractError,
    CriticClient,
)
from rlhf_triton.client.rows import training_arrays
from rlhf_triton.errors import RlhfError
from rlhf_triton.wire.contract import Limits, VersionRange
from rlhf_triton.wire.training_payload import train_payload

ROWS = [[5, 6, 7]]
UPDATE = (ROWS, [[1.0, 2.0]], [[0.5, 1.5]], [[0, 1]])  # tokens, returns, prev_values, mask
QUICK = ClientSettings(max_outage_s=0.0)


def play(call, behaviour=lambda *_: "ok"):
    """Return what `call` returns in a thread, with a client of a fake server."""

    async def run():
        async with FakeTriton(behaviour) as fake:

            def body():
                with CriticClient(fake.url, run_id="mine", settings=QUICK) as critic:
                    return call(critic)

            return await asyncio.to_thread(body)

    return asyncio.run(run())


# ---- rows ----


def test_training_rows_of_lists_arrays_and_tensors_become_one_payload():
    rows = [[1, 2, 3, 4], np.asarray([5, 6], np.int32), torch.tensor([7, 8, 9])]
    targets = [[0.5, 1.5, 2.5], np.asarray([3.5]), torch.tensor([4.5, 5.5])]
    payload = train_payload(training_arrays(rows, targets, targets, [[1, 1, 0], [1], [True, True]]), Limits(10))
    assert (payload.tokens.tolist(), payload.lengths.tolist()) == ([*range(1, 10)], [4, 2, 3])
    for found in (payload.returns, payload.prev_values):
        assert found.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    assert payload.mask.tolist() == [1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({0: []}, r"^tokens: no rows"),
        ({0: [5, 6, 7]}, r"^tokens\[0\]: shape \[\] of int64, must be the numbers of one row"),
        ({0: [[]]}, r"^tokens\[0\]: empty"),
        ({0: [[5.0, 6.0, 7.0]]}, r"^tokens\[0\]: float64 numbers, must be integers"),
        ({1: [[1.0, 2.0, 3.0]]}, r"^returns\[0\]: 3 entries, must be 2, one fewer than tokens\[0\]"),
        ({1: [[1.0, float("nan")]]}, r"^returns\[0\]\[1\]: nan, must be a finite float32"),
        ({1: [torch.ones(2, requires_grad=True)]}, r"^returns\[0\]: .*detach"),
        ({3: [[1, -1]]}, r"^mask\[0\]\[1\]: -1, must not be negative"),
        ({3: [[0, 0]]}, r"^mask: all 0, must be above 0 for at least one token"),
    ],
)
def test_invalid_training_rows_are_refused_by_field_and_index(change, told):
    with pytest.raises(ContractError, match=told):
        training_arrays(*(change.get(i, given) for i, given in enumerate(UPDATE)))


def test_critic_client_raises_on_non_finite_values(monkeypatch):
    def call(critic):
        monkeypatch.setattr(critic._client._client, "score", not_finite)
        with pytest.raises(RlhfError, match=r"values\[0\]: the critic returned numbers that are not finite"):
            critic.values(ROWS)

    async def not_finite(rows, outputs, **_):
        return {"values": np.asarray([[1.0, np.inf, 0.0]]), "weights_version": np.asarray([[3]])}

    play(call)


# ---- calls ----


def test_critic_client_sends_the_demanded_version(monkeypatch):
    def call(critic):
        infer = critic._client._client._infer
        demanded = []

        async def noted(*arguments, **more):
            demanded.append(more["versions"])
            return await infer(*arguments, **more)

        monkeypatch.setattr(critic._client._client, "_infer", noted)
        for ask in (critic.values, critic.score):
            ask(ROWS, min_version=np.int64(7))
            ask(ROWS, exact_version=7)
            ask(ROWS)
        assert demanded == [VersionRange(7), VersionRange(7, 7), None] * 2
        with pytest.raises(ContractError, match=r"^min_version: -1, must be an integer of at least 0"):
            critic.values(ROWS, min_version=-1)

    play(call)


def test_critic_client_scores_trains_saves_and_rewinds():
    def call(critic):
        with ThreadPoolExecutor(8) as threads:
            for scored in threads.map(lambda _: critic.values(ROWS), range(32)):
                assert ([row.tolist() for row in scored.values], scored.weights_version) == ([[0.5, 1.5, 2.5]], 7)
        for early in (lambda: critic.train(1, *UPDATE), lambda: critic.save(1)):
            with pytest.raises(RlhfError, match=r"call rewind first: rewind\(0\) begins a run"):
                early()
        assert critic.rewind(0) == 7
        for wrong in (0.5, "1", True, None, 2**63):  # never another step than was meant
            for ask in (critic.rewind, critic.save, lambda step: critic.train(step, *UPDATE)):
                with pytest.raises(ContractError, match=r"must be an integer of at least 0"):
                    ask(wrong)
        with pytest.raises(ContractError, match=r"^keep_steps: 1.5, must be an integer"):
            critic.save(1, keep_steps=[1.5])
        answer = critic.train(1, *UPDATE)
        assert (answer.loss_mean, answer.weights_version) == (0.25, 7)
        assert critic.save(1, keep_steps=[1]) == 7
        critic.close()
        with pytest.raises(RlhfError, match="the client is closed; make another one"):
            critic.values(ROWS)

    play(call)


def test_async_critic_calls_overlap():
    async def run():
        async with FakeTriton(lambda model, number: "wait" if model == "critic_infer" else "ok") as server:
            async with AsyncCriticClient([server.url], run_id="mine", settings=QUICK) as critic:
                asked = [asyncio.create_task(critic.values(ROWS)) for _ in range(3)]
                while server.in_flight < 3:
                    await asyncio.sleep(0.001)
                await critic.rewind(0)
                server.go.set()
                assert [found.weights_version for found in await asyncio.gather(*asked)] == [7] * 3
            with pytest.raises(RlhfError, match="the client is closed"):
                await critic.values(ROWS)

    asyncio.run(run())


# ---- wrong use ----


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"url": "http://localhost:8000"}, r"url: 'http://localhost:8000', must be host:port"),
        ({"url": []}, r"url: \[\]"),
        ({"run_id": ""}, "run_id: ''"),
        ({"run_id": None}, "run_id: None"),
        ({"settings": {"deadline_s": 1}}, r"settings: \{'deadline_s': 1\}, must be a rlhf_triton.ClientSettings"),
        ({"training_key": "secret\n"}, "^training_key: must be a text of one line, without its line end$"),
        ({"training_key": b"secret"}, "training_key: must be a text"),
    ],
)
def test_wrong_argument_raises_at_construction(given, told):
    before = threading.active_count()
    for kind in (CriticClient, AsyncCriticClient):
        with pytest.raises(ContractError, match=told):
            kind(**{"url": "localhost:8000", "run_id": "mine", **given})
    assert threading.active_count() == before


class NoModels(FakeTriton):
    async def _config(self, request):
        return web.json_response({"error": "Request for unknown model: 'any' is not found"}, status=400)


async def test_server_without_the_clients_model_is_refused_with_the_missing_section():
    async with NoModels() as server, AsyncRewardClient(server.url, settings=QUICK) as reward:
        with pytest.raises(RlhfError, match=r"serves no reward: its YAML needs a section `reward`.*not found"):
            await reward.score(["a"])
        async with AsyncCriticClient(server.url, run_id="mine", settings=QUICK) as critic:
            with pytest.raises(RlhfError, match=r"serves no critic: its YAML needs a section `critic`.*not found"):
                await critic.values(ROWS)


def test_blocking_client_works_inside_a_running_event_loop():
    """The cells of a notebook run in an event loop."""

    def call(critic):
        async def cell():
            return critic.values(ROWS).weights_version

        assert asyncio.run(cell()) == 7

    play(call)


def test_futures_return_the_answers_of_values_and_train():
    def call(critic):
        critic.rewind(0)
        futures = [critic.values_future(ROWS), critic.train_future(1, *UPDATE)]
        assert [found.result().weights_version for found in futures] == [7, 7]

    play(call)


def test_async_client_refuses_use_in_another_event_loop():
    async def run():
        async with FakeTriton() as server, AsyncCriticClient(server.url, run_id="mine", settings=QUICK) as critic:
            await critic.values(ROWS)
            with pytest.raises(RlhfError, match="used in another event loop"):
                await asyncio.to_thread(lambda: asyncio.run(critic.values(ROWS)))

    asyncio.run(run())


def test_async_client_closes_although_a_cancelled_caller_waits_for_the_close():
    async def run():
        async def call():
            try:
                await critic.values(ROWS)
            finally:
                await closing

        async with FakeTriton(lambda model, number: "hang") as server:
            critic = AsyncCriticClient(server.url, run_id="mine", settings=QUICK)
            caller = asyncio.create_task(call())
            while not server.asked:
                await asyncio.sleep(0)
            closing = asyncio.create_task(critic.close())
            done, _ = await asyncio.wait([closing], timeout=10)
            caller.cancel()
            assert done, "the close waits for its caller's whole task"
            with pytest.raises(asyncio.CancelledError):
                await caller

    asyncio.run(run())


def test_critic_client_refuses_to_be_sent_to_another_process():
    with CriticClient("127.0.0.1:1", run_id="mine") as critic, pytest.raises(RlhfError, match="make one there"):
        pickle.dumps(critic)


def test_critic_client_refuses_use_in_a_forked_process():
    with CriticClient("127.0.0.1:1", run_id="mine", settings=QUICK) as critic:
        pid = os.fork()
        if pid == 0:
            try:
                critic.values(ROWS)
            except RlhfError as error:
                critic.close()  # as a `with` does; it does not wait for the parent's thread
                os._exit(0 if "another process" in str(error) else 2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_close_ends_pending_calls_of_other_threads():
    def call(critic):
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(critic.values, ROWS)
            while not sent.wait(0.001):
                pass
            critic.close()
            with pytest.raises(RlhfError, match="closed before the answer arrived"):
                waiting.result()

    def behaviour(model, number):
        sent.set()
        return "hang"

    sent = threading.Event()
    play(call, behaviour)
