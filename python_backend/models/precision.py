"""Forwards in bfloat16 by autocast, with logits in float32: the actor's policy and the served reference share them.

Autocast casts the weights of a matrix product at every call unless they are trained. Frozen ones are held in bfloat16
instead: the same values, without the cast. What autocast leaves in float32 stays in float32 (embeddings, norms, the
experts of a mixture), and so does the output layer: log-probs under bfloat16 logits are off by a tenth of a nat.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def computing(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """What forwards run under, of `actor.precision`."""
    return contextlib.nullcontext() if precision == "float32" else torch.autocast(device.type, dtype=torch.bfloat16)


def use_bfloat16(model: Any) -> None:
    """Prepare a causal LM for forwards under autocast: frozen matrices in bfloat16, logits in float32."""
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        head.forward = functools.partial(_exact_linear, head)  # type: ignore[method-assign]
    matrices = {id(parameter) for module, parameter in _matrices(model) if module is not head}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16 if id(parameter) in matrices else torch.float32)


@contextlib.contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Have forwards compute in float32, one module's weights at a time: for comparing two ways to compute."""
    held: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]] = {}
    for module, parameter in _matrices(model):
        if parameter.dtype == torch.bfloat16:
            held.setdefault(module, []).append((parameter, parameter.data))
    hooks = [module.register_forward_pre_hook(_widen) for module in held]
    hooks += [module.register_forward_hook(lambda module, *_: _narrow(held[module])) for module in held]
    try:
        with torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for weights in held.values():
            _narrow(weights)


def _matrices(model: Any) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Parameters that autocast casts, and whose they are; but not adapters, to whose type peft casts their input."""
    for path, module in model.named_modules():
        if type(module) in (nn.Linear, Conv1D) and "lora_" not in path:
            for parameter in module.parameters(recurse=False):
                yield module, parameter


def _exact_linear(head: nn.Linear, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        return nn.functional.linear(hidden.to(head.weight.dtype), head.weight, head.bias)


def _widen(module: nn.Module, *_: Any) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.float()


def _narrow(weights: list[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, data in weights:
        parameter.data = data
