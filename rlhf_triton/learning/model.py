"""A model in training: its attention implementation, the parameters that are frozen, activations computed again."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.python_backend.models.adapters import MergedWeights


def use_attention(model: Any, attention: str, key: str) -> None:
    """Make the model compute attention with `attention`, a name of transformers; `auto` keeps transformers' choice.

    Args:
        key: the configuration key that asked for it, for the error.

    Raises:
        CheckpointError: the model, or this machine, does not support it.
    """
    if attention == "auto":
        return
    try:
        model.set_attn_implementation(attention)
        reason = f"it supports only {model.config._attn_implementation}"
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
    if model.config._attn_implementation != attention:
        raise CheckpointError(f"{key}: {type(model).__name__} cannot use {attention} ({reason}); set it to auto")


def freeze(model: Any, patterns: Sequence[str], key: str) -> None:
    """Exclude parameters from training: those in whose name one of the regular expressions is found.

    Names are those without adapters; an adapter is frozen with the weight that it changes. Call it before frozen
    matrices are rounded and weights are sharded.

    Args:
        key: the configuration key of the patterns, for the errors.

    Raises:
        CheckpointError: a pattern matches no parameter, or leaves none to train.
    """
    weights = MergedWeights(model)
    parameters = {name: [each] for name, each in weights.plain.items() if isinstance(each, nn.Parameter)}
    for name, layer in weights.adapted.items():
        parameters[name] += [each for path, each in layer.named_parameters() if path.startswith("lora_")]
    examples = ", ".join(list(parameters)[:: max(1, len(parameters) // 3)])
    for pattern in patterns:
        matched = [each for name in parameters if re.search(pattern, name) for each in parameters[name]]
        for each in matched:
            each.requires_grad = False
        if not matched or not any(each.requires_grad for each in model.parameters()):
            problem = "leaves no parameter to train" if matched else "matches no parameter"
            raise CheckpointError(
                f"{key}: {pattern!r} {problem}; the names of {type(model).__name__} are {examples}, …"
            )


# Gradient checkpointing: layers keep only their inputs and recompute their activations in the backward pass.
#
# transformers checkpoints a layer only in training mode, and such a layer cannot use a cache, so generation needs eval
# mode. Layers are therefore put into training mode only within `recomputing`; the computation itself, including
# dropout, stays in eval mode (see `_compute_again`).


def checkpoint_gradients(model: Any, key: str) -> None:
    """Make the layers recompute their activations in the backward pass, but only within a `recomputing` block.

    Args:
        key: the configuration key that asked for it, for the error.

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
            _compute_again, layer, layer._gradient_checkpointing_func
        )


def recomputing(model: Any) -> contextlib.AbstractContextManager[None]:
    """Recompute activations in backward passes within the block; no effect without `checkpoint_gradients`."""
    return in_training(_checkpointed_layers(model))


@contextlib.contextmanager
def in_training(modules: Sequence[Any]) -> Iterator[None]:
    """Put these modules, but not those inside them, into training mode within the block, into eval mode afterwards."""
    try:
        for module in modules:
            module.training = True
        yield
    finally:
        for module in modules:
            module.training = False


def _checkpointed_layers(model: Any) -> list[Any]:
    modules = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    return [module for module in modules if module.gradient_checkpointing]


def _compute_again(layer: Any, checkpoint: Callable[..., Any], forward: Callable[..., Any], *args: Any) -> Any:
    """Call `checkpoint(forward, *args)`; `forward` runs with the layer in eval mode, so that dropout stays off."""

    def evaluated(*inputs: Any) -> Any:
        layer.training = False
        try:
            return forward(*inputs)
        finally:
            layer.training = True

    return checkpoint(evaluated, *args)
