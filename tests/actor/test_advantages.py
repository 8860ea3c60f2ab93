"""The functions of `actor.algorithms.advantages` against hand-worked numbers, public vectors and obvious loops.
Given nothing but tensors made here, in float64 where a tolerance would hide a mistake.
Public vectors are quoted as numbers, with the file that published them beside each.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actor.algorithms import advantages as adv

close = torch.testing.assert_close
property_test = settings(max_examples=40)
sizes = {"seed": st.integers(0, 2**31), "batch": st.integers(1, 4), "width": st.integers(1, 7)}


def f64(rows: list) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def rollout(seed: int, batch: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """values, token_rewards and a mask with gaps, each `[B, S-1]`."""
    generator = torch.Generator().manual_seed(seed)
    values, rewards, uniform = torch.rand(3, batch, width, generator=generator, dtype=torch.float64)
    return 4 * values - 2, 4 * rewards - 2, (uniform < 0.7).double()


def gae_by_definition(values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Each row's masked positions side by side, and there the sum over l of (gamma * lam)^l * delta_{t+l}."""
    result = torch.zeros_like(values)
    for row in range(values.shape[0]):
        inside = mask[row].nonzero().flatten()
        v, r = [*values[row, inside].tolist(), 0.0], rewards[row, inside].tolist()
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        for t, position in enumerate(inside.tolist()):
            result[row, position] = sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(r)))
    return result


# response_mask


