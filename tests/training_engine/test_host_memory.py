"""The host memory that a policy rank needs while it loads, in addition to what its device keeps."""

import threading
import time
from pathlib import Path

import pytest
import torch
from policy_sessions import make
from ranks import on_ranks
from run_checkpoints import make_tokenizer
from settings import actor_section
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_triton.actor.policy import loading

CASES = {
    "all weights": {"kl_reference": "actor"},
    "all weights in bfloat16": {"precision": "bfloat16"},
    "lora in bfloat16": {"precision": "bfloat16", "lora_rank": 2},
}
FIRST, *OTHERS = CASES


def anonymous():
    """Return this process's anonymous memory in bytes, without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Peak(threading.Thread):
    """Watches how far this process's anonymous memory rises above its start, in bytes."""

    def __init__(self):
        super().__init__(daemon=True)
        self._before = anonymous()
        self._most = 0
        self.start()

    def run(self):
        while True:
            self._most = max(self._most, anonymous())
            time.sleep(0.001)

    def take(self):
        """Return the rise since the last call."""
        most = max(self._most, anonymous())
        self._most = 0
        return most - self._before


def kept_bytes(policy):
    """Return the bytes of the shards and copies; on a GPU they are in its memory."""
    models = [model for model in (policy.model, policy.generator, policy.reference) if model is not None]
    tensors = {p.to_local() if hasattr(p, "to_local") else p for model in models for p in model.parameters()}
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def beside_what_it_keeps(ranks, folder, others):
    """Return the peak bytes per parameter beyond what the rank keeps: before and after it shards the policy."""
    section = actor_section(model=folder, max_new_tokens=6, prompts_max_tokens=8, **others)
    peak = Peak()
    peaks = []
    shard = loading.shard

    def watched(*arguments, **settings):
        peaks.append(peak.take())
        shard(*arguments, **settings)

    loading.shard = watched
    policy, _ = make(section, ranks)
    peaks.append(peak.take() - kept_bytes(policy))
    return [each / sum(p.numel() for p in policy.generator.parameters()) for each in peaks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a policy of 42 million parameters in bfloat16."""
    folder = tmp_path_factory.mktemp("policy")
    config = LlamaConfig(
        vocab_size=4000, hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", [FIRST, *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS)])
def test_policy_rank_loads_within_2_5_host_bytes_per_parameter(folder, case):
    found = on_ranks(2, beside_what_it_keeps, folder, CASES[case])
    assert max(max(peaks) for peaks in found) <= 2.5
