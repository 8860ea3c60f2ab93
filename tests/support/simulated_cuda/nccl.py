"""`nccl` as a backend for tensors of the simulated GPUs: gloo over their memory; tensors of the CPU are refused."""

import simcuda
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

NAME = "simnccl"


def install_nccl():
    """Register the backend, and make `torch.distributed` choose it where `nccl` is named."""
    dist.Backend.register_backend(NAME, _create, devices=["cuda"])
    join = c10d.init_process_group
    new_group = c10d.new_group

    def init_process_group(backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)  # joins NCCL's communicator early, and gloo has none
        join(_renamed(backend), *args, **kwargs)

    def new_simulated_group(ranks=None, timeout=None, backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return new_group(ranks, timeout, _renamed(backend), *args, **kwargs)

    for module in (dist, c10d):
        module.init_process_group = init_process_group
        module.new_group = new_simulated_group


def _create(store, rank, size, timeout):
    gloo = dist.ProcessGroupGloo(dist.PrefixStore(NAME, store), rank, size, timeout=timeout)
    return simcuda.make_nccl(gloo)


def _renamed(backend):
    return backend if backend is None else str(backend).replace("nccl", NAME)
