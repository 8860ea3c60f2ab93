"""`actor.generation.engine: vllm`, against a fake server; test_vllm_run.py has a real one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import FakeVllm
from vllm_setup import END, PROMPTS, VllmSetup, save_policy

from actor.algorithms.batch import importance_weights
from actor.data.rollout import Rollout
from actor.generation.slots import Response
from actor.vllm.generation import VllmGeneration
from python_backend.config import RunConfig


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


async def test_each_renewed_policy_is_loaded_before_it_generates(tmp_path: Path, checkpoint: Path):
    async with FakeVllm() as server:
        here = VllmSetup(tmp_path, checkpoint, [server.url])
        responses = await asyncio.to_thread(here.run)
        assert {row: response.tokens for row, response in responses.items()} == {row: END for row in range(3)}
        assert all(response.ended and response.logprobs == [-0.5] * 4 for response in responses.values())
        await asyncio.to_thread(here.run)
        assert [path.name for path in server.loaded] == ["1"], "loaded once for both"
        here.policy.renew_sampler()
        await asyncio.to_thread(here.run)
        assert len(server.loaded) == 1, "unchanged weights are not written again"
        for version in ("2", "3"):
            here.update()
            await asyncio.to_thread(here.run)
            assert server.loaded[-1].name == version
            assert (server.loaded[-1] / "model.safetensors").is_file()
        kept = {path.name for path in server.loaded[-1].parent.iterdir()}
        assert kept == {"2", "3", "CURRENT", f"{server.url}.lock"}
        assert server.calls.count("/resume") == server.calls.count("/pause") == 3


async def test_sampling_settings_reach_the_server(tmp_path: Path, checkpoint: Path):
    settings = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_new_tokens": 2, "stop_strings": ["zz"]}
    async with FakeVllm() as server:
        here = VllmSetup(tmp_path, checkpoint, [server.url], generation={**base(server), **settings})
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


def base(server: FakeVllm) -> dict[str, Any]:
    return {"engine": "vllm", "max_new_tokens": 8, "vllm": {"servers": [server.url], "deadline_s": 20}}


async def test_a_response_at_its_longest_has_not_ended(tmp_path: Path, checkpoint: Path):
    async with FakeVllm() as server:
        here = VllmSetup(tmp_path, checkpoint, [server.url])
        server.answer = lambda request: {"token_ids": [5] * 8, "finish_reason": "length"}
        assert (await asyncio.to_thread(here.run))[0] == Response([5] * 8, False, [-0.5] * 8)


async def test_adapters_are_published_alone_and_replaced(tmp_path: Path, checkpoint: Path):
    async with FakeVllm() as server:
        here = VllmSetup(tmp_path, checkpoint, [server.url], policy={"lora_rank": 2})
        for _ in range(2):
            here.update()
            await asyncio.to_thread(here.run)
        assert len(server.adapters) == 1, "the adapter before it is unloaded"
        assert server.requests[-1]["model"] == server.adapters[0] == server.weights
        written = {path.name for path in server.loaded[-1].iterdir()}
        assert "adapter_model.safetensors" in written
        assert "model.safetensors" not in written


@pytest.mark.parametrize("lora_rank", [0, 2], ids=["all weights", "adapters"])
async def test_ranks_load_each_version_once(tmp_path: Path, checkpoint: Path, lora_rank: int):
    """Each rank of the actor has connections of its own to every server."""

    async with FakeVllm() as server:
        here = VllmSetup(tmp_path, checkpoint, [server.url], policy={"lora_rank": lora_rank})
        other = VllmGeneration(here.config, here.policy)  # which publishes nothing
        for version in range(1, 4):
            await asyncio.gather(asyncio.to_thread(here.run), asyncio.to_thread(run_all, other))
            assert [path.name for path in server.loaded] == [str(n + 1) for n in range(version)]
            here.update()


def run_all(generation: VllmGeneration) -> None:
    generation.run(PROMPTS, lambda row, response: None, seed=4)


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
        ({"engine": "vllm", "min_new_tokens": 3, "vllm": {"importance_cap": 2}}, r"min_new_tokens \(3\)"),
    ],
)
def test_importance_weights_need_comparable_logprobs(generation: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        RunConfig.model_validate({"actor": {"policy": {"device": "cpu"}, "generation": generation}})
