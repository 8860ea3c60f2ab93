"""Gradient checkpointing: layers keep only their inputs and recompute their activations in the backward pass.

transformers checkpoints a layer only in training mode, but a layer in training mode cannot use a cache, which
generation needs. Layers are therefore in training mode only within `recomputing`, and even there they compute in eval
mode (see `_compute_in_eval_mode`).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_triton.checkpoints.inspection import CheckpointError


def checkpoint_gradients(model: Any, key: str) -> None:
    """Enable gradient checkpointing for backward passes within a `recomputing` block.

    Args:
        key: the configuration key that enables it, for the error message.

    Raises:
        CheckpointError: transformers has no gradient checkpointing for this model.
    """
    if not model.supports_gradient_checkpointing:
        raise CheckpointError(f"{type(model).__name__} does not support gradient checkpointing; set {key} to false")
    # transformers 5.20, the last release for Python 3.10, has only the older name, gradient_checkpointing_enable.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    for layer in _checkpointed_layers(model):
        layer._gradient_checkpointing_func = functools.partial(
            _compute_in_eval_mode, layer, layer._gradient_checkpointing_func
        )


@contextlib.contextmanager
def recomputing(model: Any) -> Iterator[None]:
    """Recompute activations in backward passes within the block; no effect without `checkpoint_gradients`."""
    layers = _checkpointed_layers(model)
    try:
        for layer in layers:
            layer.training = True
        yield
    finally:
        for layer in layers:
            layer.training = False


def _checkpointed_layers(model: Any) -> list[Any]:
    modules = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    return [module for module in modules if module.gradient_checkpointing]


def _compute_in_eval_mode(layer: Any, checkpoint: Callable[..., Any], forward: Callable[..., Any], *args: Any) -> Any:
    """Call `checkpoint(forward, *args)`; `forward` runs with the layer in eval mode, so that dropout stays off."""

    def evaluated(*inputs: Any) -> Any:
        layer.training = False
        try:
            return forward(*inputs)
        finally:
            layer.training = True

    return checkpoint(evaluated, *args)
