"""Generation on a card: host waits and kernels of a decoding step, the cache, streams, threads, and lack of memory."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simcuda
import torch
from live_system import make_tokenizer
from rlhf_triton.actor.data.rollout import Prompt, Rollout
from simulated_cuda.device import memory_limit
from simulated_cuda.streams import Stream
from simulated_cuda.threads import recorded_launches
from simulated_cuda.trace import Trace
from tiny_checkpoints import save_tiny
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rlhf_triton.actor.data.compute import in_a_thread_of
from rlhf_triton.actor.generation.slots import Decoder
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.run.policies import _sample
from rlhf_triton.learning.ranks import RankLost
from rlhf_triton.python_backend.models.adapters import MergedWeights, with_merged_layers
from rlhf_triton.python_backend.models.card import OutOfMemory
from tests.support.policy_training import TrainablePolicy, train, trainable_policy

PROMPTS = [Prompt(str(i), "", np.arange(5, 5 + length)) for i, length in enumerate((4, 6, 5, 7, 4, 9))]
MOST_WAITS = 2  # a decoding step: one copy to the card, one to the host
MOST_KERNELS = 50  # of one layer and token, with adapters
CARD, DEVICE = 1, "cuda:1"
attention = torch.nn.functional.scaled_dot_product_attention


def make_policy(checkpoint: Path, **settings: Any) -> TrainablePolicy:
    given = {"device": DEVICE, "precision": "bfloat16", "max_new_tokens": 8, "generation_batch_size": 4, **settings}
    policy = trainable_policy(model=checkpoint, **given)
    policy.generation._eos_ids = []  # so that each response has all its tokens
    return policy


def generate(policy: Policy, **settings: Any) -> Rollout:
    return policy.generate(PROMPTS, **{"seed": 1, **settings})


def traced_steps(policy: Policy, **settings: Any) -> list[Trace]:
    """What is counted in each step of decoding."""
    step, traces = Decoder._write_on, []

    def traced(decoder: Decoder) -> None:
        with Trace() as trace:
            step(decoder)
        traces.append(trace)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "_write_on", traced)
        generate(policy, **settings)
    return traces


@pytest.mark.parametrize(
    ("settings", "greedy"),
    [
        ({}, False),
        ({"precision": "float32"}, True),
        ({"repetition_penalty": 1.3, "min_new_tokens": 4, "temperature": 0.7, "top_k": 20, "top_p": 0.9}, False),
        ({"lora_rank": 2, "repetition_penalty": 1.3, "min_new_tokens": 4}, True),
    ],
    ids=str,
)
def test_a_decoding_step_waits_for_the_card_twice_at_most(checkpoint: Path, settings: dict[str, Any], greedy: bool):
    policy = make_policy(checkpoint, **settings)
    generate(policy)  # slot-based decoding is proven now
    traces = traced_steps(policy, greedy=greedy)
    assert len(traces) > 8
    assert max(trace.num_waits for trace in traces) <= MOST_WAITS, traces[0].where


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_decoding_is_proven_with_the_kernels_that_run(tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch):
    """Here the attention of masked rows is wrong in bfloat16 only."""
    save_tiny(tmp_path, "llama", "language", vocab_size=200, max_position_embeddings=64, hidden_size=128)
    make_tokenizer().save_pretrained(tmp_path)
    right = make_policy(tmp_path, precision=precision)
    generate(right)
    assert (right._shares_prompts, right.generation._decodes) == (True, True)

    def wrong(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **others: Any) -> Tensor:
        found = attention(query, key, value, attn_mask, **others)
        return found if attn_mask is None or value.dtype != torch.bfloat16 else -2 * found

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrong)
    policy = make_policy(tmp_path, precision=precision)
    generate(policy)
    assert (policy._shares_prompts, policy.generation._decodes) == (precision == "float32",) * 2


def fused_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, **others: Any) -> Tensor:
    """Attention as a card computes it: the mask becomes one of numbers, and the rest is one kernel.

    The simulated card has no fused attention, whose parts would count one by one.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    if attn_mask is not None:
        attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(value.dtype)
    with _disable_current_modes():
        attended = attention(query, key, value, attn_mask, **others)
    return attended.clone()  # counts as the kernel


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_merged_adapters_cost_no_kernels_in_decoding(checkpoint: Path, precision: str, monkeypatch: pytest.MonkeyPatch):
    """Counted per layer, as the difference between a model with all layers and one with a layer less."""
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fused_attention)
    numbers = []
    for lora_rank in (0, 2):
        policy = make_policy(checkpoint, precision=precision, lora_rank=lora_rank)
        causal = policy.causal(policy.sampler)
        generate(policy)
        whole = max(trace.kernels for trace in traced_steps(policy))
        causal.base_model.layers.pop(-1)
        causal.config.num_hidden_layers -= 1
        numbers.append(whole - max(trace.kernels for trace in traced_steps(policy)))
    assert 20 < numbers[0] == numbers[1] <= MOST_KERNELS


