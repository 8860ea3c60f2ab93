"""Two processes that hold the same checkpoint on a CPU hold its weights once: measured, in bytes."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import CONFIGS, save_tiny

from python_backend.models.modeling import load_critic, load_reward, quiet_transformers, save_critic


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
    assert all_mapped(critic.with_weights(tmp_path).model)
    for _ in range(20):
        critic.with_weights(tmp_path)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(100):
        critic.with_weights(tmp_path)
    gc.collect()
    assert (sys.getallocatedblocks() - before) / 100 < 10, "objects a swap; there are 20 tensors"
