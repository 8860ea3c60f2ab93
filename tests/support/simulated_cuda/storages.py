"""`torch.UntypedStorage` of the simulated GPUs: the methods whose CUDA code a CPU build lacks."""

import simcuda
import torch
from torch.storage import UntypedStorage


def install_storages():
    """Let `clone`, `cpu` and `resize_` work on storages of the GPUs."""
    clone = UntypedStorage.clone
    cpu = UntypedStorage.cpu
    resize = UntypedStorage.resize_

    def cloned(storage):
        return _bytes_of(storage).clone().untyped_storage() if storage.is_cuda else clone(storage)

    def on_host(storage):
        return _bytes_of(storage).cpu().untyped_storage() if storage.is_cuda else cpu(storage)

    def resized(storage, num_bytes):
        if not storage.is_cuda:
            return resize(storage, num_bytes)
        simcuda.resize_storage(_bytes_of(storage), num_bytes)
        return storage

    UntypedStorage.clone = cloned
    UntypedStorage.cpu = on_host
    UntypedStorage.resize_ = resized


def _bytes_of(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
