"""`actor.algorithms.kl`: estimators, the penalty as a loss, and the adaptive coefficient, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from actor.algorithms.kl import KLControl, kl_estimate, kl_loss
from python_backend.config.algorithms import KL_ESTIMATORS

E = math.e


def f64(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


GOLDEN: dict[str, tuple[list[float], list[float]]] = {  # value and slope at d = 0, 1, -2
    "k1": ([0.0, 1.0, -2.0], [1.0, 1.0, 1.0]),
    "abs": ([0.0, 1.0, 2.0], [0.0, 1.0, -1.0]),
    "k2": ([0.0, 0.5, 2.0], [0.0, 1.0, -2.0]),
    "k3": ([0.0, 1 / E, E**2 - 3], [0.0, 1 - 1 / E, 1 - E**2]),
}


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_estimate_and_loss_by_hand(kind: str):
    values, slopes = GOLDEN[kind]
    logprobs, reference = f64([-1.0, -2.0, -3.0, 5.0]), f64([-1.0, -3.0, -1.0, -math.inf])
    torch.testing.assert_close(kl_estimate(logprobs[:, :3], reference[:, :3], kind), f64(values))
    logprobs.requires_grad_()
    loss = kl_loss(logprobs, reference, f64([2.0, 2.0, 2.0, 0.0]), kind=kind, total=4.0)
    loss.backward()
    assert loss.item() == pytest.approx(sum(values) / 2)
    assert logprobs.grad[0].tolist() == pytest.approx([slope / 2 for slope in [*slopes, 0.0]])


def test_k1_and_k3_have_the_mean_of_the_true_kl():
    p, q = f64([0.5, 0.3, 0.2]), f64([0.2, 0.2, 0.6])
    exact = float((p * (p / q).log()).sum())
    for kind in ("k1", "k3"):  # the expectation over the three symbols is exact: no sampling needed
        assert float((p * kl_estimate(p.log(), q.log(), kind)).sum()) == pytest.approx(exact, abs=1e-12)


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


def test_a_fixed_coefficient_stays():
    control = KLControl(0.3, target=None, horizon=100)
    control.update(50.0, 128)
    assert control.coef == 0.3


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(6.0, 1.0), (6.6, 1 + 0.1 * 0.5), (60.0, 1 + 0.2 * 0.5), (0.0, 1 - 0.2 * 0.5), (-1.0, 1 - 0.2 * 0.5)],
)
def test_an_adaptive_coefficient_by_hand(kl: float, expected: float):
    """Ziegler et al. 2019: the relative error, at most 0.2, for 50 of 100 samples of horizon."""
    control = KLControl(1.0, target=6.0, horizon=100)
    control.update(kl, 50)
    assert control.coef == pytest.approx(expected)
    large = KLControl(1.0, target=6.0, horizon=100)
    large.update(kl, 8192)  # a rollout larger than the horizon counts as one horizon
    assert large.coef == pytest.approx(1 + 2 * (expected - 1))
