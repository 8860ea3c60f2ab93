"""The tensors of checkpoints, memory-mapped."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from rlhf_triton.checkpoints.inspection import CheckpointError, CheckpointInfo, inspect_checkpoint
from rlhf_triton.checkpoints.language_models import as_checkpoint_error
from rlhf_triton.checkpoints.safetensors_header import TensorInfo, TensorInfos
from rlhf_triton.checkpoints.tensor_file import STORED_DTYPES
from rlhf_triton.models.adapters import with_stored_adapters


def stored_tensors(info: CheckpointInfo) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, mapped from its files; an adapter version is merged into its base version.

    Raises:
        CheckpointError: a file is damaged, or the adapters do not fit.
    """
    tensors = map_tensors(info.folder, info.tensors)
    if info.adapters is None:
        return tensors
    base = inspect_checkpoint(info.folder.parent / str(info.adapters.base))
    with as_checkpoint_error(info.folder):
        return with_stored_adapters(stored_tensors(base), tensors, info.adapters)


def map_tensors(folder: Path, infos: TensorInfos) -> dict[str, Tensor]:
    """Memory-map tensors of a folder's safetensors files, copy-on-write: processes share unmodified pages.

    Does not use the safetensors library: version 0.8.0 leaks two numbers per tensor, and a serving process loads many
    versions.
    """
    mapped: dict[str, mmap.mmap] = {}
    with as_checkpoint_error(folder):
        for file in {info.file for info in infos.values()}:
            with (folder / file).open("rb") as stream:
                mapped[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return {name: _view(mapped[info.file], info) for name, info in infos.items()}


def _view(mapped: mmap.mmap, info: TensorInfo) -> Tensor:
    """Return a tensor of a mapped file without copying its data. Raises ValueError if its dtype is not supported."""
    dtype = STORED_DTYPES.get(info.dtype)
    if dtype is None:
        raise ValueError(f"tensors of type {info.dtype} are not supported")
    if not info.num_bytes:
        return torch.empty(info.shape, dtype=dtype)
    count = info.num_bytes // dtype.itemsize
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=info.start).reshape(info.shape)


def check_finite(module: torch.nn.Module) -> None:
    """Raise CheckpointError naming the folder and the first parameter of a model that holds NaN or infinity."""
    sums = [parameter.detach().sum() for parameter in module.parameters()]
    # A sum is not finite if any element is NaN or infinite, or if it overflows. It costs a tenth of `isfinite` on every
    # element. All sums are checked together first, and parameters one by one only if there is something to find.
    if torch.stack([value.double() for value in sums]).isfinite().all():
        return
    for name, parameter in module.named_parameters():
        if not parameter.isfinite().all():
            raise CheckpointError(
                f"{module.name_or_path}: {name} has values that are not finite; save the model again, or use an "
                "earlier checkpoint"
            )
