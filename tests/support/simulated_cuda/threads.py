"""Records which GPU was the current one of each thread when it launched a kernel.

A thread starts with `cuda:0` as its current GPU. ATen launches a kernel on the GPU of its tensors all the same, but
`"cuda"` without an index, new streams, `torch.cuda.synchronize` and kernels of others use the current one.
"""

import contextlib
import threading
from typing import NamedTuple

import simcuda


class Launches(NamedTuple):
    """Kernels of one thread on `gpu` while `current` was its current GPU. Copies to and from the host count, too."""

    thread: str
    current: int
    gpu: int
    kernels: int


class LaunchRecord:
    """The kernels launched by this process's threads in the block of `recorded_launches`; filled at its end."""

    def __init__(self):
        self.launches = []

    @property
    def strays(self):
        """Kernels on another GPU than the thread's current one."""
        return [each for each in self.launches if each.current != each.gpu]


@contextlib.contextmanager
def recorded_launches():
    """Record the kernels of all threads of this process in the block; then `assert record.strays == []`."""
    names = {}
    run = threading.Thread.run

    def named(thread):
        names[threading.get_native_id()] = thread.name
        run(thread)

    names |= {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id is not None}
    record = LaunchRecord()
    threading.Thread.run = named
    simcuda.record_launches(True)
    try:
        yield record
    finally:
        threading.Thread.run = run
        simcuda.record_launches(False)
        for (thread_id, current, gpu), kernels in simcuda.launches().items():
            record.launches.append(
                Launches(names.get(thread_id, f"thread {thread_id} of torch"), current, gpu, kernels)
            )
