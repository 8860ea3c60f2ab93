"""Writes safetensors files one tensor at a time; the safetensors library needs all tensors in memory at once."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from rlhf_triton.checkpoints.safetensors_header import encode_header
from rlhf_triton.digests import Hasher

STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
STORED_AS = {dtype: name for name, dtype in STORED_DTYPES.items()}


def write_tensors(
    file: Path,
    shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensor_of: Callable[[str], Tensor],
) -> str:
    """Write a safetensors file, byte-identical to `safetensors.torch.save_file`; return its digest.

    Replaces an older file of this name; a model that is mapped from the older file keeps its weights.

    Args:
        shapes: dtype and shape of each tensor, by name.
        tensor_of: returns a tensor on the CPU by its name.
    """
    header, starts = layout(shapes)
    hasher = Hasher(header)
    file.unlink(missing_ok=True)
    with file.open("xb") as stream, ThreadPoolExecutor(1, "hash") as executor:
        stream.write(header)
        for name in starts:
            block = raw_bytes(tensor_of(name))
            hashed = executor.submit(hasher.update, block)
            stream.write(block)
            hashed.result()
    return hasher.digest()


def layout(shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> tuple[bytes, dict[str, int]]:
    """Return a file's header and the byte offset of each tensor in the file, ascending."""
    names = sorted(shapes, key=lambda name: (-shapes[name][0].itemsize, name))  # wider dtypes first, for alignment
    sizes = {name: math.prod(shapes[name][1]) * shapes[name][0].itemsize for name in names}
    header = encode_header({name: (STORED_AS[shapes[name][0]], shapes[name][1]) for name in names}, {"format": "pt"})
    starts = itertools.accumulate(sizes.values(), initial=len(header))
    return header, dict(zip(names, starts, strict=False))


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
