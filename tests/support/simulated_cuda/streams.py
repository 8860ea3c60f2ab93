"""`torch.cuda.Stream`, `Event` and `stream`: a stream has an identity and is current per thread; events do nothing."""

import simcuda
import torch

from simulated_cuda.trace import host_waits


def index_of(device):
    """Return the GPU's index of whatever `torch.cuda` takes as a device; None and no index: the current GPU."""
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return simcuda.current_device() if index is None or index < 0 else index


class Stream:
    """A stream of a GPU; equal to others with its GPU and `stream_id`. The default stream's id is 0."""

    def __init__(self, device=None, priority=0, *, stream_id=None):
        self.device_index = index_of(device)
        self.device = torch.device("cuda", self.device_index)
        self.device_type = 1
        self.priority = priority
        self.stream_id = self.cuda_stream = simcuda.new_stream() if stream_id is None else stream_id

    def wait_stream(self, stream): ...

    def wait_event(self, event): ...

    def record_event(self, event=None):
        return event or Event()

    def synchronize(self):
        host_waits("stream.synchronize")

    def query(self):
        return True

    def __eq__(self, other):
        return isinstance(other, Stream) and hash(self) == hash(other)

    def __hash__(self):
        return hash((self.device_index, self.stream_id))

    def __repr__(self):
        return f"Stream(device=cuda:{self.device_index}, stream_id={self.stream_id})"


class Event:
    """A mark in a stream, which is reached as soon as it is recorded."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False): ...

    def record(self, stream=None): ...

    def wait(self, stream=None): ...

    def query(self):
        return True

    def synchronize(self):
        host_waits("event.synchronize")

    def elapsed_time(self, end_event):
        return 0.0


class StreamContext:
    """`torch.cuda.stream(...)`: the stream and its GPU are the thread's current ones; None changes nothing."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        if self.stream is None:
            return
        self._gpu = simcuda.current_device()
        self._before = simcuda.current_stream(self.stream.device_index)
        set_stream(self.stream)

    def __exit__(self, *_):
        if self.stream is None:
            return
        simcuda.set_stream(self.stream.device_index, self._before)
        simcuda.set_device(self._gpu)


def set_stream(stream):
    simcuda.set_device(stream.device_index)
    simcuda.set_stream(stream.device_index, stream.stream_id)


def current_stream(device=None):
    gpu = index_of(device)
    return Stream(gpu, stream_id=simcuda.current_stream(gpu))


def default_stream(device=None):
    return Stream(device, stream_id=0)
