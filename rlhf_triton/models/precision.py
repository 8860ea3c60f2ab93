"""Runs forward passes in bfloat16 with autocast, and computes logits in float32.

Shared by the policy, the reference and the critic in training.

Autocast casts frozen weights of matrix products again at every call. They are therefore stored in bfloat16: the same
values, without the cast. Weights that autocast leaves in float32 (embeddings, norms, the experts of a mixture) stay in
float32. So does the output layer: with bfloat16 logits, log-probs are off by a tenth of a nat.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def computing(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """Return the context for forward passes in `precision` (`float32` or `bfloat16`)."""
    return contextlib.nullcontext() if precision == "float32" else torch.autocast(device.type, dtype=torch.bfloat16)


def use_bfloat16(model: Any, head: nn.Module | None) -> None:
    """Prepare a model for autocast: store frozen matrices in bfloat16, compute the outputs of `head` in float32.

    `model` may also be a submodule, to prepare one part of a model at a time.
    """
    parts = set() if head is None else {*head.modules()}
    for part in parts:
        if isinstance(part, nn.Linear):
            part.forward = functools.partial(_exact_linear, part)  # type: ignore[method-assign]
    matrices = {id(parameter) for module, parameter in _matrices(model) if module not in parts}
    for parameter in model.parameters():
        dtype = torch.bfloat16 if id(parameter) in matrices else torch.float32
        if not parameter.requires_grad and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


@contextlib.contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Run forward passes in float32 inside the context, for exact comparisons.

    Weights stored in bfloat16 are widened for one module at a time, so memory grows by one module only.
    """
    held: list[tuple[nn.Parameter, Tensor]] = []

    def widen(module: nn.Module, *_: Any) -> None:
        # Read the parameters only now: FSDP replaces them by gathered ones when a layer starts.
        for parameter in module.parameters(recurse=False):
            if parameter.dtype == torch.bfloat16:
                held.append((parameter, parameter.data))
                parameter.data = parameter.data.float()

    def narrow(*_: Any) -> None:
        while held:
            parameter, data = held.pop()
            parameter.data = data

    modules = {module for module, parameter in _matrices(model) if parameter.dtype == torch.bfloat16}
    hooks = [module.register_forward_pre_hook(widen) for module in modules]
    hooks += [module.register_forward_hook(narrow) for module in modules]
    try:
        with torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        narrow()


def _matrices(model: Any) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield `(module, parameter)` for each parameter that autocast casts.

    LoRA adapters are left out: peft casts their input to the adapter's own dtype.
    """
    for path, module in model.named_modules():
        if type(module) in (nn.Linear, Conv1D) and "lora_" not in path:
            for parameter in module.parameters(recurse=False):
                yield module, parameter


def _exact_linear(head: nn.Linear, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        return nn.functional.linear(hidden.to(head.weight.dtype), head.weight, head.bias)
