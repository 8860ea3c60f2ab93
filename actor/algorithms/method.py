"""An algorithm with its settings resolved. Built-in functions and a user's own are found by the same lookup.

The training loop never branches on an algorithm's name, only on whether it needs the critic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_triton.actor.algorithms.inputs import Advantage, AdvantageInputs, ClipRange, Loss, LossInputs
from rlhf_triton.config import AlgorithmSection, KLSection, RunConfig
from rlhf_triton.config.algorithms import LOSSES
from rlhf_triton.config.without_effect import effect_line
from rlhf_triton.rewards.function import FunctionError, describe, import_function

# A user's own advantage function and loss: whatever is wrong with one is a single sentence that names it.


def checked_advantage(spec: str, function: Callable[..., Any]) -> Advantage:
    """Wrap the user's advantage function to check its result.

    It raises FunctionError unless the result is (advantages, returns), each `[B, S-1]` and finite inside the mask.
    """

    def advantage(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        shape, outside = tuple(inputs.mask.shape), inputs.mask == 0
        expected = f"(advantages, returns), two tensors of shape {shape} that are finite inside the mask"

        def is_valid(found: Any) -> bool:
            shapes = [_shape(part) for part in found] if isinstance(found, tuple) else []
            return shapes == [shape, shape] and all(bool((outside | part.isfinite()).all()) for part in found)

        found = _checked(f"actor.algorithm.advantage: {spec}", function, inputs, is_valid, expected)
        advantages, returns = (part.detach().to(inputs.mask).masked_fill(outside, 0.0) for part in found)
        return advantages, returns

    return advantage


def checked_loss(spec: str, function: Callable[..., Any]) -> Loss:
    """Wrap the user's loss to check its result, except for finiteness, which would wait for the device.

    It raises FunctionError unless the result is (loss, metrics): a scalar with a gradient, and a mapping of scalars;
    and if in the first micro-batch the loss depends on tokens of weight 0.
    """
    is_first = True
    expected = "(loss, metrics), a scalar that depends on inputs.logprobs, and a mapping of names to scalars"

    def is_valid(found: Any) -> bool:
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
            return False
        value, metrics = found
        return all(_shape(scalar) == () for scalar in (value, *metrics.values())) and value.requires_grad

    def loss(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal is_first
        value, metrics = _checked(f"actor.algorithm.loss: {spec}", function, inputs, is_valid, expected)
        if is_first and inputs.logprobs.requires_grad:
            is_first = False
            (gradient,) = torch.autograd.grad(value, inputs.logprobs, retain_graph=True)
            if bool(((inputs.weights == 0) & (gradient != 0)).any()):
                raise FunctionError(
                    f"actor.algorithm.loss: {spec} depends on tokens outside the responses that are learned from; "
                    "multiply by inputs.weights, or use inputs.mean"
                )
        return value, {str(name): scalar.detach().to(value) for name, scalar in metrics.items()}

    return loss


def _checked(
    named: str, function: Callable[..., Any], inputs: Any, is_valid: Callable[[Any], bool], expected: str
) -> Any:
    try:
        found = function(inputs)
    except torch.OutOfMemoryError:  # is repeated in smaller micro-batches
        raise
    except Exception as error:  # user code
        raise FunctionError(f"{named} failed: {describe(error)}") from error
    if not is_valid(found):
        raise FunctionError(f"{named} returned {_described(found)}, but it must return {expected}")
    return found


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {_shape(value)}" + ("" if value.isfinite().all() else " that is not finite")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_described(part)}" for name, part in value.items()) + "}"
    return ", ".join(map(_described, value)) if isinstance(value, tuple) else f"{value!r:.60}"


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Method:
    """An algorithm with its settings resolved from the configuration."""

    settings: AlgorithmSection
    advantage: Advantage
    loss: Loss
    clip: ClipRange
    whitens: bool
    kl_estimator: str
    kl_in_loss: bool
    loss_mean: str  # `token`, `sequence` or `constant`

    @property
    def own_loss(self) -> str | None:
        """The user's loss, `path/to/file.py:name`; None if the loss is a built-in one."""
        return None if self.settings.loss_name in LOSSES else self.settings.loss_name

    @classmethod
    def of(cls, settings: AlgorithmSection, kl: KLSection) -> Method:
        """Build the method that the settings select; `auto` and unset values take the algorithm's defaults.

        Raises: FunctionError if a user's function cannot be imported.
        """
        s, defaults = settings, settings.defaults
        advantage = import_function(defaults.advantage if s.advantage == "auto" else s.advantage)
        loss = import_function(LOSSES[s.loss_name].function if s.loss_name in LOSSES else s.loss_name)
        kl_in = defaults.kl_in if kl.penalty_in == "auto" else kl.penalty_in
        by_place = "k3" if kl_in == "loss" else "abs"
        method = cls(
            s,
            advantage if s.advantage == "auto" else checked_advantage(s.advantage, advantage),
            loss if s.loss_name in LOSSES else checked_loss(s.loss_name, loss),
            ClipRange(*s.clip),
            whitens=defaults.whitens,
            kl_estimator=by_place if kl.estimator == "auto" else kl.estimator,
            kl_in_loss=kl_in == "loss",
            loss_mean=defaults.loss_mean if s.loss_mean == "auto" else s.loss_mean,
        )
        if method.kl_in_loss and method.kl_estimator == "k1":
            logger.warning(
                "actor.kl.estimator: k1 in the loss has an expected gradient of 0 and penalises nothing; use k2 or k3, "
                "or actor.kl.penalty_in: reward"
            )
        return method


def log_choices(config: RunConfig) -> None:
    """Log the algorithm's settings, and those of the run that have no effect."""
    logger.info("actor.algorithm.name: %s sets %s", config.actor.algorithm.name, config.published_choices)
    if line := effect_line(config):
        logger.info("%s", line)
