"""`actor.algorithms.policy_loss`: dual clip, REINFORCE, and the KL penalty as a part of the loss."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actor.algorithms.policy_loss import ClipRange, clipped_loss, kl_loss, reinforce_loss

property_test = settings(max_examples=50)
sizes = {"seed": st.integers(0, 10_000), "batch": st.integers(1, 4), "width": st.integers(1, 5)}
CLIP = ClipRange()


def sample(seed: int, batch: int, width: int) -> list[Tensor]:
    """logprobs, old, advantages, weights"""
    generator = torch.Generator().manual_seed(seed)
    logprobs, old, advantages = torch.randn(3, batch, width, generator=generator, dtype=torch.float64)
    return [logprobs, old, advantages, (torch.rand(batch, width, generator=generator) > 0.3).double()]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [  # clip 0.2, dual clip 3; slope is d loss / d logprob
        (2.0, -1.0, 2.0, 2.0),
        (5.0, -1.0, 3.0, 0.0),
        (5.0, 1.0, -1.2, 0.0),
        (0.5, -1.0, 0.8, 0.0),
        (1.0, -1.0, 1.0, 1.0),
    ],
)
def test_dual_clip(ratio: float, advantage: float, loss: float, slope: float):
    """Ye et al. 2020, equation 5: a negative advantage counts at most 3 times."""
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    found, stats = clipped_loss(logprobs, 0 * one, advantage * one, one, 1.0, ClipRange(0.2, 0.2, 3.0))
    found.backward()
    assert found.item() == pytest.approx(loss)
    assert logprobs.grad.item() == pytest.approx(slope)
    assert bool(stats["clip_fraction"]) == (slope == 0)


@pytest.mark.parametrize("log_ratio", [-500.0, 500.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_ratio_beyond_all_numbers_has_a_finite_gradient(log_ratio: float, advantage: float):
    """exp(500) is inf in float32, and 0 * inf, its share in a clipped gradient, would be NaN."""
    logprobs = torch.tensor([[log_ratio, 0.0]], requires_grad=True)
    loss, stats = clipped_loss(
        logprobs, torch.zeros(1, 2), torch.tensor([[advantage, 1.0]]), torch.ones(1, 2), 2.0, CLIP
    )
    loss.backward()
    assert logprobs.grad.tolist() == [[0.0, -0.5]]
    assert all(math.isfinite(value) for value in stats.values())


@property_test
@given(**sizes)
def test_a_wide_dual_clip_changes_nothing(seed: int, batch: int, width: int):
    tensors = sample(seed, batch, width)
    total = float(tensors[3].sum())
    plain, wide = (clipped_loss(*tensors, total, ClipRange(dual=dual))[0] for dual in (None, 1e9))
    assert float(plain) == pytest.approx(float(wide))


@pytest.mark.parametrize("dual", [1.0, 0.5, math.nan])
def test_dual_clip_is_checked(dual: float):
    with pytest.raises(ValueError, match=f"dual_clip must be above 1, got {dual}"):
        clipped_loss(*sample(0, 2, 2), 4.0, ClipRange(dual=dual))


@property_test
@given(**sizes)
def test_reinforce_has_the_gradient_of_the_clipped_loss_at_ratio_1(seed: int, batch: int, width: int):
    logprobs, _, advantages, weights = sample(seed, batch, width)
    total = float(weights.sum())
    gradients = []
    for loss_of in (reinforce_loss, clipped_loss):
        leaf = logprobs.clone().requires_grad_()
        loss_of(leaf, logprobs, advantages, weights, total, CLIP)[0].backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


@property_test
@given(**sizes, junk=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_reinforce_is_blind_outside_the_weights(seed: int, batch: int, width: int, junk: float):
    logprobs, old, advantages, weights = sample(seed, batch, width)
    results = []
    for tensors in (
        (logprobs, old, advantages),
        [x.masked_fill(weights == 0, junk) for x in (logprobs, old, advantages)],
    ):
        leaf = tensors[0].clone().requires_grad_()
        loss, stats = reinforce_loss(leaf, tensors[1], tensors[2], weights, float(weights.sum()), CLIP)
        loss.backward()
        results.append((loss.detach(), stats, leaf.grad))
    torch.testing.assert_close(results[1], results[0])
    assert (results[0][2][weights == 0] == 0).all()


def test_reinforce_checks_its_total():
    with pytest.raises(ValueError, match="total must be the total weight of the minibatch, got 0"):
        reinforce_loss(*[torch.ones(1, 2)] * 4, 0.0, CLIP)


@pytest.mark.parametrize(
    ("kind", "value", "slope"),  # d = log 2: k1 d, |d|, d^2 / 2, exp(-d) - 1 + d
    [
        ("k1", math.log(2), 1.0),
        ("abs", math.log(2), 1.0),
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", math.log(2) - 0.5, 0.5),
    ],
)
def test_kl_in_the_loss_by_hand(kind: str, value: float, slope: float):
    logprobs = torch.tensor([[0.0, 5.0]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-math.log(2), -math.inf]], dtype=torch.float64)
    loss = kl_loss(logprobs, reference, torch.tensor([[2.0, 0.0]]), kind=kind, total=4.0)
    loss.backward()
    assert loss.item() == pytest.approx(value / 2)
    assert logprobs.grad.tolist() == [[pytest.approx(slope / 2), 0]]


@pytest.mark.parametrize("distance", [3.0, 15.0, 89.0, 1000.0, -11.5, -1000.0])
def test_k3_of_one_token_is_bounded_and_still_pulls_it_back(distance: float):
    """As far as exp(-d) grows without a bound, 89 nats overflow float32; a clamp alone would have gradient 0."""
    logprobs = torch.tensor([[-distance]], requires_grad=True)
    loss = kl_loss(logprobs, torch.zeros(1, 1), torch.ones(1, 1), kind="k3", total=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(10, abs=0.02)
    slope = 1 - math.exp(2.61) if distance > 0 else 1.0  # at the bound
    assert logprobs.grad.item() == pytest.approx(slope, rel=1e-3)


def test_k2_in_the_loss_has_the_gradient_of_the_kl():
    """In expectation over the policy's own samples, exactly; k1's gradient is 0 in expectation."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)
    for kind, gradient in (("k2", expected), ("k1", torch.zeros(5, dtype=torch.float64))):
        weights = logp.detach().exp()[None]  # every token, weighed by its probability
        loss = kl_loss(logits.log_softmax(0)[None], reference[None], weights, kind=kind, total=1.0)
        (found,) = torch.autograd.grad(loss, logits)
        torch.testing.assert_close(found, gradient)
