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


def use_card(device: torch.device) -> None:
    """Make `device` the current card of this thread, where `cuda` without an index and new streams go."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def use_own_stream(device: torch.device) -> None:
    """Let this thread compute on `device`, on a stream of its own."""
    use_card(device)
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=HIGH))


@contextlib.contextmanager
def staging(device: torch.device) -> Iterator[None]:
    """Run the block, which loads a model, beside the forward passes; at its end the model is on the device."""
    if device.type != "cuda":
        yield
        return
    use_card(device)  # else leaving the stream would make the first card current, and open a context there
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
        """Run the block's kernels on this stream: after those that are queued now, and before those queued after it.

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
