"""`actor.generation.engine: vllm`, against a server that fails on demand; test_vllm_run.py has a real one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_vllm import FakeVllm
from tiny_checkpoints import VOCAB, save_tiny

from actor.algorithms.experience import importance_weights
from actor.data.rollout import Rollout
from actor.generation.slots import Response
from actor.policy.policy import Policy
from actor.scoring.retry import RequestFailed
from actor.vllm.connection import VllmUnusable
from actor.vllm.generation import VllmGeneration
from benchmarks.support.workload import word_tokenizer
from python_backend.config import ConfigError, RunConfig

PROMPTS = [np.asarray([3, 4]), np.asarray([5]), np.asarray([6, 7, 8])]
END = [5, 6, 7, 1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    save_tiny(folder, "llama", "language", eos_token_id=1)
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, VOCAB))]
    word_tokenizer(words, eos="<eos>", unknown="<pad>").save_pretrained(folder)
    return folder


class Scene:
    """A policy in `folder` that generates with fake servers."""

    def __init__(self, folder: Path, checkpoint: Path, servers: list[str], **changes: Any) -> None:
        generation = {"engine": "vllm", "max_new_tokens": 8, "vllm": {"servers": servers, "deadline_s": 20}}
        generation |= changes.pop("generation", {})
        actor = {
            "policy": {"checkpoint": str(checkpoint), **changes.pop("policy", {})}, "generation": generation,
            "prompts": {"max_tokens": 8}, "client": {"backoff_s": 0.001, "max_outage_s": 10, **changes},
        }  # fmt: skip
        self.config = RunConfig.model_validate({"run": {"dir": str(folder)}, "actor": actor})
        self.policy = Policy.of(self.config.actor)
        self.generation = self.policy.generation = VllmGeneration(self.config, self.policy)

    def run(self, *, seed: int = 3, greedy: bool = False) -> dict[int, Response]:
        """Generate a response to each of PROMPTS."""
        responses: dict[int, Response] = {}
        self.generation.run(PROMPTS, lambda row, response: responses.update({row: response}), seed=seed, greedy=greedy)
        return responses


def scene(play: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(play(), 120))


def test_each_renewed_policy_is_loaded_before_it_generates(tmp_path: Path, checkpoint: Path):
    async def play() -> None:
        async with FakeVllm() as server:
            here = Scene(tmp_path, checkpoint, [server.url])
            responses = await asyncio.to_thread(here.run)
            assert {row: response.tokens for row, response in responses.items()} == {row: END for row in range(3)}
            assert all(response.ended and response.logprobs == [-0.5] * 4 for response in responses.values())
            await asyncio.to_thread(here.run)
            assert [path.name for path in server.loaded] == ["1"], "loaded once for both"
            for version in ("2", "3"):
                here.policy.renew_sampler()
                await asyncio.to_thread(here.run)
                assert server.loaded[-1].name == version
                assert (server.loaded[-1] / "model.safetensors").is_file()
            assert sorted(path.name for path in server.loaded[-1].parent.iterdir()) == ["2", "3", "CURRENT"]
            assert server.calls.count("/resume") == server.calls.count("/pause") == 3

    scene(play)


def test_sampling_settings_reach_the_server(tmp_path: Path, checkpoint: Path):
    async def play() -> None:
        settings = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_new_tokens": 2, "stop_strings": ["zz"]}
        async with FakeVllm() as server:
            here = Scene(tmp_path, checkpoint, [server.url], generation={**base(server), **settings})
            responses = await asyncio.to_thread(here.run)
            assert responses[0].logprobs is None, "vLLM's are those after top-k and top-p"
            sent = [request["sampling_params"] for request in server.requests]
            assert {(s["temperature"], s["top_k"], s["top_p"], s["min_tokens"]) for s in sent} == {(0.7, 5, 0.9, 2)}
            assert sent[0]["stop"] == ["zz"]
            assert sent[0]["stop_token_ids"] == here.policy.eos_ids
            banned = {str(token) for token in here.policy.banned_ids}
            assert set(sent[0].get("logit_bias", {})) == banned
            assert len({s["seed"] for s in sent}) == 3, "each row has a seed of its own"
            again = [request["sampling_params"]["seed"] for request in server.requests]
            await asyncio.to_thread(here.run, greedy=True)
            assert sorted(again) == sorted(r["sampling_params"]["seed"] for r in server.requests[3:])
            assert all(r["sampling_params"]["temperature"] == 0.0 for r in server.requests[3:])

    scene(play)


def base(server: FakeVllm) -> dict[str, Any]:
    return {"engine": "vllm", "max_new_tokens": 8, "vllm": {"servers": [server.url], "deadline_s": 20}}


def test_a_response_ends_where_the_own_decoder_would_end_it(tmp_path: Path, checkpoint: Path):
    async def play() -> None:
        async with FakeVllm() as server:
            here = Scene(tmp_path, checkpoint, [server.url])
            server.answer = lambda request: {"token_ids": [5, 1, 6, 7]}
            assert (await asyncio.to_thread(here.run))[0] == Response([5, 1], True, [-0.5, -0.5])
            server.answer = lambda request: {"token_ids": [5] * 8}
            assert (await asyncio.to_thread(here.run))[0] == Response([5] * 8, False, [-0.5] * 8)

    scene(play)


# ---- trouble ----


def test_broken_connections_cost_nothing(tmp_path: Path, checkpoint: Path):
    async def play() -> None:
        async with FakeVllm() as server:
            server.drops = 4
            responses = await asyncio.to_thread(Scene(tmp_path, checkpoint, [server.url]).run)
            assert len(responses) == 3

    scene(play)


def test_a_restarted_server_loads_the_version_again(tmp_path: Path, checkpoint: Path):
    """It answers with the weights that it was started with; such a response is thrown away."""

    async def play() -> None:
        async with FakeVllm() as server:
            here = Scene(tmp_path, checkpoint, [server.url])

            def restarted(request: dict[str, Any]) -> dict[str, Any]:
                server.answer = lambda request: {}
                server.weights = "initial"
                return {"weight_versions": [{"version": "initial", "start": 0, "end": 4}], "token_ids": [9, 9, 9, 1]}

            server.answer = restarted
            responses = await asyncio.to_thread(here.run)
            assert [response.tokens for response in responses.values()] == [END] * 3
            assert len(server.loaded) >= 2

    scene(play)


def test_a_server_that_goes_away_is_waited_for(tmp_path: Path, checkpoint: Path):
    async def play() -> None:
        async with FakeVllm() as server:
            here = Scene(tmp_path, checkpoint, [server.url])
            server.is_hanging = True
            running = asyncio.create_task(asyncio.to_thread(here.run))
            while len(server.requests) < 3:
                await asyncio.sleep(0.001)
            await server.stop()
            server.is_hanging = False
            await server.start()
            assert len(await running) == 3
            assert len(server.loaded) == 2

    scene(play)


def test_another_server_takes_over(tmp_path: Path, checkpoint: Path):
    async def play() -> None:
        async with FakeVllm() as one, FakeVllm() as two:
            here = Scene(tmp_path, checkpoint, [one.url, two.url])
            await asyncio.to_thread(here.run)
            assert all(server.requests for server in (one, two)), "requests are balanced"
            await one.stop()
            before = len(two.requests)
            assert len(await asyncio.to_thread(here.run)) == 3
            assert len(two.requests) == before + 3
            await one.start()

    scene(play)


def test_a_server_that_stays_away_is_an_error(tmp_path: Path, checkpoint: Path):
    async def play() -> None:
        async with FakeVllm() as server:
            here = Scene(tmp_path, checkpoint, [server.url], max_outage_s=0.05)
        with pytest.raises(RequestFailed, match="vLLM: no healthy server for"):
            await asyncio.to_thread(here.run)

    scene(play)


def test_closing_the_policy_ends_a_run_that_waits(tmp_path: Path, checkpoint: Path):
    async def play() -> None:
        async with FakeVllm() as server:
            here = Scene(tmp_path, checkpoint, [server.url])
            server.is_hanging = True
            ended: list[type[BaseException]] = []

            def run() -> None:
                try:
                    here.run()
                except BaseException as error:
                    ended.append(type(error))

            thread = threading.Thread(target=run)
            thread.start()
            while not server.requests:
                await asyncio.sleep(0.001)
            here.policy.close()
            await asyncio.to_thread(thread.join)
            assert ended == [asyncio.CancelledError]

    scene(play)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"release": "0.9.2"}, "is vLLM 0.9.2; 0.32 or newer is needed"),
        ({"missing": {"/weight_info"}}, "has no /weight_info: start it with VLLM_SERVER_DEV_MODE=1"),
        ({"missing": {"/pause"}}, "has no /pause: start it with VLLM_SERVER_DEV_MODE=1"),
        ({"answer": lambda request: {"token_ids": [5, 0, 1]}}, "generated the tokens \\[0\\]"),
    ],
)
def test_an_unusable_server_is_an_error_of_one_sentence(
    tmp_path: Path, checkpoint: Path, change: dict[str, Any], words: str
):
    async def play() -> None:
        async with FakeVllm() as server:
            for name, value in change.items():
                setattr(server, name, value)
            here = Scene(tmp_path, checkpoint, [server.url])
            here.generation._banned_ids = [0]
            with pytest.raises(VllmUnusable, match=words):
                await asyncio.to_thread(here.run)

    scene(play)


def test_adapters_are_published_alone_and_replaced(tmp_path: Path, checkpoint: Path):
    async def play() -> None:
        async with FakeVllm() as server:
            here = Scene(tmp_path, checkpoint, [server.url], policy={"lora_rank": 2})
            for _ in range(2):
                here.policy.renew_sampler()
                await asyncio.to_thread(here.run)
            assert len(server.adapters) == 1, "the adapter before it is unloaded"
            assert server.requests[-1]["model"] == server.adapters[0] == server.weights
            written = {path.name for path in server.loaded[-1].iterdir()}
            assert "adapter_model.safetensors" in written
            assert "model.safetensors" not in written

    scene(play)


def test_adapters_are_refused_on_top_of_the_weights_of_another_run(tmp_path: Path, checkpoint: Path):
    """They would generate with a base model that is not theirs."""

    async def play() -> None:
        async with FakeVllm() as server:
            await asyncio.to_thread(Scene(tmp_path, checkpoint, [server.url]).run)
            here = Scene(tmp_path, checkpoint, [server.url], policy={"lora_rank": 2})
            with pytest.raises(VllmUnusable, match=r"has the weights of another run .* restart it"):
                await asyncio.to_thread(here.run)

    scene(play)


def test_a_run_without_servers_is_an_error(tmp_path: Path, checkpoint: Path):
    with pytest.raises(ConfigError, match=r"actor\.generation\.vllm\.servers: empty"):
        Scene(tmp_path, checkpoint, [])


# ---- importance weights ----


def test_importance_weights_by_hand():
    logprobs = torch.log(torch.tensor([[0.9, 0.5, 0.4, 0.3]]))
    ours = torch.log(torch.tensor([[0.1, 0.25, 0.8, 0.9]]))
    rollout = Rollout([], torch.zeros(1, 5), torch.tensor([4]), torch.tensor([2]), torch.tensor([True]), logprobs)
    weights = importance_weights(rollout, ours, cap=1.5)
    assert weights.tolist() == [[1.0, 0.5, 1.5, 1.0]]  # prompt, 0.25 / 0.5, capped 0.8 / 0.4, beyond the row


@pytest.mark.parametrize(
    ("generation", "words"),
    [
        ({"vllm": {"importance_cap": 2}}, r"actor.generation.vllm.importance_cap \(2\) needs .*engine: vllm"),
        ({"engine": "vllm", "top_k": 5, "vllm": {"importance_cap": 2}}, r"actor.generation.top_k \(5\)"),
    ],
)
def test_importance_weights_need_comparable_logprobs(generation: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        RunConfig.model_validate({"actor": {"generation": generation}})
