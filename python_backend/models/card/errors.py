"""Tells the errors of a card apart: out of memory, after which it goes on, and those that leave it unusable."""

from __future__ import annotations

import torch

FULL = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "'out of memory'")  # of the driver, cuBLAS, NCCL
BROKEN = ("CUDA error", "NCCL error", "CUDNN_STATUS", "CUBLAS_STATUS")  # in messages of errors without a class


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the card's memory was too small: the same work may succeed in smaller parts."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in FULL)
    )


def is_device_error(error: BaseException) -> bool:
    """Return whether the card, or this process's context on it, is broken: every later call of it may raise, too."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in BROKEN)
    )
