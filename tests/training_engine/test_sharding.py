"""Sharded weights: files that any number of ranks can read, and checkpoints that no rank holds whole."""

import errno

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, whole_tensors
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_triton.training_engine import slices
from rlhf_triton.training_engine.ranks import ALONE
from rlhf_triton.training_engine.sharding import shard
from rlhf_triton.training_engine.slices import read_tensors, write_checkpoint, write_slices


def a_model(seed):
    """Return a random Llama with two layers."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config)


def write(ranks, folder):
    """Write the same sharded model as slices and twice as a checkpoint; return this rank's number of local elements."""
    model = a_model(0)
    shard(model, ranks)
    for name in ("slices", "checkpoint", "again"):
        ranks.run_on_all_ranks(lambda name=name: (folder / name).mkdir(exist_ok=True))
    write_slices(model.state_dict(), folder / "slices", ranks)
    for name in ("checkpoint", "again"):
        write_one_file_per_rank(model.state_dict(), folder / name, ranks)
    dist.barrier()
    return sum(tensor.to_local().numel() for tensor in model.state_dict().values())


def write_one_file_per_rank(tensors, folder, ranks):
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    write_checkpoint(shapes, tensors.__getitem__, folder, ranks)


def fail_to_write(ranks, folder):
    """Return the errno that each way of writing raises if rank 1's disk is full."""
    model = a_model(0)
    shard(model, ranks)
    seen = []

    def full(*arguments):
        raise OSError(errno.ENOSPC, "disk full")

    if ranks.rank == 1:
        slices.sync_file = slices.raw_bytes = full
        HuggingFaceStorageWriter.write_data = full
    for write in (write_slices, write_one_file_per_rank):
        try:
            write(model.state_dict(), folder, ranks)
        except OSError as error:
            seen.append(error.errno)
    return seen


def read(ranks, folder):
    """Return whether a sharded model that reads the files has the weights that were written."""
    model = a_model(1)
    shard(model, ranks)
    read_tensors(model.state_dict(), folder, ranks)
    wanted = a_model(0).state_dict()
    return all(torch.equal(tensor, wanted[name]) for name, tensor in whole_tensors(model.state_dict()))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a folder with the files of two ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    elements = on_ranks(2, write, folder)
    assert max(elements) < 0.6 * sum(tensor.numel() for tensor in a_model(0).state_dict().values())
    return folder


@pytest.mark.slow
def test_full_disk_on_one_rank_raises_on_all_ranks(tmp_path):
    assert on_ranks(2, fail_to_write, tmp_path) == [[errno.ENOSPC] * 2] * 2


def test_slices_from_two_ranks_load_in_one_process(written):
    model = a_model(1)
    read_tensors(model.state_dict(), written / "slices", ALONE)
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in a_model(0).state_dict().items())
    assert {path.suffix for path in (written / "slices").iterdir()} == {".safetensors"}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_slices_from_two_ranks_load_on_another_number_of_ranks(written, size):
    assert on_ranks(size, read, written / "slices") == [True] * size


def test_checkpoint_from_two_ranks_loads_in_transformers_and_is_reproducible(written):
    loaded = LlamaForCausalLM(a_model(0).config)
    names = sorted(path.name for path in (written / "checkpoint").iterdir())
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    for name in names:
        assert (written / "checkpoint" / name).read_bytes() == (written / "again" / name).read_bytes()
    a_model(0).config.save_pretrained(written / "checkpoint")
    loaded = LlamaForCausalLM.from_pretrained(written / "checkpoint")
    assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in a_model(0).state_dict().items())
    sizes = [sum(t.numel() for t in load_file(written / "checkpoint" / name).values()) for name in names[:2]]
    assert max(sizes) < 0.75 * sum(sizes)