@pytest.mark.parametrize(("precision", "one_step_off_policy"), [("float32", False), ("bfloat16", True)])
def test_adapters_are_merged_for_decoding_only(checkpoint: Path, precision: str, one_step_off_policy: bool):
    policy = make_policy(checkpoint, precision=precision, lora_rank=4, lr=1e-2, one_step_off_policy=one_step_off_policy)
    for _ in range(3):
        train(policy, generate(policy))
    policy.renew_sampler()
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    addresses = {name: tensor.data_ptr() for name, tensor in policy.sampler.state_dict().items()}
    rollout = generate(policy)
    assert policy.generation._decodes
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.model.state_dict().items())
    assert {name: tensor.data_ptr() for name, tensor in policy.sampler.state_dict().items()} == addresses
    assert rollout.logprobs is not None
    apart = policy.logprobs(rollout)
    assert float((apart - policy.logprobs(rollout, reference=True)).abs().max()) > 0.15  # the adapters matter
    torch.testing.assert_close(rollout.logprobs, apart, rtol=0, atol=1e-4 if precision == "float32" else 0.1)
    causal = policy.causal(policy.sampler)
    weights = dict(MergedWeights(causal))
    with with_merged_layers(causal):
        layers = {f"{path}.weight": layer for path, layer in causal.named_modules() if hasattr(layer, "lora_A")}
        assert len(layers) > 4
        for name, layer in layers.items():
            merged = layer.get_base_layer().weight
            assert torch.equal(merged.cpu(), weights[name].to(merged.dtype))


def test_a_card_without_room_for_merged_layers_decodes_with_adapters_apart(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    policy = make_policy(checkpoint, precision="float32", lora_rank=4)
    expected = generate(policy)
    layer = next(layer for layer in policy.sampler.modules() if hasattr(layer, "lora_A"))
    sizes, merge = [], type(layer).get_delta_weight

    def limited(layer: Any, adapter: str) -> torch.Tensor:
        sizes.append(1)
        if len(sizes) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return merge(layer, adapter)

    monkeypatch.setattr(type(layer), "get_delta_weight", limited)
    assert torch.equal(generate(policy).tokens, expected.tokens)
    assert "generation keeps the adapters apart" in caplog.text
    assert policy.generation.memory.count == 0
    assert not any(layer.merged for layer in policy.sampler.modules() if hasattr(layer, "lora_A"))


@pytest.mark.parametrize("engine", ["slots", "transformers"])
def test_generation_that_runs_out_of_memory_goes_on_with_fewer_slots_and_the_same_tokens(
    checkpoint: Path, engine: str, caplog: pytest.LogCaptureFixture
):
    settings = {"precision": "float32", "generation_batch_size": 6, "max_new_tokens": 60, "engine": engine}
    expected = generate(make_policy(checkpoint, **settings))
    policy = make_policy(checkpoint, **settings)
    generate(policy, greedy=True)
    simcuda.reset_peak(CARD)
    before = simcuda.allocated(CARD)
    generate(policy)
    needed = simcuda.peak(CARD) - before
    ended: list[int] = []
    with memory_limit(CARD, before + needed // 2):
        rollout = generate(policy, finished=lambda index, _: ended.append(index))
    assert policy.generation.memory.count >= 1
    assert policy.generation.memory.size < 6
    assert torch.equal(rollout.tokens, expected.tokens)
    assert sorted(ended) == list(range(len(PROMPTS)))  # each row is reported once
    assert "actor.generation.batch_size" in caplog.text
    with memory_limit(CARD, before + 1), pytest.raises(OutOfMemory, match=r"actor\.generation\.max_new_tokens$"):
        generate(policy)


def test_lack_of_memory_in_the_proof_does_not_choose_the_slower_engine(checkpoint: Path):
    policy = make_policy(checkpoint)
    with memory_limit(CARD, simcuda.allocated(CARD) + 1), pytest.raises(OutOfMemory):
        generate(policy)
    policy.generation.memory.size = 4
    generate(policy)
    assert policy.generation._decodes


def test_a_copy_generates_on_a_stream_of_its_own_which_waits_and_is_waited_for(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    def streams_of(work: Callable[[], Any]) -> set[tuple[int, int]]:
        with Trace(places=False) as trace:
            work()
        return set(trace.streams)

    policy = make_policy(checkpoint)
    assert streams_of(lambda: policy.logprobs(generate(policy))) == {(CARD, 0)}
    policy, waits = make_policy(checkpoint, one_step_off_policy=True), []
    own = policy._stream._stream
    monkeypatch.setattr(Stream, "wait_stream", lambda self, other: waits.append((self.stream_id, other.stream_id)))
    assert streams_of(lambda: generate(policy)) == {(CARD, own.stream_id)}
    assert own.priority < 0
    assert waits == [(own.stream_id, 0), (0, own.stream_id)], "for what was queued before, and for its results"
    assert streams_of(lambda: policy.logprobs(generate(policy))) == {(CARD, own.stream_id)}
    assert (CARD, 0) in streams_of(lambda: train(policy, generate(policy)))


def test_the_thread_that_samples_for_other_ranks_uses_their_card():
    class Sampling:
        """Stands in for the policy of a rank; what its thread does first ends it."""

        sampler, found = SimpleNamespace(device=torch.device("cuda:2")), list[int]()

        def follow_sampling(self) -> None:
            self.found.append(torch.cuda.current_device())
            raise RankLost

    thread = threading.Thread(target=_sample, args=(Sampling(), 1))
    thread.start()
    thread.join()
    assert Sampling.found == [2]


def test_threads_of_the_actor_use_the_card_of_the_policy(checkpoint: Path):
    policy = make_policy(checkpoint)
    in_thread = in_a_thread_of(1, policy.sampler.device)

    async def run() -> int:
        await in_thread(policy.generate, PROMPTS, seed=1)
        return int(await in_thread(torch.cuda.current_device))

    with recorded_launches() as record:
        assert asyncio.run(run()) == 1
    compute = [each for each in record.launches if each.thread.startswith("compute")]
    assert sum(each.kernels for each in compute) > 100
    assert [each for each in compute if each.current != each.card] == []
