"""Merges LoRA adapters into the weights of a critic that is sharded over several ranks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rlhf_triton.python_backend.models.adapters import MergedWeights, wide
from rlhf_triton.python_backend.models.sharded_tensors import sharded_like, whole


class MergedSlices(MergedWeights):
    """The weights of a sharded model with its adapters merged in, as this rank's slices (`DTensor`s).

    They have the bits of `MergedWeights` on one process. Each tensor is computed when it is read, without
    communication, so that ranks may read in any order.
    """

    def __init__(self, *args: Any) -> None:
        """Gather the adapters of all layers, which are small; collective. Arguments as of `MergedWeights`."""
        super().__init__(*args)
        self._gathered = {
            name: {path: whole(p.detach()) for path, p in layer.named_parameters() if path.startswith("lora_")}
            for name, layer in self.adapted.items()
        }

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        tensor = self.plain[name].detach()
        if name not in self.adapted:
            return tensor.to(self.dtype(name))
        adapters = {f"layer.{path}": adapter for path, adapter in self._gathered[name].items()}
        # Rows of the whole product rather than a product of rows, whose rounding would depend on the number of ranks.
        delta = functional_call(_Delta(self.adapted[name]), adapters, ())
        return (wide(tensor) + sharded_like(delta, tensor)).to(self.dtype(name))


class _Delta(nn.Module):
    """The change of one weight by its adapters, as a module, in which `functional_call` can replace these."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self) -> Tensor:
        return self.layer.get_delta_weight("default")
