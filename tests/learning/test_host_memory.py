"""What a rank of the policy needs of its host's memory while it loads, beside what its device keeps."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from live_system import make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_triton.actor.policy import loading
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.learning.ranks import Ranks
from tests.learning.test_policy_ranks import make
from tests.support.ranks import on_ranks
from tests.support.settings import actor_section

CASES: dict[str, dict[str, Any]] = {
    "all weights": {"kl_reference": "actor"},
    "all weights in bfloat16": {"precision": "bfloat16"},
    "lora in bfloat16": {"precision": "bfloat16", "lora_rank": 2},
}
FIRST, *OTHERS = CASES


def anonymous() -> int:
    """Bytes of this process that are not the pages of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Peak(threading.Thread):
    """Watches how far the anonymous memory of this process rises above what it is at the start, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._before, self._most = anonymous(), 0
        self.start()

    def run(self) -> None:
        while True:
            self._most = max(self._most, anonymous())
            time.sleep(0.001)

    def take(self) -> int:
        """Return the rise since the last call."""
        most, self._most = max(self._most, anonymous()), 0
        return most - self._before


def kept_bytes(policy: Policy) -> int:
    """Bytes of the shards and of the copies: on a card, they are in its memory."""
    models = [model for model in (policy.model, policy.sampler, policy.reference) if model is not None]
    tensors = {p.to_local() if hasattr(p, "to_local") else p for model in models for p in model.parameters()}
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def beside_what_it_keeps(ranks: Ranks, folder: Path, others: dict[str, Any]) -> list[float]:
    """Bytes a parameter that a rank takes at its peaks beside what it keeps: until it shards the policy, and then."""
    section = actor_section(model=folder, max_new_tokens=6, prompts_max_tokens=8, **others)
    peak, peaks, shard = Peak(), [], loading.shard

    def watched(*arguments: Any, **settings: Any) -> None:
        peaks.append(peak.take())
        shard(*arguments, **settings)

    loading.shard = watched
    policy, _ = make(section, ranks)
    peaks.append(peak.take() - kept_bytes(policy))
    return [each / sum(p.numel() for p in policy.sampler.parameters()) for each in peaks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of 42 million parameters, stored in bfloat16."""
    folder = tmp_path_factory.mktemp("policy")
    config = LlamaConfig(
        vocab_size=4000, hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", [FIRST, *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS)])
def test_policy_rank_loads_within_2_5_host_bytes_per_parameter(folder: Path, case: str):
    found = on_ranks(2, beside_what_it_keeps, folder, CASES[case])
    assert max(max(peaks) for peaks in found) <= 2.5
