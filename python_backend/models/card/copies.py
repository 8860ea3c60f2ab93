"""Copies to and from a card that the host does not wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Array: TypeAlias = "np.ndarray[Any, Any] | Tensor"
ALIGNMENT = 16  # bytes; a view of another dtype must start at a multiple of its size


def to_device(device: torch.device, *arrays: Array) -> tuple[Tensor, ...]:
    """Return host arrays as tensors on `device`.

    A card gets all of them in one copy from one page-locked buffer, which the host does not wait for. The tensors
    share that buffer's memory on the card. On a CPU they share memory with `arrays`.
    """
    tensors = [array if isinstance(array, Tensor) else torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        return tuple(tensors)
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for part, tensor in zip(packed.split(sizes), tensors, strict=True):
        _view(part, tensor).copy_(tensor)
    copied = packed.to(device, non_blocking=True)
    return tuple(_view(part, tensor) for part, tensor in zip(copied.split(sizes), tensors, strict=True))


def to_host(tensor: Tensor) -> Callable[[], np.ndarray[Any, Any]]:
    """Start copying a tensor to the host; return a function that waits for the copy and returns it as an array.

    The array shares memory with a tensor on the CPU.
    """
    if tensor.device.type == "cpu":
        return tensor.numpy
    array = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    array.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)  # the wait uses no CPU time
    copied.record(torch.cuda.current_stream(tensor.device))

    def wait() -> np.ndarray[Any, Any]:
        copied.synchronize()
        return array.numpy()

    return wait


def _view(part: Tensor, like: Tensor) -> Tensor:
    """Return the first bytes of `part` with the dtype and the shape of `like`."""
    return part[: like.nbytes].view(like.dtype).view(like.shape)
