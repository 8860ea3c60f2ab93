"""Checks of a user's own advantage function and loss. Each error is one sentence that names the function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_triton.actor.algorithms.inputs import (
    Advantage,
    AdvantageInputs,
    AdvantagesAndReturns,
    Loss,
    LossAndMetrics,
    LossInputs,
)
from rlhf_triton.errors import FunctionError
from rlhf_triton.user_code import UserFunction, describe


def checked_advantage(spec: str, function: UserFunction) -> Advantage:
    """Wrap the user's advantage function so that its result is checked.

    The wrapper raises FunctionError unless the result is (advantages, returns), each `[B, S-1]` and finite inside the
    mask.
    """

    def advantage(inputs: AdvantageInputs) -> AdvantagesAndReturns:
        shape = tuple(inputs.mask.shape)
        outside = inputs.mask == 0
        expected = f"(advantages, returns), two tensors of shape {shape}"

        def is_valid(result: Any) -> bool:
            return isinstance(result, tuple) and [_shape(part) for part in result] == [shape, shape]

        named = f"actor.algorithm.advantage: {spec}"
        result = _call_checked(named, function, inputs, is_valid, expected)
        for name, part in zip(("advantages", "returns"), result, strict=True):
            if not bool((outside | part.isfinite()).all()):
                raise FunctionError(f"{named} has {name} that are not finite inside the mask; look for a division by 0")
        advantages, returns = (part.detach().to(inputs.mask).masked_fill(outside, 0.0) for part in result)
        return advantages, returns

    return advantage


def checked_loss(spec: str, function: UserFunction) -> Loss:
    """Wrap the user's loss so that its result is checked.

    The wrapper raises FunctionError unless the result is (loss, metrics), a scalar with a gradient and a mapping of
    scalars, and if the loss of the first micro-batch depends on tokens with weight 0. It does not check that the loss
    is finite, because it would have to wait for the device; the update does.
    """
    is_first = True
    expected = "(loss, metrics), a scalar that depends on inputs.logprobs, and a mapping of names to scalars"

    def is_valid(result: Any) -> bool:
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
            return False
        value, metrics = result
        return all(_shape(scalar) == () for scalar in (value, *metrics.values())) and value.requires_grad

    def loss(inputs: LossInputs) -> LossAndMetrics:
        nonlocal is_first
        value, metrics = _call_checked(f"actor.algorithm.loss: {spec}", function, inputs, is_valid, expected)
        if is_first and inputs.logprobs.requires_grad:
            is_first = False
            (gradient,) = torch.autograd.grad(value, inputs.logprobs, retain_graph=True)
            if bool(((inputs.weights == 0) & (gradient != 0) & gradient.isfinite()).any()):
                raise FunctionError(
                    f"actor.algorithm.loss: {spec} depends on tokens with weight 0, which must not train the policy; "
                    "multiply by inputs.weights, or use inputs.mean"
                )
        return value, {str(name): scalar.detach().to(value) for name, scalar in metrics.items()}

    return loss


def _call_checked(
    named: str, function: UserFunction, inputs: Any, is_valid: Callable[[Any], bool], expected: str
) -> Any:
    try:
        result = function(inputs)
    except torch.OutOfMemoryError:  # the caller repeats the work in smaller micro-batches
        raise
    except Exception as error:  # user code
        raise FunctionError(f"{named} failed: {describe(error)}") from error
    if not is_valid(result):
        raise FunctionError(f"{named} returned {_describe_value(result)}, but it must return {expected}")
    return result


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _describe_value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {_shape(value)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_describe_value(part)}" for name, part in value.items()) + "}"
    return ", ".join(map(_describe_value, value)) if isinstance(value, tuple) else f"{value!r:.60}"
