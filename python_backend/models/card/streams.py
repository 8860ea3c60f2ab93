"""Streams of a card for work beside that of other threads, and the card of a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def use_card(device: torch.device) -> None:
    """Make `device` the current card of this thread, which is GPU 0 when the thread starts; do nothing for a CPU.

    PyTorch's own kernels follow their tensors. New streams, `cuda` without an index and the kernels of other libraries
    go to the current card.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


class CardStream:
    """A stream for one kind of work of a process, so that it does not wait for what other threads compute."""

    def __init__(self, device: torch.device, *, priority: int = 0) -> None:
        """`priority`: 0, or -1 for kernels that go before those of other streams. On a CPU there are no streams."""
        self._stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None

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
