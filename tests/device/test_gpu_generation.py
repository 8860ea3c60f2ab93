"""Generation on a GPU: host synchronisations and kernels per decoding step, cache, streams, threads, out of memory."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import simcuda
import torch
from policy_training import train, trainable_policy
from samples import logprobs_of, tokens_of
from simulated_cuda.device import memory_limit
from simulated_cuda.streams import Stream
from simulated_cuda.threads import recorded_launches
from simulated_cuda.trace import Trace

from rlhf_triton.actor.data.compute import ComputeThread
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.rollout_rows import padded, rows_of
from rlhf_triton.actor.generation.slots import Decoder
from rlhf_triton.actor.run.policies import _follow_sampling
from rlhf_triton.models.out_of_memory import OutOfMemory
from rlhf_triton.training_engine.ranks import RankLost

PROMPTS = [Prompt(str(i), "", np.arange(5, 5 + length)) for i, length in enumerate((4, 6, 5, 7, 4, 9))]
MOST_WAITS = 2  # a decoding step: one copy to the GPU, one to the host
GPU = 1
DEVICE = "cuda:1"


def make_policy(checkpoint, **settings):
    given = {"device": DEVICE, "precision": "bfloat16", "max_new_tokens": 8, "generation_batch_size": 4, **settings}
    policy = trainable_policy(model=checkpoint, **given)
    policy.generation._eos_ids = []  # so that each response has all its tokens
    return policy


def generate(policy, **settings):
    return rows_of(policy.generate(PROMPTS, **{"seed": 1, **settings}))


def traced_steps(policy, **settings):
    """Return the counts of each decoding step."""
    step = Decoder._decode_step
    traces = []

    def traced(decoder):
        with Trace() as trace:
            step(decoder)
        traces.append(trace)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "_decode_step", traced)
        generate(policy, **settings)
    return traces


@pytest.mark.parametrize(
    ("settings", "greedy"),
    [
        ({}, False),
        ({"precision": "float32"}, True),
        ({"min_new_tokens": 4, "temperature": 0.7, "top_k": 20, "top_p": 0.9}, False),
        ({"lora_rank": 2, "min_new_tokens": 4}, True),
    ],
    ids=str,
)
def test_decoding_step_synchronises_with_the_gpu_at_most_twice(checkpoint, settings, greedy):
    policy = make_policy(checkpoint, **settings)
    generate(policy)  # slot-based decoding is proven now
    traces = traced_steps(policy, greedy=greedy)
    assert len(traces) > 8
    assert max(trace.num_waits for trace in traces) <= MOST_WAITS, traces[0].where


def test_adapters_are_merged_only_while_decoding_on_a_gpu(checkpoint):
    """They are merged in a copy that generates beside the policy: the policy's weights neither change nor move."""
    policy = make_policy(
        checkpoint, precision="float32", lora_rank=4, lr=1e-2, max_off_policy_steps=1, old_logprobs="sampler"
    )
    for _ in range(3):
        train(policy, generate(policy))
    policy.renew_generator()
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    addresses = {name: tensor.data_ptr() for name, tensor in policy.generator.state_dict().items()}
    rollout = generate(policy)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.model.state_dict().items())
    assert {name: tensor.data_ptr() for name, tensor in policy.generator.state_dict().items()} == addresses
    apart = logprobs_of(policy, rollout)
    assert float((apart - logprobs_of(policy, rollout, reference=True)).abs().max()) > 0.15  # the adapters matter
    torch.testing.assert_close(padded([row.logprobs for row in rollout])[:, 1:], apart, rtol=0, atol=1e-4)


def test_decoding_keeps_adapters_unmerged_if_merging_runs_out_of_memory(checkpoint, caplog, monkeypatch):
    policy = make_policy(checkpoint, precision="float32", lora_rank=4)
    expected = generate(policy)
    layer = next(layer for layer in policy.generator.modules() if hasattr(layer, "lora_A"))
    sizes = []
    merge = type(layer).get_delta_weight

    def limited(layer, adapter):
        sizes.append(1)
        if len(sizes) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return merge(layer, adapter)

    monkeypatch.setattr(type(layer), "get_delta_weight", limited)
    assert torch.equal(tokens_of(generate(policy)), tokens_of(expected))
    assert "generation is slower: there is no memory to merge the adapters" in caplog.text
    assert policy.generation.memory.num_halvings == 0
    assert not any(layer.merged for layer in policy.generator.modules() if hasattr(layer, "lora_A"))


def test_out_of_memory_during_the_check_keeps_slot_decoding(checkpoint):
    policy = make_policy(checkpoint)
    with memory_limit(GPU, simcuda.allocated(GPU) + 1), pytest.raises(OutOfMemory):
        generate(policy)
    policy.generation.memory.size = 4
    generate(policy)
    assert policy.generation.uses_slots


def test_generator_copy_uses_its_own_stream_and_waits_in_order(checkpoint, monkeypatch):
    def streams_of(work):
        with Trace(places=False) as trace:
            work()
        return set(trace.streams)

    policy = make_policy(checkpoint)
    assert streams_of(lambda: policy.logprobs(generate(policy))) == {(GPU, 0)}
    policy = make_policy(checkpoint, max_off_policy_steps=1, old_logprobs="sampler")
    waits = []
    own = policy._stream._stream
    monkeypatch.setattr(Stream, "wait_stream", lambda self, other: waits.append((self.stream_id, other.stream_id)))
    assert streams_of(lambda: generate(policy)) == {(GPU, own.stream_id)}
    assert own.priority < 0
    assert waits == [(own.stream_id, 0), (0, own.stream_id)], (
        "the streams wait for anything but earlier work and results"
    )
    assert streams_of(lambda: policy.logprobs(generate(policy))) == {(GPU, own.stream_id)}
    assert (GPU, 0) in streams_of(lambda: train(policy, generate(policy)))


def test_sampling_thread_uses_the_ranks_gpu():
    class Sampling:
        """Stands in for a rank's policy; the thread's first call ends it."""

        generator = SimpleNamespace(device=torch.device("cuda:2"))

        def __init__(self):
            self.found = []

        def follow_sampling(self):
            self.found.append(torch.cuda.current_device())
            raise RankLost

    sampling = Sampling()
    thread = threading.Thread(target=_follow_sampling, args=(sampling, 1))
    thread.start()
    thread.join()
    assert sampling.found == [2]


def test_actor_threads_use_the_policys_gpu(checkpoint):
    policy = make_policy(checkpoint)
    in_thread = ComputeThread(1, policy.generator.device)

    async def run():
        await in_thread(policy.generate, PROMPTS, seed=1)
        return int(await in_thread(torch.cuda.current_device))

    with recorded_launches() as record:
        assert asyncio.run(run()) == 1
    compute = [each for each in record.launches if each.thread.startswith("compute")]
    assert sum(each.kernels for each in compute) > 100
    assert [each for each in compute if each.current != each.gpu] == []
