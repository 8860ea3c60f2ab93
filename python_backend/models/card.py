"""Work on a GPU (a CUDA device): its errors and memory, copies and streams that the host does not wait for.

On a CPU, these functions do nothing that changes a result.
"""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

from rlhf_triton.errors import RlhfError

FULL = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "'out of memory'")  # of the driver, cuBLAS, NCCL
BROKEN = ("CUDA error", "NCCL error", "CUDNN_STATUS", "CUBLAS_STATUS")  # in messages of errors without a class


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the GPU was out of memory: the same work may succeed in smaller parts."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in FULL)
    )


def is_device_error(error: BaseException) -> bool:
    """Return whether the GPU, or this process's context on it, is broken: every later call of it may raise, too."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in BROKEN)
    )


# The memory of a GPU: how much is used; work that ran out of it is repeated with half as much at a time.
#
# Only the out-of-memory error is handled here. Halving a micro-batch changes no result beyond rounding.


logger = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")


def card_bytes(device: torch.device) -> dict[str, int]:
    """Return this process's memory on a GPU and the GPU's total, in bytes; {} on a CPU."""
    if device.type == "cpu":
        return {}
    return {
        "card_bytes": torch.cuda.memory_allocated(device),
        "card_peak_bytes": torch.cuda.max_memory_allocated(device),
        "card_reserved_bytes": torch.cuda.memory_reserved(device),
        "card_size_bytes": torch.cuda.get_device_properties(device).total_memory,
    }


class OutOfMemory(RlhfError):
    """The GPU's memory is too small even for the smallest part of the work."""


class RankOutOfMemory(RlhfError):
    """A rank has run out of GPU memory while the others wait for it in a collective."""