def test_mask_starts_before_the_first_response_token_and_covers_the_eos():
    # Row 0: tokens p p r r(EOS) pad; position 1 scores token 2, position 2 scores token 3. Row 1: full length.
    mask = adv.response_mask(torch.tensor([2, 1, 3]), torch.tensor([4, 5, 3]), 5)
    assert mask.tolist() == [[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert mask.dtype == torch.float32


@pytest.mark.parametrize(("prompt", "length", "num_tokens"), [(0, 3, 5), (4, 3, 5), (2, 6, 5)])
def test_mask_refuses_impossible_lengths(prompt: int, length: int, num_tokens: int):
    with pytest.raises(ValueError, match=f"{prompt}, {length}, {num_tokens} in row 1"):
        adv.response_mask(torch.tensor([1, prompt]), torch.tensor([2, length]), num_tokens)


# token_rewards


def test_token_rewards_of_reference_section_8():
    kl = torch.arange(14.0).reshape(2, 7)  # S = 8
    result = adv.token_rewards(torch.tensor([1.0, 2.0]), kl, torch.tensor([5, 8]), kl_coef=0.1)
    expected = -0.1 * kl
    expected[0, 3] += 1.0  # 5 tokens: position 3 scores token 4, the last
    expected[1, 6] += 2.0
    close(result, expected)


def test_token_rewards_by_hand():
    result = adv.token_rewards(f64([5.0, 7.0]), f64([[1.0, -1.0, 2.0]] * 2), torch.tensor([4, 1]), kl_coef=0.5)
    close(result, f64([[-0.5, 0.5, 4.0], [6.5, 0.5, -1.0]]))  # a single token: the index is clamped to 0


@pytest.mark.parametrize(
    ("rewards", "kl", "lengths", "kl_coef", "message"),
    [
        ([[1.0]], [[0.0]], [2], 0.1, r"rewards.*\(1, 1\)"),
        ([1.0], [[0.0]], [2, 2], 0.1, r"lengths.*\(2,\)"),
        ([1.0], [[]], [1], 0.1, r"kl must.*\(1, 0\)"),
    ],
)
def test_token_rewards_refuse(rewards: list, kl: list, lengths: list, kl_coef: float, message: str):
    with pytest.raises(ValueError, match=message):
        adv.token_rewards(torch.tensor(rewards), torch.tensor(kl), torch.tensor(lengths), kl_coef=kl_coef)


# gae


def test_gae_by_hand():
    # deltas: 0 + .5*2 - 1 = 0; 0 + .5*4 - 2 = 0; 6 - 4 = 2. A: 2, .25*2 = .5, .25*.5 = .125
    result, returns = adv.gae(
        f64([[1.0, 2.0, 4.0]]), f64([[0.0, 0.0, 6.0]]), torch.ones(1, 3).double(), gamma=0.5, lam=0.5
    )
    close(result, f64([[0.125, 0.5, 2.0]]))
    close(returns, f64([[1.125, 2.5, 6.0]]))


def test_gae_of_reference_section_8():
    values, rewards = f64([[0.0, 1.0, 2.0, 3.0]]), f64([[0.0, 0.0, 1.0, 0.0]])
    result, returns = adv.gae(values, rewards, torch.ones_like(values), gamma=0.5, lam=0.0)
    close(result, f64([[0.5, 0.0, 0.5, -3.0]]))
    close(returns, result + values)


@pytest.mark.parametrize(
    ("lam", "first", "second"),
    [
        (1.0, [-1.45118, -4.4557, 2.5396, 0.5249, -0.49], [3.0, 2.0, 1.0, 0.0]),
        (0.7, [-0.676979, -5.248167, 2.4846, 0.6704, -0.49], [2.2899, 1.73, 1.0, 0.0]),
        (0.4, [0.56731, -6.042, 2.3431, 0.815, -0.49], [1.725, 1.46, 1.0, 0.0]),
    ],
)
def test_gae_of_rlax(lam: float, first: list, second: list):
    """google-deepmind/rlax, rlax/_src/multistep_test.py, TruncatedGeneralizedAdvantageEstimationTest.

    Row 1 bootstraps from V = -1 after its last step: the same as 0.99 * -1 on its last reward. Row 2 has discount
    0 after four steps: an episode of its own, and the one step behind it another.
    """
    values = f64([[1.0, 4.0, -3.0, -2.0, -1.0]])
    rewards = f64([[0.0, 0.0, 1.0, 0.0, -0.5 - 0.99]])
    result, _ = adv.gae(values, rewards, torch.ones_like(values), gamma=0.99, lam=lam)
    close(result, f64([first]), atol=1e-3, rtol=0)  # rlax's own tolerance
    episodes = f64([[-3.0, -2.0, -1.0, 0.0], [5.0, 0.0, 0.0, 0.0]])
    rewards = f64([[0.0, 0.0, 0.0, 0.0], [1.0 - 0.9, 0.0, 0.0, 0.0]])
    mask = f64([[1, 1, 1, 1], [1, 0, 0, 0]])
    result, _ = adv.gae(episodes, rewards, mask, gamma=0.9, lam=lam)
    close(result, f64([second, [-4.9, 0.0, 0.0, 0.0]]), atol=1e-3, rtol=0)


def test_monte_carlo_returns_of_tianshou():
    """thu-ml/tianshou, test/base/test_returns.py, test_episodic_returns: gamma 0.1, lambda 1, no critic."""
    rewards = f64([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0], [6.0, 7.0, 0.0], [3.0, 4.0, 5.0]])
    mask = f64([[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 1, 1]])
    _, returns = adv.gae(torch.zeros_like(rewards), rewards, mask, gamma=0.1, lam=1.0)
    close(returns, f64([[1.23, 2.3, 3.0], [4.5, 5.0, 0.0], [6.7, 7.0, 0.0], [3.45, 4.5, 5.0]]))


def test_gae_returns_of_tianshou():
    """The same file, its critic case: gamma 0.99, lambda 0.95, three episodes of four steps.

    Its array holds V of the next state. V of the first state is in no step's target: 0 here, any number would do.
    """
    values = f64([[0.0, 2.0, 3.0, 4.0], [0.0, 5.0, 6.0, 7.0], [0.0, 8.0, 9.0, 10.0]])
    rewards = f64([[101.0, 102, 103, 200], [104, 105, 106, 201], [107, 108, 109, 202]])
    published = [
        [454.8344, 376.1143, 291.298, 200.0],
        [464.5610, 383.1085, 295.387, 201.0],
        [474.2876, 390.1027, 299.476, 202.0],
    ]
    _, returns = adv.gae(values, rewards, torch.ones_like(values), gamma=0.99, lam=0.95)
    close(returns, f64(published), atol=1e-3, rtol=0)
    # Its truncated episodes bootstrap from V = -1 and -2 after the last step.
    rewards[:2, 3] += 0.99 * f64([-1.0, -2.0])
    published[:2] = [[454.0109, 375.2386, 290.3669, 199.01], [462.9138, 381.3571, 293.5248, 199.02]]
    _, returns = adv.gae(values, rewards, torch.ones_like(values), gamma=0.99, lam=0.95)
    close(returns, f64(published), atol=1e-3, rtol=0)


def test_gae_of_nemo_rl():
    """NVIDIA-NeMo/RL, tests/unit/algorithms/test_ppo.py, test_gae_gamma_lambda_zero."""
    values = f64([[1.0, 2.0, 3.0]])
    result, _ = adv.gae(values, f64([[0.0, 0.0, 5.0]]), torch.ones_like(values), gamma=1.0, lam=0.0)
    close(result, f64([[1.0, 1.0, 2.0]]))


def test_a_gap_in_the_mask_is_stepped_over():
    # V = 1, 3; r = 0, 5: deltas 0 + 3 - 1 = 2, 5 - 3 = 2; A: 2, 2 + .5*2 = 3
    result, returns = adv.gae(f64([[1.0, 999.0, 3.0]]), f64([[0.0, 888.0, 5.0]]), f64([[1, 0, 1]]), gamma=1.0, lam=0.5)
    close(result, f64([[3.0, 0.0, 2.0]]))
    close(returns, f64([[4.0, 0.0, 5.0]]))


@property_test
@given(**sizes, gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_is_the_discounted_sum_of_deltas(seed: int, batch: int, width: int, gamma: float, lam: float):
    values, rewards, mask = rollout(seed, batch, width)
    result, returns = adv.gae(values, rewards, mask, gamma=gamma, lam=lam)
    close(result, gae_by_definition(values, rewards, mask, gamma, lam))
    close(returns, result + values * mask)


@property_test
@given(**sizes, extra=st.integers(0, 5), junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_neither_masked_content_nor_order_nor_padding_matters(
    seed: int, batch: int, width: int, extra: int, junk: float
):
    values, rewards, mask = rollout(seed, batch, width)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
    dirty = (values.masked_fill(mask == 0, junk), rewards.masked_fill(mask == 0, junk), mask)
    others = [torch.nn.functional.pad(x, (0, extra))[order] for x in dirty]
    for found, expected in zip(
        adv.gae(*others, gamma=0.9, lam=0.8), adv.gae(values, rewards, mask, gamma=0.9, lam=0.8), strict=True
    ):
        close(found[:, :width], expected[order])
    close(adv.masked_whiten(others[0], others[2])[:, :width], adv.masked_whiten(values, mask)[order])
    for function in (adv.masked_sum, adv.masked_mean):
        close(function(others[0], others[2]), function(values, mask))
    close(adv.explained_variance(*others), adv.explained_variance(values, rewards, mask))


def test_gae_refuses_the_critics_full_width():
    with pytest.raises(ValueError, match=r"'values': \(1, 4\)"):
        adv.gae(torch.ones(1, 4), torch.ones(1, 3), torch.ones(1, 3), gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"\[B, S-1\]"):
        adv.gae(torch.ones(3), torch.ones(3), torch.ones(3), gamma=1.0, lam=1.0)


# masked statistics


def test_masked_statistics_by_hand():
    x, mask = f64([[1.0, 3.0, 100.0], [5.0, 100.0, 100.0]]), f64([[1, 1, 0], [1, 0, 0]])
    assert adv.masked_sum(x, mask) == 9.0
    assert adv.masked_mean(x, mask) == 3.0
    step = 2 / math.sqrt(8 / 3 + 1e-8)  # uncorrected: (4 + 0 + 4) / 3
    close(adv.masked_whiten(x, mask), f64([[-step, 0.0, 0.0], [step, 0.0, 0.0]]))


def test_odd_masks_by_hand():
    x, empty = f64([[1.0, math.nan, 3.0]]), f64([[0, 0, 0]])
    assert adv.masked_mean(x, empty) == adv.explained_variance(x, x, empty) == 0
    assert adv.masked_whiten(x, empty).tolist() == [[0.0, 0.0, 0.0]]
    x, weights = f64([[1.0, 3.0, 100.0]]), f64([[0.25, 0.5, 0.0]])
    assert adv.masked_sum(x, weights) == 1.75
    close(adv.masked_mean(x, weights), f64(1.75 / 0.75))
    assert adv.masked_mean(x, weights > 0) == 2.0
    close(adv.masked_whiten(x, weights > 0), adv.masked_whiten(x, (weights > 0).double()))


@pytest.mark.parametrize("value", [0.1, 117.3, -1234.5])
def test_what_varies_by_the_rounding_of_float32_does_not_vary(value: float):
    x = torch.full((5, 7), value)
    for _ in range(2):
        assert (adv.masked_whiten(x, torch.ones(5, 7)) == 0).all()
        assert adv.explained_variance(torch.randn(5, 7), x, torch.ones(5, 7)) == 0
        x[1, 2] = torch.nextafter(x[1, 2], torch.tensor(math.inf))


# explained_variance


def test_explained_variance_by_hand():
    returns, ones = f64([[1.0, 2.0, 3.0]]), f64([[1, 1, 1]])
    assert adv.explained_variance(returns, returns, ones) == 1.0
    assert adv.explained_variance(returns + 7, returns, ones) == 1.0
    assert adv.explained_variance(f64([[4.0, 4.0, 4.0]]), returns, ones) == 0.0
    assert adv.explained_variance(-returns, returns, ones) == -3.0  # the residual 2R has four times the variance
    assert adv.explained_variance(returns, f64([[4.0, 4.0, 4.0]]), ones) == 0.0  # nothing to explain
    # Residuals 0, 1, 0: 2/9 of 2/3.
    close(adv.explained_variance(f64([[1.0, 1.0, 3.0]]), returns, ones), f64(2 / 3))
