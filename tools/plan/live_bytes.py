"""Counts the memory that a computation needs, without the memory: its tensors have shapes and dtypes but no values."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from python_backend.models import output_head


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that are alive: `live` now, `peak` at most since the last `reset`.

    Counts what autograd saves, what operations allocate, and gradients; not the scratch memory inside a kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def reset(self) -> None:
        """Start a new peak from the tensors alive now."""
        self.peak = self.live

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._sizes:  # a view shares the storage of its base
            self._sizes[key] = storage.nbytes()
            self.live += self._sizes[key]
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


@contextlib.contextmanager
def counting(device: str = "cpu") -> Iterator[LiveBytes]:
    """Run the block with tensors that have no values, and count the bytes that they would need on `device`.

    They behave as CPU tensors, with which torch plans for GPUs that it was not built for: kernels that save other
    tensors on a GPU differ slightly.
    """
    # No Mock, which would keep the tensors of its calls.
    head = mock.patch.object(output_head, "on_card", lambda tensor: tensor.device.type != device)
    with head, FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        yield live


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, counting each storage once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def model_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return num_bytes([*model.parameters(), *model.buffers()])
