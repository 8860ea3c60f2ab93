"""`torch.cuda.Stream`, `Event` and `stream`: a stream has an identity and is current per thread; events do nothing."""

from __future__ import annotations

from typing import Any

import simcuda
import torch

from simulated_cuda.trace import host_waits


def index_of(device: Any) -> int:
    """Return the GPU's index of whatever `torch.cuda` takes as a device; None and no index: the current GPU."""
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return simcuda.current_device() if index is None or index < 0 else index


class Stream:
    """A stream of a GPU; equal to others with its GPU and `stream_id`. The default stream's id is 0."""

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None) -> None:
        self.device_index = index_of(device)
        self.device = torch.device("cuda", self.device_index)
        self.device_type = 1
        self.priority = priority
        self.stream_id = self.cuda_stream = simcuda.new_stream() if stream_id is None else stream_id

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        host_waits("stream.synchronize")

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and hash(self) == hash(other)

    def __hash__(self) -> int:
        return hash((self.device_index, self.stream_id))

    def __repr__(self) -> str:
        return f"Stream(device=cuda:{self.device_index}, stream_id={self.stream_id})"


class Event:
    """A mark in a stream, which is reached as soon as it is recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        host_waits("event.synchronize")

    def elapsed_time(self, end_event: Event) -> float:
        return 0.0


class StreamContext:
    """`torch.cuda.stream(...)`: the stream and its GPU are the thread's current ones; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is None:
            return
        self._gpu = simcuda.current_device()
        self._before = simcuda.current_stream(self.stream.device_index)
        set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is None:
            return
        simcuda.set_stream(self.stream.device_index, self._before)
        simcuda.set_device(self._gpu)


def set_stream(stream: Stream) -> None:
    simcuda.set_device(stream.device_index)
    simcuda.set_stream(stream.device_index, stream.stream_id)


def current_stream(device: Any = None) -> Stream:
    gpu = index_of(device)
    return Stream(gpu, stream_id=simcuda.current_stream(gpu))


def default_stream(device: Any = None) -> Stream:
    return Stream(device, stream_id=0)
