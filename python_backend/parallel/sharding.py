"""Shards a model over the ranks with FSDP2, and reads and writes sharded weights as safetensors.

`fully_shard` is applied from outside the model: parameters become `DTensor`s of which each rank holds a slice, layers
gather their weights for the forward and backward pass, and gradients are averaged over the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

INDEX_FILE = "model.safetensors.index.json"


def shard(model: Any, *, methods: Iterable[str] = ()) -> None:
    """Shard the weights of a transformers model over all ranks, in place; collective.

    Each transformer layer is gathered and freed on its own; embeddings, final norm and head are gathered for the whole
    forward pass, which keeps tied embeddings one parameter.

    Args:
        model: with its head and adapters in place, and with the same weights on every rank.
        methods: names of methods of `model` that call its parts without going through `forward`.
    """
    for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        fully_shard(layer)
    fully_shard(model)
    for name in methods:
        register_fsdp_forward_method(model, name)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a `DTensor`, collective; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_tensors(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor whole, on the CPU, one at a time; collective. All ranks must consume it in the same order."""
    for name, tensor in tensors.items():
        yield name, whole(tensor.detach()).cpu()


def write_slices(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write sharded tensors to `folder`, each rank its slices to files of its own; collective.

    Any number of ranks can read them with `read_tensors`.
    """
    # Without pickle: the default writer of torch.distributed.checkpoint stores its metadata in a pickled file.
    dcp.save(dict(tensors), storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))


def read_tensors(tensors: Mapping[str, Tensor], folder: Path, *, no_dist: bool = False) -> None:
    """Fill `tensors`, whole or sharded, from all safetensors files in `folder`; collective unless `no_dist`.

    Reads what `write_slices` wrote with any number of ranks, and plain safetensors files.
    """
    dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=no_dist)


def write_checkpoint(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write sharded tensors as a Hugging Face checkpoint with one file per rank and an index; collective.

    Every tensor is gathered by all ranks, one at a time, and kept by the rank that writes it, so that a rank holds its
    own file and one tensor more. The same tensors give the same bytes.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    owners = _owners(tensors, size)
    mine = {}
    for name, tensor in whole_tensors(tensors):
        if owners[name] == rank:
            mine[name] = tensor.clone()
    save_file(mine, folder / _file_name(rank, size), metadata={"format": "pt"})
    if rank == 0:
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: _file_name(owner, size) for name, owner in sorted(owners.items())},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))


def _owners(tensors: Mapping[str, Tensor], size: int) -> dict[str, int]:
    """Return the rank that writes each tensor: the largest first, each to the rank with the fewest bytes so far."""
    load = [0] * size
    owners = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].numel(), name)):
        owner = min(range(size), key=load.__getitem__)
        load[owner] += tensors[name].numel() * tensors[name].element_size()
        owners[name] = owner
    return owners


def _file_name(rank: int, size: int) -> str:
    return f"model-{rank + 1:05d}-of-{size:05d}.safetensors"


@torch.no_grad()
def all_finite(parameters: Iterable[Tensor]) -> bool:
    """Return whether this rank's slices of the parameters are finite."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    sums = [p.sum().double() for p in local if p.numel()]
    return bool(torch.stack(sums).isfinite().all()) if sums else True
