"""Shards a model over the ranks with FSDP2, and reads and writes sharded weights as safetensors.

`fully_shard` is applied from outside the model: parameters become `DTensor`s of which each rank holds a slice, layers
gather their weights for the forward and backward pass, and gradients are averaged over the ranks.
"""

import contextlib
import copy
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_triton.checkpoints.inspection import INDEX_FILE, CheckpointError, CheckpointInfo
from rlhf_triton.checkpoints.safetensors_header import TensorInfo
from rlhf_triton.checkpoints.tensor_file import STORED_AS, layout, raw_bytes
from rlhf_triton.digests import DEFAULT, Algorithm, digest_of
from rlhf_triton.learning.ranks import Ranks
from rlhf_triton.python_backend.models.adapters import MergedWeights, wide
from rlhf_triton.python_backend.models.sharded_tensors import sharded_like, whole
from rlhf_triton.store.durable import sync_file

# Merges LoRA adapters into the weights of a critic that is sharded over several ranks.


class MergedSlices(MergedWeights):
    """The weights of a sharded model with its adapters merged in, as this rank's slices (`DTensor`s).

    They have the bits of `MergedWeights` on one process. Each tensor is computed when it is read, without
    communication, so that ranks may read in any order.
    """

    def __init__(self, *args: Any) -> None:
        """Gather the adapters of all layers, which are small; collective. Arguments as in `MergedWeights`."""
        super().__init__(*args)
        self._gathered = {
            name: {path: whole(p.detach()) for path, p in layer.named_parameters() if path.startswith("lora_")}
            for name, layer in self.adapted.items()
        }

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        tensor = self.plain[name].detach()
        if name not in self.adapted:
            return tensor.to(self.dtype(name))
        adapters = {f"layer.{path}": adapter for path, adapter in self._gathered[name].items()}
        # Rows of the whole product rather than a product of rows, whose rounding would depend on the number of ranks.
        delta = functional_call(_Delta(self.adapted[name]), adapters, ())
        return (wide(tensor) + sharded_like(delta, tensor)).to(self.dtype(name))


class _Delta(nn.Module):
    """The change of one weight by its adapters, as a module, in which `functional_call` can replace these."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self) -> Tensor:
        return self.layer.get_delta_weight("default")


MOST_UNREDUCED = 4 << 30  # bytes of gradients on each rank
COMPARED_AT_ONCE = 1 << 20  # bytes; few enough to stay in the processor's cache


def shard(
    model: Any,
    ranks: Ranks,
    *,
    methods: Iterable[str] = (),
    prepare: Callable[[Any], object] = lambda module: None,
    precision: str = "float32",
) -> None:
    """Shard the weights of a transformers model over all ranks, in place; collective.

    Each transformer layer is gathered and freed on its own; embeddings, final norm and head are gathered for the whole
    forward pass, which keeps tied embeddings one parameter.

    Args:
        model: with its head and adapters in place, and with the same weights on every rank.
        methods: names of methods of `model` that call its parts without going through `forward`.
        prepare: called with each layer before it is sharded, and with the model at the end. What it allocates for a
            layer is reduced to a slice before the next one.
        precision: in `bfloat16` GPUs gather the weights of layers as autocast would cast them, and add up gradients in
            float32. Embeddings, final norm and head stay in float32.
    """
    # Without a mesh, the ranks of a CPU run would shard onto the cards of a machine that has some.
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    casts = ranks.device.type == "cuda" and precision == "bfloat16"
    cast = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        prepare(layer)
        fully_shard(layer, mesh=mesh, mp_policy=cast if casts else MixedPrecisionPolicy())
    prepare(model)
    fully_shard(model, mesh=mesh)
    for name in methods:
        register_fsdp_forward_method(model, name)


def hollow(model: Any, device: torch.device | str) -> Any:
    """Return a copy of a model on `device` whose weights have no content yet; tied ones stay tied.

    On `meta` the copy shares the model's buffers, since their values are computed, not loaded.
    """
    memo: dict[int, Tensor] = {
        id(buffer): buffer if device == "meta" else buffer.to(device, copy=True) for buffer in model.buffers()
    }
    for each in model.parameters():
        memo[id(each)] = nn.Parameter(torch.empty_like(each, device=device), each.requires_grad)
    return copy.deepcopy(model, memo)


def is_sharded(model: Any) -> bool:
    """Return whether `shard` has been called with this model."""
    return isinstance(model, FSDPModule)


def sync_gradients(model: Any, *, is_last: bool) -> None:
    """Reduce gradients over the ranks in the next backward pass; on GPUs only in the last micro-batch's.

    Until then each rank holds gradients of all trained weights. Where these take more than MOST_UNREDUCED, and on a
    CPU, every backward pass adds them up. No effect on a model that is not sharded.
    """
    if not is_sharded(model):
        return
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    waits = model.device.type == "cuda" and trained * torch.float32.itemsize <= MOST_UNREDUCED
    model.set_requires_gradient_sync(is_last or not waits)


@contextlib.contextmanager
def gathered_as_stored(model: Any) -> Iterator[None]:
    """Run forward passes with the weights of layers as they are stored, not cast to bfloat16; collective, for checks.

    FSDP cannot change the dtype in which it gathers, so that each layer gathers once more what was cast. After the
    block each rank holds its slices alone. No effect on a model that is not sharded.
    """
    if not is_sharded(model):
        yield
        return
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    stored = {layer: list(layer.parameters()) for layer in layers}
    held: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]] = {}

    def widen(layer: nn.Module, *_: Any) -> None:
        pairs = zip(layer.parameters(), stored[layer], strict=True)
        cast = [(parameter, own) for parameter, own in pairs if parameter.dtype != own.dtype]
        held[layer] = [(parameter, parameter.data) for parameter, _ in cast]
        for parameter, own in cast:
            parameter.data = whole(own.detach())

    def narrow(layer: nn.Module, *_: Any) -> None:
        for parameter, data in held.pop(layer, []):
            parameter.data = data

    hooks = [layer.register_forward_pre_hook(widen) for layer in layers]
    hooks += [layer.register_forward_hook(narrow, always_call=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    model.reshard()


def write_slices(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write sharded tensors to `folder`, each rank its slices to files of its own; collective.

    Any number of ranks can read them with `read_tensors`. Raises OSError on all ranks if one cannot write.
    """
    # The default writer of torch.distributed.checkpoint stores metadata in a format that runs code when it is read.
    with _disk_errors(folder):
        dcp.save(dict(tensors), storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))


