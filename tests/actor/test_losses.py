"""`actor.algorithms.losses`: by hand, against a loop, and what must never matter to any loss."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actor.algorithms.inputs import ClipRange
from actor.algorithms.losses import clipped, reinforce
from python_backend.config.algorithms import LOSSES
from python_backend.models.logprobs import target_logprobs
from python_backend.rewards.function import import_function
from tests.support.masked_loss import check_masked_loss, check_on_policy_gradient, loss_inputs, outcome, sample

property_test = settings(max_examples=40)
sizes = {"seed": st.integers(0, 2**31), "batch": st.integers(2, 5), "width": st.integers(1, 6)}
BUILT_IN = [import_function(spec) for spec in LOSSES.values()]


def f64(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("loss", BUILT_IN, ids=LOSSES)
@property_test
@given(**sizes)
def test_a_loss_is_masked_and_has_the_policy_gradient(loss, seed: int, batch: int, width: int):
    check_masked_loss(loss, seed, batch, width)
    check_on_policy_gradient(loss, seed, batch, width)


def test_loss_of_nemo_rl():
    """NVIDIA-NeMo/RL, tests/unit/algorithms/test_loss_functions.py, test_clipped_pg_loss_ppo_clipping.

    Ratios 0.5, 1, 1.5 and eps 0.2: per token max(-.5, -.8) = -.5, 1, max(-3, -2.4) = -2.4; the mean is -0.6333.
    """
    inputs = loss_inputs(
        f64([-1.69315, -1.0, -0.59453]),
        f64([-1.0, -1.0, -1.0]),
        f64([1.0, -1.0, 2.0]),
        f64([1, 1, 1]),
        clip=ClipRange(0.2, 0.2),
    )
    loss, stats, _ = outcome(clipped, inputs)
    assert float(loss) == pytest.approx(-1.9 / 3, rel=1e-4)
    # Ratio 0.5 is outside the clip, but the pessimistic side of it still has its gradient.
    assert float(stats["clip_fraction"]) == 1
    assert float(stats["ppo_ratio"]) == pytest.approx(3.0, rel=1e-4)
    assert float(stats["ppo_ratio_clamped"]) == pytest.approx(3.0, rel=1e-4)
    # rho - 1 - log rho: 0.5 - 1 + 0.69315; 0; 1.5 - 1 - 0.40547
    assert float(stats["approx_kl"]) == pytest.approx(0.19315 + 0.09453, rel=1e-3)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss", "slope"),
    [  # low 0.2, high 0.3; slope is d loss / d logprob, -A * rho where the gradient survives
        (1.0, 2.0, None, -2.0, -2.0),
        (1.25, 2.0, None, -2.5, -2.5),
        (1.5, 2.0, None, -2.6, 0.0),
        (0.5, 2.0, None, -1.0, -1.0),
        (1.5, -2.0, None, 3.0, 3.0),
        (0.5, -2.0, None, 1.6, 0.0),
        (0.9, -2.0, None, 1.8, 1.8),
        # Ye et al. 2020, equation 5: a negative advantage counts at most 3 times.
        (2.0, -1.0, 3.0, 2.0, 2.0),
        (5.0, -1.0, 3.0, 3.0, 0.0),
        (5.0, 1.0, 3.0, -1.3, 0.0),
        (0.5, -1.0, 3.0, 0.8, 0.0),
        (1.0, -1.0, 3.0, 1.0, 1.0),
        (5.0, -1.0, 1e9, 5.0, 5.0),
    ],
)
def test_each_side_of_the_clip(ratio: float, advantage: float, dual: float | None, loss: float, slope: float):
    inputs = loss_inputs(f64([math.log(ratio)]), f64([0]), f64([advantage]), f64([1]), clip=ClipRange(0.2, 0.3, dual))
    found, stats, (gradient,) = outcome(clipped, inputs)
    assert found.item() == pytest.approx(loss)
    assert gradient.item() == pytest.approx(slope)
    assert bool(stats["clip_fraction"]) == (slope == 0)
    assert stats["ppo_ratio_clamped"].item() == pytest.approx(min(max(ratio, 0.8), 1.3))


@property_test
@given(**sizes)
def test_loss_and_stats_equal_a_loop(seed: int, batch: int, width: int):
    logprobs, old, advantages, mask = sample(seed, batch, width)
    loss, stats, _ = outcome(clipped, loss_inputs(logprobs, old, advantages, mask))
    expected = {"loss": 0.0, "clip_fraction": 0, "approx_kl": 0.0, "ppo_ratio": 0.0, "ppo_ratio_clamped": 0.0}
    for row, t in mask.nonzero().tolist():
        rho = math.exp(float(logprobs[row, t] - old[row, t]))
        clamped = min(max(rho, 0.8), 1.3)
        a = float(advantages[row, t])
        expected["loss"] += max(-a * rho, -a * clamped)
        expected["clip_fraction"] += (a > 0 and rho > 1.3) or (a < 0 and rho < 0.8)
        expected["approx_kl"] += rho - 1 - math.log(rho)
        expected["ppo_ratio"] += rho
        expected["ppo_ratio_clamped"] += clamped
    assert float(loss) == pytest.approx(expected.pop("loss") / max(float(mask.sum()), 1))
    assert {name: float(stat) for name, stat in stats.items()} == pytest.approx(expected)


def test_reinforce_by_hand():
    loss, stats, (gradient,) = outcome(
        reinforce, loss_inputs(f64([-1.0, -2.0]), f64([-2, -2]), f64([3, 5]), f64([1, 0.5]))
    )
    assert float(loss) == pytest.approx((3 * 1.0 + 0.5 * 5 * 2.0) / 1.5)
    assert gradient.tolist() == [[-2.0, pytest.approx(-2.5 / 1.5)]]
    assert float(stats["ppo_ratio"]) == float(stats["ppo_ratio_clamped"]) == pytest.approx(math.e + 0.5)


def test_banned_prompt_tokens_give_no_nan_to_the_model():
    logits = torch.zeros(1, 4, 3, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[0, 2, 1, 0]])  # token 1, part of the prompt, is banned
    logprobs = target_logprobs(logits[:, :-1], tokens[:, 1:], temperature=1.0, banned_token_ids=[2])
    loss, stats = clipped(loss_inputs(logprobs, logprobs.detach(), f64([1, 1, 1]), f64([0, 1, 1])))
    loss.backward()
    assert loss.item() == -1
    assert all(torch.isfinite(stat) for stat in stats.values())
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[0, 0] == 0).all()


@pytest.mark.parametrize("total", [0, -1, math.nan])
def test_inputs_are_checked(total: float):
    ones = torch.ones(1, 3)
    with pytest.raises(ValueError, match=f"total must be the total weight of the minibatch, got {total}"):
        loss_inputs(ones, ones, ones, ones, total)
    with pytest.raises(ValueError, match="advantages"):
        loss_inputs(ones, ones, torch.ones(1, 4), ones)