class Halving:
    """Size of the work that one model does at a time on its GPU, and how often it was halved."""

    def __init__(self, setting: str, size: int = 0, *, remedy: str, alone: bool = True) -> None:
        """
        Args:
            setting: the configuration key to lower, for the log and for errors.
            size: how much is done at a time (tokens, rows or slots), for `repeat`.
            remedy: what helps if even one row alone does not fit, e.g. "lower max_length".
            alone: other ranks take no part in the work of `repeat`. If they do, they wait for this one in a collective,
                so its errors are raised as they are; see `on_rank`.
        """
        self.setting, self.size, self._remedy, self._alone = setting, size, remedy, alone
        self.count = self._told = 0

    def new(self) -> int:
        """Return how often the size has been halved since the last call."""
        new, self._told = self.count - self._told, self.count
        return new

    def repeat(self, work: Callable[[int], T], *, least: int, most: int) -> T:
        """Return `work(size)`; on out-of-memory, halve `size` permanently and call `work` again.

        Args:
            work: starts over when it is called again.
            least: the smallest size of use, e.g. the tokens of the longest row.
            most: the size from which on everything is done at once.

        Raises:
            OutOfMemory: `work(least)` does not fit either; `size` is what it was.
        """
        before = self.size
        if not self._alone:
            return work(self.size)
        while True:
            try:
                return work(self.size)
            except RuntimeError as error:
                reason = _reason_of(error)
            now = min(self.size, most)
            self.size = max(least, now // 2) if now > least else before
            self._halve(reason, now, now > least)

    def in_parts(self, work: Callable[[Sequence[R]], T], rows: Sequence[R]) -> list[T]:
        """Return the results of `work` on all rows or, on out-of-memory, on each half in turn.

        Raises:
            OutOfMemory: one row alone does not fit.
        """
        try:
            return [work(rows)]
        except RuntimeError as error:
            reason = _reason_of(error)
        self._halve(reason, len(rows), len(rows) > 1)
        half = len(rows) // 2
        return self.in_parts(work, rows[:half]) + self.in_parts(work, rows[half:])

    def _halve(self, reason: str, size: int, can_halve: bool) -> None:
        # Not inside `except`: its error holds the frames, and with them the tensors, of the pass that failed.
        torch.cuda.empty_cache()
        if not can_halve:
            raise OutOfMemory(f"not even one row alone fits into the GPU's memory ({reason}); {self._remedy}")
        self.count += 1
        logger.warning(
            "%s; repeating with half of %d at a time (%s), as %d times so far", reason, size, self.setting, self.count
        )


@contextlib.contextmanager
def on_rank(rank: int | None, device: object, setting: str) -> Iterator[None]:
    """Name the rank, of several, and the setting if the block runs out of memory; log the traceback.

    Raises:
        RankOutOfMemory: the ranks cannot continue, because one cannot repeat its part of a collective alone.
    """
    try:
        yield
    except RuntimeError as error:
        who, reason = "this process" if rank is None else f"rank {rank}", _reason_of(error)
        logger.error("no memory:", exc_info=True)
        raise RankOutOfMemory(f"{who} has run out of the memory of {device} ({reason}); lower {setting}") from error


def _reason_of(error: RuntimeError) -> str:
    """Return the first sentence of an out-of-memory error; raise any other error again."""
    if not is_out_of_memory(error):
        raise error
    return str(error).splitlines()[0].split(". ")[0]


# Keeps transformers from inspecting the inputs of a forward pass: the host would wait for the GPU.


def skip_inspections(model: Any) -> None:
    """Skip transformers' search for packed rows, which never occur here, and for padding; only on a GPU.

    All are of the whole process, and change no result beyond rounding: the attention of an encoder uses its mask even
    if no row has padding. On a CPU they cost next to nothing.
    """
    if model.device.type != "cpu":
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
        masking_utils._ignore_bidirectional_mask_sdpa = lambda padding, length, local=None: (
            padding is None and (local is None or length < local)
        )
        PreTrainedModel.warn_if_padding_and_no_attention_mask = lambda *_: None
        module: Any = sys.modules[type(model).__module__]
        if hasattr(module, "make_log_bucket_position"):  # DeBERTa's
            module.make_log_bucket_position = _log_buckets


def _log_buckets(relative: Tensor, bucket_size: int, max_position: int) -> Tensor:
    """Return the bucket of each relative position, as transformers does, which copies a number to the GPU for it."""
    mid = bucket_size // 2
    far = relative.abs().clamp(min=mid - 1)
    logs = (far / mid).log() / torch.tensor((max_position - 1) / mid).log() * (mid - 1)
    return torch.where(far <= mid, relative.type_as(logs), (logs.ceil() + mid) * relative.sign())


# Copies to and from a GPU that the host does not wait for.


Array: TypeAlias = "np.ndarray[Any, Any] | Tensor"
ALIGNMENT = 16  # bytes; a view of another dtype must start at a multiple of its size


def to_device(device: torch.device, *arrays: Array) -> tuple[Tensor, ...]:
    """Return host arrays as tensors on `device`.

    A GPU gets all of them in one copy from one page-locked buffer, which the host does not wait for. The tensors
    share that buffer's memory on the GPU. On a CPU they share memory with `arrays`.
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


# Streams of a GPU: threads whose work does not wait for that of others. On a CPU, these functions do nothing.
#
# CUDA's current device and stream belong to a thread, and a new thread starts on the first GPU.


HIGH, LOW = -1, 0  # priorities: kernels of high priority start first


def use_card(device: torch.device) -> None:
    """Make `device` this thread's current GPU, which `cuda` without an index and new streams use."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def use_own_stream(device: torch.device) -> None:
    """Make this thread compute on `device`, in its own stream."""
    use_card(device)
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=HIGH))


@contextlib.contextmanager
def staging(device: torch.device) -> Iterator[None]:
    """Run the block, which loads a model, beside the forward passes; at its end the model is on the device."""
    if device.type != "cuda":
        yield
        return
    use_card(device)  # else leaving the stream would make the first GPU current, and open a context there
    with torch.cuda.stream(_staging_stream(device)):
        yield
        torch.cuda.current_stream(device).synchronize()


@functools.cache  # the allocator keeps freed memory for the stream that it was allocated on
def _staging_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device, priority=LOW)


class CardStream:
    """A stream of high priority for one kind of work, beside what other threads compute."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=HIGH) if device.type == "cuda" else None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the block's kernels on this stream, in order with the kernels queued before and after the block.

        Tensors that the block makes and returns may thus be used on the stream around it.
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