def read_tensors(tensors: Mapping[str, Tensor], folder: Path, *, no_dist: bool = False) -> None:
    """Fill `tensors`, whole or sharded, from all safetensors files in `folder`; collective unless `no_dist`.

    Reads what `write_slices` wrote with any number of ranks, and plain safetensors files. Raises OSError on all ranks
    if one cannot read.
    """
    with _disk_errors(folder):
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=no_dist)


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Convert the error of torch.distributed.checkpoint, which is no Exception, into the OSError that caused it."""
    try:
        yield
    except dcp.api.CheckpointException as failed:
        rank, (error, _) = next(iter(failed.failures.items()))
        found = re.search(r"os error (\d+)", str(error))  # the errno is only in the text of Rust's I/O error
        number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
        raise OSError(number, f"rank {rank}: {type(error).__name__}: {error}", str(folder)) from failed


def stored_shapes(folder: Path) -> dict[str, torch.Size]:
    """Return the names and shapes of the whole tensors in the safetensors files in `folder`."""
    stored = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: tensor.size for name, tensor in stored.items() if isinstance(tensor, TensorStorageMetadata)}


def write_checkpoint(
    shapes: Mapping[str, tuple[torch.dtype, torch.Size]],
    tensor_of: Callable[[str], Tensor],
    folder: Path,
    ranks: Ranks,
    integrity: Algorithm = DEFAULT,
) -> dict[str, str]:
    """Write sharded tensors as a Hugging Face checkpoint with one file per rank and an index; collective.

    A slice of rows is a range of bytes in a file, so that each rank writes its slices of all tensors to their places,
    without gathering any tensor. The same tensors give the same bytes. Returns the digest of each file; each rank has
    hashed one.

    Args:
        shapes: dtype and whole shape of each tensor, by name.
        tensor_of: returns a sharded tensor by its name, without communication: each rank has an order of its own.

    Raises:
        OSError: one of the ranks could not write.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in shapes.items()}
    owners = _owners(sizes, ranks.size)
    paths = [folder / f"model-{part + 1:05d}-of-{ranks.size:05d}.safetensors" for part in range(ranks.size)]
    layouts = [layout({name: shapes[name] for name in shapes if owners[name] == part}) for part in range(ranks.size)]

    def create() -> None:
        if ranks.rank == 0:
            for path, (header, _) in zip(paths, layouts, strict=True):
                path.write_bytes(header)
            files = {name: paths[owner].name for name, owner in sorted(owners.items())}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))

    def write() -> None:
        for i in range(ranks.size):  # from its own on: two writers of a file would wait for each other
            part = (ranks.rank + i) % ranks.size
            _write_rows(paths[part], tensor_of, layouts[part][1], plain=ranks.rank == 0)

    ranks.together(create)
    ranks.together(write)
    mine = [paths[ranks.rank], *([folder / INDEX_FILE] if ranks.rank == 0 else [])]
    parts = ranks.gather(ranks.together(lambda: {path.name: _sync_and_hash(path, integrity) for path in mine}))
    return {name: digest for part in parts for name, digest in part.items()}


