"""A user's own advantage function and loss: whatever is wrong with one is a single sentence that names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from actor.algorithms.inputs import Advantage, AdvantageInputs, Loss, LossInputs
from python_backend.rewards.function import FunctionError, describe


def checked_advantage(spec: str, function: Callable[..., Any]) -> Advantage:
    """Return the user's advantage function, whose result is checked.

    It raises FunctionError unless the result is (advantages, returns), each `[B, S-1]` and finite inside the mask.
    """

    def advantage(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        found = _called("advantage", spec, function, inputs)
        shape = tuple(inputs.mask.shape)
        if not isinstance(found, tuple) or [_shape(part) for part in found] != [shape, shape]:
            raise _wrong("advantage", spec, found, f"(advantages, returns), two tensors of shape {shape}")
        for name, tensor in zip(("advantages", "returns"), found, strict=True):
            if bad := int((~torch.isfinite(tensor) & (inputs.mask > 0)).sum()):
                raise FunctionError(
                    f"actor.algorithm.advantage: {spec} returned {name} that are not finite ({bad} tokens)"
                )
        advantages, returns = (tensor.detach().to(inputs.mask.dtype) for tensor in found)
        return advantages.masked_fill(inputs.mask == 0, 0.0), returns.masked_fill(inputs.mask == 0, 0.0)

    return advantage


def checked_loss(spec: str, function: Callable[..., Any]) -> Loss:
    """Return the user's loss, whose result is checked, except whether it is finite: that would wait for the device.

    It raises FunctionError unless the result is (loss, metrics): a scalar with a gradient, and a mapping of scalars.
    """

    def loss(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        found = _called("loss", spec, function, inputs)
        expected = "(loss, metrics), a scalar tensor and a mapping of names to scalar tensors"
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
            raise _wrong("loss", spec, found, expected)
        value, metrics = found
        if any(_shape(scalar) != () for scalar in (value, *metrics.values())):
            raise _wrong("loss", spec, (value, *metrics.values()), expected)
        if not value.requires_grad:
            raise FunctionError(f"actor.algorithm.loss: {spec} returned a loss that does not depend on inputs.logprobs")
        return value, {str(name): scalar.detach().to(value) for name, scalar in metrics.items()}

    return loss


def _called(key: str, spec: str, function: Callable[..., Any], inputs: Any) -> Any:
    try:
        return function(inputs)
    except torch.OutOfMemoryError:  # is repeated in smaller micro-batches
        raise
    except Exception as error:  # user code
        raise FunctionError(f"actor.algorithm.{key}: {spec} failed: {describe(error)}") from error


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _wrong(key: str, spec: str, found: Any, expected: str) -> FunctionError:
    parts = found if isinstance(found, tuple) else (found,)
    got = ", ".join(
        f"a tensor of shape {_shape(part)}" if isinstance(part, Tensor) else f"{part!r:.60}" for part in parts
    )
    return FunctionError(f"actor.algorithm.{key}: {spec} returned {got}, but it must return {expected}")
