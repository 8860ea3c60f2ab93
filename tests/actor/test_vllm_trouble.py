"""`actor.generation.engine: vllm`, against servers that fail on demand."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FakeVllm
from vllm_setup import END, PROMPTS, VllmSetup, save_policy

from python_backend.client.errors import RequestFailed
from python_backend.config import ConfigError
from python_backend.errors import RlhfError
from tests.support.loaders import skip_on_cards


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


async def test_a_response_that_was_cut_off_is_generated_again(tmp_path: Path, checkpoint: Path):
    """vLLM answers 200 with the tokens so far when another client pauses it."""

    async with FakeVllm() as server:
        here = VllmSetup(tmp_path, checkpoint, [server.url])

        def aborted(request: dict[str, Any]) -> dict[str, Any]:
            server.answer = lambda request: {}
            return {"token_ids": [5], "finish_reason": "abort"}

        server.answer = aborted
        responses = await asyncio.to_thread(here.run)
        assert [response.tokens for response in responses.values()] == [END] * 3


async def test_broken_connections_cost_nothing(tmp_path: Path, checkpoint: Path):
    async with FakeVllm() as server:
        server.drops = 4
        responses = await asyncio.to_thread(VllmSetup(tmp_path, checkpoint, [server.url]).run)
        assert len(responses) == 3


async def test_a_restarted_server_loads_the_version_again(tmp_path: Path, checkpoint: Path):
    """It answers with the weights that it was started with; such a response is thrown away."""

    async with FakeVllm() as server:
        here = VllmSetup(tmp_path, checkpoint, [server.url])

        def restarted(request: dict[str, Any]) -> dict[str, Any]:
            server.answer = lambda request: {}
            server.weights = "initial"
            return {"weight_versions": [{"version": "initial", "start": 0, "end": 4}], "token_ids": [9, 9, 9, 1]}

        server.answer = restarted
        responses = await asyncio.to_thread(here.run)
        assert [response.tokens for response in responses.values()] == [END] * 3
        assert len(server.loaded) >= 2


async def test_a_server_that_goes_away_is_waited_for(tmp_path: Path, checkpoint: Path):
    async with FakeVllm() as server:
        here = VllmSetup(tmp_path, checkpoint, [server.url])
        server.is_hanging = True
        running = asyncio.create_task(asyncio.to_thread(here.run))
        while len(server.requests) < 3:
            await asyncio.sleep(0.001)
        await server.stop()
        server.is_hanging = False
        await server.start()
        assert len(await running) == 3
        assert len(server.loaded) == 2


async def test_another_server_takes_over(tmp_path: Path, checkpoint: Path):
    async with FakeVllm() as one, FakeVllm() as two:
        here = VllmSetup(tmp_path, checkpoint, [one.url, two.url])
        await asyncio.to_thread(here.run)
        assert all(server.requests for server in (one, two)), "requests are balanced"
        await one.stop()
        before = len(two.requests)
        assert len(await asyncio.to_thread(here.run)) == 3
        assert len(two.requests) == before + 3
        await one.start()


async def test_a_server_that_does_not_load_costs_one_timeout(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its waiting rows share one attempt; each of them tried for itself, one after the other."""
    monkeypatch.setattr("actor.vllm.connection.PROBE_S", 0.5)

    async with FakeVllm() as one, FakeVllm() as two:
        one.silent = {"/version"}
        here = VllmSetup(tmp_path, checkpoint, [one.url, two.url])
        many = [*PROMPTS] * 20
        responses: list[int] = []
        await asyncio.to_thread(
            here.generation.run, many, lambda row, response: responses.append(row), seed=0, greedy=True
        )
        assert sorted(responses) == list(range(len(many)))
        assert one.calls.count("/version") <= 4, "an attempt, and the probes of a lost server"


async def test_a_server_that_comes_back_unusable_is_an_error(
    tmp_path: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
):
    async with FakeVllm() as server:
        here = VllmSetup(tmp_path, checkpoint, [server.url], max_outage_s=600)
        server.is_hanging = True
        running = asyncio.create_task(asyncio.to_thread(here.run))
        while len(server.requests) < 3:
            await asyncio.sleep(0.001)
        await server.stop()
        while "no healthy server" not in caplog.text:
            await asyncio.sleep(0.001)
        server.missing = {"/pause", "/weight_info"}  # started without VLLM_SERVER_DEV_MODE
        await server.start()
        with pytest.raises(RlhfError, match="start it with VLLM_SERVER_DEV_MODE=1"):
            await running


async def test_a_run_that_is_closed_while_it_loads_resumes_the_server(tmp_path: Path, checkpoint: Path):
    async with FakeVllm() as server:
        here = VllmSetup(tmp_path, checkpoint, [server.url])
        server.silent = {"/collective_rpc"}
        running = asyncio.create_task(asyncio.to_thread(here.run))
        while "/collective_rpc" not in server.calls:
            await asyncio.sleep(0.001)
        here.policy.close()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert server.calls[-1] == "/resume"


async def test_a_server_that_stays_away_is_an_error(tmp_path: Path, checkpoint: Path):
    async with FakeVllm() as server:
        here = VllmSetup(tmp_path, checkpoint, [server.url], max_outage_s=0.05)
    with pytest.raises(RequestFailed, match="vLLM: no healthy server for"):
        await asyncio.to_thread(here.run)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"release": "0.9.2"}, "is vLLM 0.9.2; 0.32 or newer is needed"),
        ({"missing": {"/weight_info"}}, "has no /weight_info: start it with VLLM_SERVER_DEV_MODE=1"),
        ({"missing": {"/pause"}}, "has no /pause: start it with VLLM_SERVER_DEV_MODE=1"),
        ({"missing": {"/inference/v1/generate"}}, "does not take token ids: start it with --enable-scale-out"),
        ({"logprobs_mode": "raw_logprobs"}, "returns raw_logprobs, .*: start it with --logprobs-mode processed_logp"),
        ({"answer": lambda request: {"token_ids": [5, 0, 1]}}, "generated the tokens \\[0\\]"),
    ],
)
async def test_an_unusable_server_is_an_error_of_one_sentence(
    tmp_path: Path, checkpoint: Path, change: dict[str, Any], words: str
):
    async with FakeVllm() as server:
        for name, value in change.items():
            setattr(server, name, value)
        here = VllmSetup(tmp_path, checkpoint, [server.url])
        here.generation._banned_ids = [0]
        with pytest.raises(RlhfError, match=words):
            await asyncio.to_thread(here.run)


async def test_adapters_are_refused_on_top_of_the_weights_of_another_run(tmp_path: Path, checkpoint: Path):
    """They would generate with a base model that is not theirs."""

    async with FakeVllm() as server:
        await asyncio.to_thread(VllmSetup(tmp_path, checkpoint, [server.url]).run)
        here = VllmSetup(tmp_path, checkpoint, [server.url], policy={"lora_rank": 2})
        with pytest.raises(RlhfError, match=r"has the weights of another run .* restart it"):
            await asyncio.to_thread(here.run)


def test_a_run_without_servers_is_an_error(tmp_path: Path, checkpoint: Path):
    skip_on_cards("a configuration that starts vLLM on the policy's machine must name its GPUs first")
    with pytest.raises(ConfigError, match=r"actor\.generation\.vllm\.servers: empty"):
        VllmSetup(tmp_path, checkpoint, [])
