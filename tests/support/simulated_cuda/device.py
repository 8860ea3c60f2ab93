"""`torch.cuda` of the simulated GPUs, and what a test sets: memory limits.

`install` is called by `hook` when torch has been imported.
"""

import contextlib
import sys
from typing import NamedTuple

import simcuda
import torch

from simulated_cuda import streams
from simulated_cuda.extension import NUM_GPUS
from simulated_cuda.nccl import install_nccl
from simulated_cuda.storages import install_storages
from simulated_cuda.streams import index_of
from simulated_cuda.trace import host_waits

TOTAL_MEMORY = 80 << 30  # bytes of a GPU without a limit


class Properties(NamedTuple):
    """The result of `torch.cuda.get_device_properties`."""

    name: str
    total_memory: int
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    uuid: str = "00000000-0000-0000-0000-000000000000"


@contextlib.contextmanager
def memory_limit(gpu, num_bytes):
    """Let a GPU have `num_bytes`, what is allocated included: beyond, an allocation raises torch.OutOfMemoryError."""
    before = simcuda.limit(gpu)
    simcuda.set_limit(gpu, num_bytes)
    try:
        yield
    finally:
        simcuda.set_limit(gpu, before)


def total_memory(device=None):
    return simcuda.limit(index_of(device)) or TOTAL_MEMORY


def mem_get_info(device=None):
    total = total_memory(device)
    return max(0, total - simcuda.allocated(index_of(device))), total


class DeviceContext:
    """`torch.cuda.device(...)`."""

    def __init__(self, device):
        self.idx = index_of(device)

    def __enter__(self):
        self.prev_idx = simcuda.current_device()
        simcuda.set_device(self.idx)

    def __exit__(self, *error):
        simcuda.set_device(self.prev_idx)


def exchange_device(gpu):
    before = simcuda.current_device()
    simcuda.set_device(gpu)
    return before


def install():
    """Make `torch.cuda` and storages work on the simulated GPUs."""
    functions = {
        "_lazy_init": lambda: None,
        "_is_compiled": lambda: True,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: NUM_GPUS,
        "current_device": simcuda.current_device,
        "set_device": lambda device: simcuda.set_device(index_of(device)),
        "device": DeviceContext,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "Simulated H100",
        "get_device_properties": lambda device=None: Properties("Simulated H100", total_memory(device)),
        "synchronize": lambda device=None: host_waits("cuda.synchronize"),
        "Stream": streams.Stream,
        "Event": streams.Event,
        "StreamContext": streams.StreamContext,
        "stream": streams.StreamContext,
        "set_stream": streams.set_stream,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "mem_get_info": mem_get_info,
        "memory_allocated": lambda device=None: simcuda.allocated(index_of(device)),
        "memory_reserved": lambda device=None: simcuda.allocated(index_of(device)),
        "max_memory_allocated": lambda device=None: simcuda.peak(index_of(device)),
        "max_memory_reserved": lambda device=None: simcuda.peak(index_of(device)),
        "reset_peak_memory_stats": lambda device=None: simcuda.reset_peak(index_of(device)),
        "empty_cache": lambda: None,
        "default_generators": tuple(simcuda.default_generator(gpu) for gpu in range(NUM_GPUS)),
    }
    for name, function in functions.items():
        _replace(name, function)
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.backends.cuda.is_built = lambda: True
    torch._C._cuda_getCurrentRawStream = simcuda.current_stream
    install_storages()
    install_nccl()


def _replace(name, new):
    """Replace a name of `torch.cuda`, also where its submodules have imported it."""
    old = getattr(torch.cuda, name)
    for module in [module for path, module in sys.modules.items() if f"{path}.".startswith("torch.cuda.")]:
        if vars(module).get(name) is old:
            setattr(module, name, new)
