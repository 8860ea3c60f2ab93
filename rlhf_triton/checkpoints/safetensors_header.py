"""Reads and encodes the header of a safetensors file: names, dtypes, shapes and offsets of its tensors.

Format: https://huggingface.co/docs/safetensors (header length in 8 bytes, JSON header, data).
"""

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
_DTYPE_BITS = {"BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "C64": 64}  # other names contain the bits


@dataclass(frozen=True)
class TensorInfo:
    """Description of a tensor in a file's header."""

    dtype: str  # name in the format: F32, BF16, ...
    shape: tuple[int, ...]
    file: str  # file name, without the folder
    num_bytes: int
    start: int  # byte offset in the file


TensorInfos: TypeAlias = Mapping[str, TensorInfo]
"""Descriptions of tensors by name."""


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors of `file` by name.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not in safetensors format, or is damaged or truncated.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"its header claims to have {length} bytes")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        return {name: _tensor(item, file.name, 8 + length, size) for name, item in header.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file.name} is damaged or not a safetensors file ({error})") from error


def read_numbers(folder: Path, tensor: TensorInfo) -> list[float]:
    """Read the elements of a small floating-point tensor. Raises OSError, or KeyError for other dtypes."""
    with (folder / tensor.file).open("rb") as stream:
        stream.seek(tensor.start)
        data = stream.read(tensor.num_bytes)
    if tensor.dtype == "BF16":  # the upper half of a float32
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    code = {"F64": "d", "F32": "f", "F16": "e", "BF16": "f"}[tensor.dtype]
    return [number for (number,) in struct.iter_unpack(f"<{code}", data)]


def encode_header(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Return the header (length prefix and JSON) of a file that stores `tensors` in order.

    Args:
        tensors: dtype (as in `TensorInfo`) and shape by name.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start = end
        end = end + _num_bits(dtype, shape) // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the tensor data to 8 bytes
    return struct.pack("<Q", len(text)) + text


def _tensor(item: Mapping[str, Any], file: str, data: int, size: int) -> TensorInfo:
    dtype = str(item["dtype"])
    shape = tuple(int(n) for n in item["shape"])
    start, end = item["data_offsets"]
    if not 0 <= start <= end:
        raise ValueError(f"a tensor cannot start at {start} and end at {end}")
    if data + end > size:
        raise ValueError(f"{data + end - size} bytes are missing at its end")
    if (end - start) * 8 != _num_bits(dtype, shape):
        raise ValueError(f"a tensor of shape {list(shape)} cannot have {end - start} bytes")
    return TensorInfo(dtype, shape, file, end - start, data + start)


def _num_bits(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * (_DTYPE_BITS.get(dtype) or int(re.sub(r"\D", "", dtype)))
