"""Two processes that hold the same checkpoint on a CPU hold its weights once: measured, in bytes."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import CONFIGS, save_tiny
from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaForTokenClassification

from python_backend.models.modeling import load_critic, load_reward, quiet_transformers, save_critic

HOLDER = """
import sys
from pathlib import Path
import numpy as np, psutil
from python_backend.models.modeling import (load_critic, load_reward, quiet_transformers)
quiet_transformers()
kind, folder = sys.argv[1], Path(sys.argv[2])
row = np.arange(1, 9)
model = load_reward(folder) if kind == "reward" else load_critic(folder)
if kind == "swapped":
    model = model.with_weights(folder)
model.score([row]) if kind == "reward" else model.values([row])
print("ready", flush=True)
for _ in sys.stdin:
    print(psutil.Process().memory_full_info().pss, flush=True)
"""
SHARE = 4 / 3
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 8}


def ask(holder: subprocess.Popen[str]) -> int:
    """The holder's proportional set size, in bytes: pages that n processes map count 1/n each."""
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    return int(holder.stdout.readline())


def start(kind: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, kind, str(folder)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    return holder


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's accounting of shared pages")
@pytest.mark.parametrize("kind", ["reward", "critic", "swapped"])
def test_two_holders_need_less_than_one_and_a_third(tmp_path: Path, kind: str):
    """About 200 M parameters; what 1.3 leaves over is Python and torch, some 260 MB in each process."""
    config = LlamaConfig(vocab_size=4000, num_labels=1, pad_token_id=0, **SIZES)
    model = LlamaForSequenceClassification if kind == "reward" else LlamaForTokenClassification
    with torch.device("meta"):
        empty = model(config)
    empty.to_empty(device="cpu").save_pretrained(tmp_path, max_shard_size="5GB" if kind == "swapped" else "300MB")
    del empty
    holders = [start(kind, tmp_path)]
    try:
        one = ask(holders[0])
        holders.append(start(kind, tmp_path))
        together = sum(map(ask, holders))
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
    print(f"{kind}: one {one / 1e6:.0f} MB, two {together / 1e6:.0f} MB, ratio {together / one:.3f}")
    assert one > 800e6  # the weights are in memory
    assert together < SHARE * one


def all_mapped(model: torch.nn.Module) -> bool:
    """Whether every weight of the body lies in a mapping of a safetensors file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "safetensors" in line]
    spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines if line[-1].endswith(".safetensors")]
    pointers = [parameter.data_ptr() for parameter in model.base_model.parameters()]
    return all(any(start <= pointer < end for start, end in spans) for pointer in pointers)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings")
@pytest.mark.parametrize("form", ["one file", "shards", "bfloat16", "cast"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_body_is_mapped_where_its_dtype_is_served(tmp_path: Path, family: str, form: str):
    quiet_transformers()
    file = tmp_path / "model.safetensors"
    model = save_tiny(tmp_path, family, "reward")
    if form == "shards":
        file.unlink()
        model.save_pretrained(tmp_path, max_shard_size="3KB")
    if form == "bfloat16":
        save_file({n: t.bfloat16() for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    dtype = "bfloat16" if form in ("bfloat16", "cast") else "float32"
    for load in (load_reward, load_critic):
        assert all_mapped(load(tmp_path, dtype=dtype).model) is (form != "cast")


def test_a_swap_leaves_nothing_behind(tmp_path: Path):
    """safetensors 0.8.0 loses two numbers for each tensor that it reads: a gigabyte after 100,000 swaps of 150."""
    save_tiny(tmp_path, "llama", "reward")
    critic = load_critic(tmp_path)
    save_critic(critic, tmp_path)
    for _ in range(20):
        critic.with_weights(tmp_path)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(100):
        critic.with_weights(tmp_path)
    gc.collect()
    assert (sys.getallocatedblocks() - before) / 100 < 10, "objects a swap; there are 20 tensors"
