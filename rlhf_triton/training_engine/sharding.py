"""Shards a model over the ranks with FSDP2.

`fully_shard` is applied from outside the model. Parameters become `DTensor`s, and each rank holds a slice of them;
layers gather their weights for the forward and backward pass, and average gradients over the ranks.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_triton.models.sharded_tensors import whole
from rlhf_triton.training_engine.ranks import Ranks

MAX_UNREDUCED_BYTES = 4 << 30  # bytes of gradients on each rank


def shard(
    model: Any,
    ranks: Ranks,
    *,
    methods: Iterable[str] = (),
    prepare: Callable[[Any], object] = lambda module: None,
    precision: str = "float32",
) -> None:
    """Shard the weights of a transformers model over all ranks, in place; collective.

    Each transformer layer is gathered and freed separately; embeddings, final norm and head are gathered for the whole
    forward pass, which keeps tied embeddings a single parameter.

    Args:
        model: a complete model, including head and adapters, with the same weights on every rank.
        methods: names of `model`'s methods that call its parts without going through `forward`.
        prepare: called with each layer before it is sharded, and with the model at the end. Memory that it allocates
            for a layer is reduced to a slice before the next layer.
        precision: with `bfloat16`, GPUs gather the layers' weights in bfloat16, as autocast would cast them, and sum
            gradients in float32. Embeddings, final norm and head stay in float32.
    """
    # Without a mesh, the ranks of a CPU run would shard onto the GPUs of a machine that has some.
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    casts = ranks.device.type == "cuda" and precision == "bfloat16"
    cast = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        prepare(layer)
        fully_shard(layer, mesh=mesh, mp_policy=cast if casts else MixedPrecisionPolicy())
    prepare(model)
    fully_shard(model, mesh=mesh)
    for name in methods:
        register_fsdp_forward_method(model, name)


def copy_with_empty_weights(model: Any, device: torch.device | str) -> Any:
    """Return a copy of a model on `device` with uninitialised weights; tied weights stay tied.

    On `meta`, the copy shares the model's buffers, because their values are computed, not loaded.
    """
    memo: dict[int, Tensor] = {
        id(buffer): buffer if device == "meta" else buffer.to(device, copy=True) for buffer in model.buffers()
    }
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    return copy.deepcopy(model, memo)


def is_sharded(model: Any) -> bool:
    """Return whether `shard` has been called with this model."""
    return isinstance(model, FSDPModule)


def sync_gradients(model: Any, *, is_last: bool) -> None:
    """Set whether the next backward pass reduces gradients over the ranks: on GPUs, only in the last micro-batch.

    Until then, each rank holds gradients of all trained weights. If these take more than MAX_UNREDUCED_BYTES, and on a
    CPU, every backward pass reduces them. No effect on a model that is not sharded.
    """
    if not is_sharded(model):
        return
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    waits = model.device.type == "cuda" and trained * torch.float32.itemsize <= MAX_UNREDUCED_BYTES
    model.set_requires_gradient_sync(is_last or not waits)


@contextlib.contextmanager
def gathered_as_stored(model: Any) -> Iterator[None]:
    """Run forward passes with the layers' weights in their stored dtype, not cast to bfloat16; collective, for checks.

    FSDP cannot change the dtype in which it gathers, so each layer gathers cast weights a second time. After the block,
    each rank holds only its slices. No effect on a model that is not sharded.
    """
    if not is_sharded(model):
        yield
        return
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    stored = {layer: list(layer.parameters()) for layer in layers}
    held: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]] = {}

    def widen(layer: nn.Module, *_: Any) -> None:
        pairs = zip(layer.parameters(), stored[layer], strict=True)
        cast = [(parameter, own) for parameter, own in pairs if parameter.dtype != own.dtype]
        held[layer] = [(parameter, parameter.data) for parameter, _ in cast]
        for parameter, own in cast:
            parameter.data = whole(own.detach())

    def narrow(layer: nn.Module, *_: Any) -> None:
        for parameter, data in held.pop(layer, []):
            parameter.data = data

    hooks = [layer.register_forward_pre_hook(widen) for layer in layers]
    hooks += [layer.register_forward_hook(narrow, always_call=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    model.reshard()


@torch.no_grad()
def all_finite(parameters: Iterable[Tensor]) -> bool:
    """Return whether this rank's slices of the parameters are finite."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    sums = [p.sum().double() for p in local if p.numel()]
    return bool(torch.stack(sums).isfinite().all()) if sums else True
