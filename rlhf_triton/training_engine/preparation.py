"""Prepares a model for training according to its settings: adapters, frozen parameters, precision."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.config.trained_model import TrainedSection
from rlhf_triton.models.adapters import Lora, MergedWeights, named_layers, with_adapters
from rlhf_triton.models.precision import use_bfloat16


def prepare(model: Any, settings: TrainedSection, section: str, head: nn.Module, *, task: str | None = None) -> Any:
    """Prepare a model for training, in place; return peft's wrapper if it has adapters, otherwise the model.

    Call this while the model is on the CPU, so that the device only ever holds frozen matrices in bfloat16.

    Args:
        section: key of `settings`, for error messages.
        head: the output layer, which gets no adapter and is not rounded.
        task: peft's task type; None for a critic, whose head is trained in addition to its adapters.

    Raises:
        CheckpointError: the model does not support one of the settings.
    """
    adapted = model
    if settings.lora_rank:
        adapted = with_adapters(model, _lora(settings, section), head, task=task)
        if task is None:
            head.requires_grad_(True)
    freeze(model, settings.freeze, f"{section}.freeze")
    if settings.precision == "bfloat16":
        use_bfloat16(model, head)
    return adapted


def check_lora_targets(
    settings: TrainedSection, section: str, describe: Callable[[], Any], head_of: Callable[[Any], nn.Module]
) -> None:
    """Raise CheckpointError if a name in `lora_targets` matches no layer.

    Args:
        describe: returns the model, on the meta device.
        head_of: returns its output layer.
    """
    if settings.lora_targets != "all-linear":
        model = describe()
        named_layers(model, _lora(settings, section), head_of(model))


def _lora(settings: TrainedSection, section: str) -> Lora:
    return Lora(section, settings.lora_rank, settings.lora_alpha, settings.lora_targets)


def freeze(model: Any, patterns: Sequence[str], key: str) -> None:
    """Exclude parameters from training if one of the regular expressions is found in their name.

    Names are without adapters; an adapter is frozen with the weight that it changes. Call this before frozen matrices
    are rounded and weights are sharded.

    Args:
        key: the configuration key of the patterns, for error messages.

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
                f"{key}: {pattern!r} {problem}; names of {type(model).__name__}'s parameters are {examples}, …"
            )