def _write_rows(path: Path, tensor_of: Callable[[str], Tensor], starts: Mapping[str, int], *, plain: bool) -> None:
    """Write this rank's slices to their places in a file; tensors that are not sharded only if `plain`."""
    with path.open("r+b") as file:
        for name, start in starts.items():
            tensor = tensor_of(name)
            if plain or isinstance(tensor, DTensor):
                offset, rows = _own_rows(tensor)
                file.seek(start + offset)
                file.write(rows)


def _own_rows(tensor: Tensor) -> tuple[int, memoryview]:
    """Return the bytes of this rank's slice of a tensor, and their offset in the whole tensor."""
    tensor, offset = tensor.detach(), 0
    if isinstance(tensor, DTensor):
        (slice_,) = tensor.__create_chunk_list__()
        offset = slice_.offsets[0] * math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
        tensor = tensor.to_local()
    return offset, raw_bytes(tensor.cpu().contiguous())


def _sync_and_hash(path: Path, integrity: Algorithm) -> str:
    with ThreadPoolExecutor(1, "sync") as beside:  # the disk writes while the processor hashes
        synced = beside.submit(sync_file, path)
        digest = digest_of(path, integrity)
        synced.result()
    return digest


def _owners(sizes: Mapping[str, int], size: int) -> dict[str, int]:
    """Return the rank for the file of each tensor: the largest first, each to the rank with the fewest bytes so far.

    Args:
        sizes: of the tensors, in bytes.
        size: number of ranks.
    """
    load = [0] * size
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner = min(range(size), key=load.__getitem__)
        load[owner] += sizes[name]
        owners[name] = owner
    return owners


def differing(tensors: Mapping[str, Tensor], stored: CheckpointInfo) -> list[str]:
    """Return the names of sharded tensors whose slice on this rank differs from the checkpoint in any bit.

    A tensor that is missing on one side, or has another dtype or shape, differs.

    Raises:
        CheckpointError: a file cannot be read.
    """
    same = set()
    for path in stored.files:
        own = [name for name, info in stored.tensors.items() if info.file == path.name and name in tensors]
        try:
            with path.open("rb") as file:
                same |= {name for name in own if _is_stored(tensors[name], stored.tensors[name], file)}
        except OSError as error:
            raise CheckpointError(f"{stored.folder}: unreadable {path.name}: {error}") from error
    return sorted({*tensors, *stored.tensors} - same)


def _is_stored(tensor: Tensor, info: TensorInfo, file: BufferedReader) -> bool:
    if (STORED_AS[tensor.dtype], tuple(tensor.shape)) != (info.dtype, info.shape):
        return False
    offset, rows = _own_rows(tensor)
    file.seek(info.start + offset)
    # Reads the file, which takes less time than the page faults of a mapped one, and mapped pages count as memory.
    block = bytearray(min(COMPARED_AT_ONCE, len(rows)))
    for start in range(0, len(rows), COMPARED_AT_ONCE):
        part = rows[start : start + COMPARED_AT_ONCE]
        del block[len(part) :]
        if file.readinto(block) != len(part) or block != part:  # a bytearray compares as memcmp does
            return False
    return True


@torch.no_grad()
def all_finite(parameters: Iterable[Tensor]) -> bool:
    """Return whether this rank's slices of the parameters are finite."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    sums = [p.sum().double() for p in local if p.numel()]
    return bool(torch.stack(sums).isfinite().all()) if sums else True
