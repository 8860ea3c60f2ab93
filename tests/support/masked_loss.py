"""Invariants of every policy loss: `check_masked_loss`, for built-in losses and for a user's own."""

import math
from dataclasses import replace

import pytest
import torch

from rlhf_triton.actor.algorithms.inputs import ClipRange, LossInputs

CLIP = ClipRange(0.2, 0.3)
close = torch.testing.assert_close


def loss_inputs(
    logprobs,
    old,
    advantages,
    weights,
    total=None,
    clip=CLIP,
):
    """Return the inputs of a micro-batch, by default of all of its minibatch."""
    rows = torch.arange(len(weights))
    total = float(weights.sum()) if total is None else total
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=advantages,
        weights=weights,
        total=total,
        clip=clip,
        mask=(weights > 0).double(),
        groups=rows,
        versions=rows,
        ref_logprobs=old,
    )


def sample(seed, batch, width):
    """Return logprobs, old_logprobs, advantages and a mask with gaps, each float64 `[batch, width]`."""
    uniform = torch.rand(4, batch, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [-2 * uniform[0], -2 * uniform[1], 4 * uniform[2] - 2, (uniform[3] < 0.7).double()]


def outcome(loss, *parts):
    """Return the loss and the metrics of all parts together, and the gradient of each."""
    value = torch.zeros((), dtype=torch.float64)
    sums = {}
    gradients = []
    for part in parts:
        leaf = part.logprobs.clone().requires_grad_()
        inputs = replace(part, logprobs=leaf)
        found, metrics = loss(inputs)
        found.backward()
        gradients.append(leaf.grad)
        value = value + found.detach()
        metrics = {**inputs.statistics(), **metrics}
        assert not any(metric.requires_grad for metric in metrics.values())
        sums = {name: sums.get(name, 0.0) + metric for name, metric in metrics.items()}
    return value, sums, gradients


def check_masked_loss(loss, seed=0, batch=4, width=5):
    """Check that neither what is masked, nor the order of rows, nor the plan of micro-batches matters to a loss."""
    tensors = sample(seed, batch, width)
    weights = tensors[3]
    # there is something to learn, and a row of padding
    weights[0, 0] = 1.0
    weights[-1] = 0.0
    total = float(weights.sum())
    value, metrics, (gradient,) = outcome(loss, loss_inputs(*tensors))
    assert (gradient[weights == 0] == 0).all()
    for junk in (math.nan, math.inf, -math.inf, 1e30):
        dirty = [tensor.masked_fill(weights == 0, junk) for tensor in tensors[:3]]
        close(outcome(loss, loss_inputs(*dirty, weights)), (value, metrics, [gradient]))
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
    close(outcome(loss, loss_inputs(*(tensor[order] for tensor in tensors))), (value, metrics, [gradient[order]]))
    parts = [loss_inputs(*rows, total) for rows in zip(*(tensor.split(2) for tensor in tensors), strict=True)]
    found = outcome(loss, *parts)
    close((found[0], found[1], torch.cat(found[2])), (value, metrics, gradient))
    empty = outcome(loss, loss_inputs(*tensors[:3], torch.zeros_like(weights)))
    assert (float(empty[0]), float(empty[2][0].abs().sum())) == (0, 0)
    for log_ratio in (-500.0, 500.0):  # exp(500) is inf, and 0 * inf would be NaN
        _, sums, (gradient,) = outcome(loss, loss_inputs(tensors[1] + log_ratio, *tensors[1:]))
        assert torch.isfinite(torch.stack([*sums.values(), *gradient.flatten()])).all()


def check_on_policy_gradient(loss, seed=0, batch=4, width=5):
    """Check that the gradient at ratio 1 is that of the policy gradient, -A * w / total."""
    logprobs, _, advantages, weights = sample(seed, batch, width)
    weights[0, 0] = 0.25
    _, metrics, (gradient,) = outcome(loss, loss_inputs(logprobs, logprobs, advantages, weights))
    close(gradient, -advantages * weights / weights.sum())
    assert (float(metrics["clip_fraction"]), float(metrics["approx_kl"])) == (0, 0)
    assert float(metrics["ppo_ratio"]) == pytest.approx(float(weights.sum()))
