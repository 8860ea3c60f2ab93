"""Merges LoRA adapters into the weights of a critic that is sharded over several ranks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rlhf_triton.models.adapters import MergedWeights, at_least_float32
from rlhf_triton.models.sharded_tensors import sharded_like, whole


class MergedSlices(MergedWeights):
    """The weights of a sharded model with its adapters merged in, as this rank's slices (`DTensor`s).

    They are bit-identical to `MergedWeights` in one process. Each tensor is computed when it is read, without
    communication, so ranks may read in any order.
    """

    def __init__(self, *args: Any) -> None:
        """Gather the adapters of all layers, which are small; collective. Arguments: see `MergedWeights`."""
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
        # Slice the full product: the rounding of a product of slices would depend on the number of ranks.
        delta = functional_call(_Delta(self.adapted[name]), adapters, ())
        return (at_least_float32(tensor) + sharded_like(delta, tensor)).to(self.dtype(name))


class _Delta(nn.Module):
    """The adapters' change to one weight, as a module, so that `functional_call` can substitute gathered adapters."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self) -> Tensor:
        return self.layer.get_delta_weight("default")
