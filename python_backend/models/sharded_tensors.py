"""Sharded tensors (`DTensor`, a slice on each rank), and whole ones. Importing this takes seconds."""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a `DTensor`, collective; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor, sharded as `like` is; any rank may call it alone."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
