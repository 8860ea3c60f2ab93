"""Streams of a card: threads whose work does not wait for that of others. On a CPU, these functions do nothing.

CUDA's current device and stream belong to a thread, and a new thread starts on the first card.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

HIGH, LOW = -1, 0  # priorities: kernels of high priority start first


def use_own_stream(device: torch.device) -> None:
    """Let this thread compute on `device`, on a stream of its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=HIGH))


@contextlib.contextmanager
def staging(device: torch.device) -> Iterator[None]:
    """Run the block, which loads a model, beside the forward passes; at its end the model is on the device."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_staging_stream(device)):
        yield
        torch.cuda.current_stream(device).synchronize()


@functools.cache  # the allocator keeps freed memory for the stream that it was allocated on
def _staging_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device, priority=LOW)
