"""Work on a GPU (a CUDA device): copies and streams that the host does not wait for.

On a CPU, these functions do nothing that changes a result.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Array: TypeAlias = "np.ndarray[Any, Any] | Tensor"
ALIGNMENT = 16  # bytes; a view of another dtype must start at a multiple of its size
# priorities of streams: kernels of high priority start first
HIGH = -1
LOW = 0


def to_device(device: torch.device, *arrays: Array) -> tuple[Tensor, ...]:
    """Return host arrays as tensors on `device`.

    On a GPU, they are copied at once from a page-locked buffer, without the host waiting, and share one buffer's
    memory. On a CPU, they share memory with `arrays`.
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

    If the tensor is on the CPU, the array shares its memory.
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


def use_gpu(device: torch.device) -> None:
    """Make `device` this thread's current GPU, which `cuda` without an index and new streams use."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def use_own_stream(device: torch.device) -> None:
    """Make this thread compute on `device`, in a stream of its own."""
    use_gpu(device)
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=HIGH))


@contextlib.contextmanager
def staging(device: torch.device) -> Iterator[None]:
    """Run the block, which loads a model, in parallel to forward passes; at its end, the model is on the device."""
    if device.type != "cuda":
        yield
        return
    use_gpu(device)  # otherwise leaving the stream would make the first GPU current and create a context there
    with torch.cuda.stream(_staging_stream(device)):
        yield
        torch.cuda.current_stream(device).synchronize()


@functools.cache  # cached, because the allocator reuses freed memory only for the same stream
def _staging_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device, priority=LOW)


class GpuStream:
    """A high-priority stream for one kind of work, in parallel to other threads' work."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=HIGH) if device.type == "cuda" else None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the block's kernels on this stream, ordered with the kernels queued before and after the block.

        Tensors that the block creates may thus be used on the surrounding stream.
        """
        if self._stream is None:
            yield
            return
        around = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(around)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            around.wait_stream(self._stream)
