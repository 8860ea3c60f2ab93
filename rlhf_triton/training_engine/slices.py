"""Reads and writes sharded weights as safetensors, in one file per rank or as a Hugging Face checkpoint."""

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from rlhf_triton.checkpoints.inspection import INDEX_FILE, CheckpointError, CheckpointInfo
from rlhf_triton.checkpoints.safetensors_header import TensorInfo
from rlhf_triton.checkpoints.tensor_file import STORED_AS, layout, raw_bytes
from rlhf_triton.digests import digest_of
from rlhf_triton.store.durable import errno_of, sync_file
from rlhf_triton.training_engine.ranks import AnyRanks, Ranks

warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # a single process has no process group
COMPARED_AT_ONCE = 1 << 20  # bytes; few enough to stay in the processor's cache


def write_slices(tensors: Mapping[str, Tensor], folder: Path, ranks: AnyRanks) -> None:
    """Write sharded tensors to `folder`; each rank writes its slices to its own files. Collective.

    Any number of ranks can read them with `read_tensors`. Raises OSError on all ranks if one cannot write.
    """
    # The default writer of torch.distributed.checkpoint stores metadata in a format that runs code when it is read.
    with _disk_errors(folder):
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(dict(tensors), storage_writer=writer, no_dist=ranks.size == 1)


def read_tensors(tensors: Mapping[str, Tensor], folder: Path, ranks: AnyRanks) -> None:
    """Fill `tensors`, sharded or not, from the slices that any number of ranks wrote with `write_slices`; collective.

    Raises OSError on all ranks if one cannot read.
    """
    with _disk_errors(folder):
        reader = dcp.HuggingFaceStorageReader(str(folder))
        dcp.load(dict(tensors), storage_reader=reader, no_dist=ranks.size == 1)


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Convert torch.distributed.checkpoint's error, which is not an Exception, to the OSError that caused it."""
    try:
        yield
    except dcp.api.CheckpointException as failed:
        rank, (error, _) = next(iter(failed.failures.items()))
        raise OSError(errno_of(error), f"rank {rank}: {type(error).__name__}: {error}", str(folder)) from failed


def stored_shapes(folder: Path) -> dict[str, torch.Size]:
    """Return the names and unsharded shapes of the tensors in the safetensors files in `folder`."""
    stored = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: tensor.size for name, tensor in stored.items() if isinstance(tensor, TensorStorageMetadata)}


def write_checkpoint(
    shapes: Mapping[str, tuple[torch.dtype, torch.Size]],
    tensor_of: Callable[[str], Tensor],
    folder: Path,
    ranks: Ranks,
) -> dict[str, str]:
    """Write sharded tensors as a Hugging Face checkpoint with one file per rank and an index; collective.

    A slice of rows is a range of bytes in a file, so each rank writes its slices of all tensors directly to their
    places, without gathering any tensor. Equal tensors give byte-identical files. Returns the digest of each file; each
    rank hashes one.

    Args:
        shapes: dtype and unsharded shape of each tensor, by name.
        tensor_of: returns a sharded tensor by name, without communication, because each rank calls it in another order.

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
        for i in range(ranks.size):  # starting with the rank's own file: writers of the same file wait for each other
            part = (ranks.rank + i) % ranks.size
            _write_rows(paths[part], tensor_of, layouts[part][1], plain=ranks.rank == 0)

    ranks.run_on_all_ranks(create)
    ranks.run_on_all_ranks(write)
    mine = [paths[ranks.rank], *([folder / INDEX_FILE] if ranks.rank == 0 else [])]

    def sync_and_hash() -> dict[str, str]:
        for path in mine:
            sync_file(path)
        return {path.name: digest_of(path) for path in mine}

    parts = ranks.gather(ranks.run_on_all_ranks(sync_and_hash))
    return {name: digest for part in parts for name, digest in part.items()}


def _write_rows(path: Path, tensor_of: Callable[[str], Tensor], starts: Mapping[str, int], *, plain: bool) -> None:
    """Write this rank's slices to their places in a file; write unsharded tensors only if `plain`."""
    with path.open("r+b") as file:
        for name, start in starts.items():
            tensor = tensor_of(name)
            if plain or isinstance(tensor, DTensor):
                offset, rows = _own_rows(tensor)
                file.seek(start + offset)
                file.write(rows)


def _own_rows(tensor: Tensor) -> tuple[int, memoryview]:
    """Return the byte offset of this rank's slice in the full tensor, and the slice's bytes."""
    tensor = tensor.detach()
    offset = 0
    if isinstance(tensor, DTensor):
        (slice_,) = tensor.__create_chunk_list__()
        offset = slice_.offsets[0] * math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
        tensor = tensor.to_local()
    return offset, raw_bytes(tensor.cpu().contiguous())


def _owners(sizes: Mapping[str, int], size: int) -> dict[str, int]:
    """Assign each tensor to a rank's file: largest tensors first, each to the rank with the fewest bytes so far.

    Args:
        sizes: size of each tensor in bytes, by name.
        size: number of ranks.
    """
    load = [0] * size
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner = min(range(size), key=load.__getitem__)
        load[owner] += sizes[name]
        owners[name] = owner
    return owners


def different_tensors(tensors: Mapping[str, Tensor], stored: CheckpointInfo) -> list[str]:
    """Return the names of tensors whose slice on this rank is not bit-identical to a checkpoint's.

    Includes tensors that exist only on one side, or that have another dtype or shape.

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
            raise CheckpointError(f"{stored.folder}: {path.name} cannot be read: {error}") from error
    return sorted({*tensors, *stored.tensors} - same)


def _is_stored(tensor: Tensor, info: TensorInfo, file: BufferedReader) -> bool:
    if (STORED_AS[tensor.dtype], tuple(tensor.shape)) != (info.dtype, info.shape):
        return False
    offset, rows = _own_rows(tensor)
    file.seek(info.start + offset)
    # Read, not map, the file: page faults take longer, and mapped pages count as the process's memory.
    block = bytearray(min(COMPARED_AT_ONCE, len(rows)))
    for start in range(0, len(rows), COMPARED_AT_ONCE):
        part = rows[start : start + COMPARED_AT_ONCE]
        del block[len(part) :]
        if file.readinto(block) != len(part) or block != part:  # a bytearray compares as memcmp does
            return False
    return True
