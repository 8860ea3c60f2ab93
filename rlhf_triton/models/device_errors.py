"""Classifies errors of torch that have no class of their own by their messages; no other module reads these."""

import re

import torch
import torch.distributed as dist

FULL = re.compile("CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|'out of memory'")  # driver, cuBLAS, NCCL
BROKEN = re.compile("CUDA error|NCCL error|CUDNN_STATUS|CUBLAS_STATUS")
LOST = re.compile("closed by peer|reset by peer|gloo|NCCL", re.IGNORECASE)  # errors of collectives


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that the GPU ran out of memory, so that smaller parts of the work may succeed."""
    return isinstance(error, torch.OutOfMemoryError) or _says(error, FULL)


def is_device_error(error: BaseException) -> bool:
    """Return whether the GPU, or this process's context on it, is broken, so that later calls may fail as well."""
    is_broken = isinstance(error, torch.AcceleratorError) or _says(error, BROKEN)
    return is_broken and not is_out_of_memory(error)


def is_lost_rank(error: BaseException) -> bool:
    """Return whether a collective failed because another rank has ended."""
    return isinstance(error, dist.DistError) or _says(error, LOST)


def _says(error: BaseException, messages: re.Pattern[str]) -> bool:
    return isinstance(error, RuntimeError) and bool(messages.search(str(error)))
