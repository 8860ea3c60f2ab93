"""Converts between sharded tensors (`DTensor`, a slice on each rank) and full tensors. Takes seconds to import."""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """Gather a `DTensor` into the full tensor (collective); return any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a full tensor in the same way as `like`; not collective."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
