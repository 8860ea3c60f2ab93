"""Tests of `actor.algorithms.advantages` against hand-computed numbers and published vectors.

The tensors are made here, in float64 where a tolerance would hide a mistake. Published vectors are quoted as numbers,
each with the file that published it.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import advantage_inputs

from rlhf_triton.actor.algorithms import advantages as adv
from rlhf_triton.actor.algorithms.baselines import group_standardise, leave_one_out
from rlhf_triton.config.algorithms import ALGORITHMS
from rlhf_triton.user_code import import_function

close = torch.testing.assert_close
property_test = settings(max_examples=40)
sizes = {"seed": st.integers(0, 2**31), "batch": st.integers(1, 4), "width": st.integers(1, 7)}


def f64(rows):
    return torch.tensor(rows, dtype=torch.float64)


def rollout(seed, batch, width):
    """Return values, token_rewards and a mask with gaps, each `[B, S-1]`."""
    generator = torch.Generator().manual_seed(seed)
    values, rewards, uniform = torch.rand(3, batch, width, generator=generator, dtype=torch.float64)
    return 4 * values - 2, 4 * rewards - 2, (uniform < 0.7).double()


# ---- masks and token rewards ----


def test_token_rewards_add_the_score_at_the_last_token_to_the_kl_penalty():
    """Two worked examples of NeMo-Aligner, then a row of a single token."""
    kl = torch.arange(14.0).reshape(2, 7)  # S = 8
    expected = -0.1 * kl
    expected[[0, 1], [3, 6]] += torch.tensor([1.0, 2.0])  # 5 tokens: position 3 scores token 4, the last
    close(adv.token_rewards(torch.tensor([1.0, 2.0]), 0.1 * kl, torch.tensor([5, 8])), expected)
    result = adv.token_rewards(f64([5.0, 7.0]), f64([[0.5, -0.5, 1.0]] * 2), torch.tensor([4, 1]))
    close(result, f64([[-0.5, 0.5, 4.0], [6.5, 0.5, -1.0]]))  # a single token: the index is clamped to 0


# ---- gae ----

RLAX = [
    (1.0, [-1.45118, -4.4557, 2.5396, 0.5249, -0.49], [3.0, 2.0, 1.0, 0.0]),
    (0.7, [-0.676979, -5.248167, 2.4846, 0.6704, -0.49], [2.2899, 1.73, 1.0, 0.0]),
    (0.4, [0.56731, -6.042, 2.3431, 0.815, -0.49], [1.725, 1.46, 1.0, 0.0]),
]
TIANSHOU_VALUES = [[0.0, 2.0, 3.0, 4.0], [0.0, 5.0, 6.0, 7.0], [0.0, 8.0, 9.0, 10.0]]
TIANSHOU_REWARDS = [[101.0, 102, 103, 200], [104, 105, 106, 201], [107, 108, 109, 202]]
ENDED = [[454.8344, 376.1143, 291.298, 200.0], [464.561, 383.1085, 295.387, 201.0], [474.2876, 390.1027, 299.476, 202]]
GAE = {  # values, rewards, mask, gamma, lam; advantages, returns or None, tolerance of who published them
    # deltas: 0 + .5*2 - 1 = 0; 0 + .5*4 - 2 = 0; 6 - 4 = 2. A: 2, .25*2 = .5, .25*.5 = .125
    "by hand": ([[1, 2, 4]], [[0, 0, 6]], [[1, 1, 1]], 0.5, 0.5, [[0.125, 0.5, 2]], [[1.125, 2.5, 6]], 0),
    # V = 1, 3; r = 0, 5: deltas 0 + 3 - 1 = 2, 5 - 3 = 2; A: 2, 2 + .5*2 = 3
    "a gap in the mask": (
        [[1, 999, 3]],
        [[0, 888, 5]],
        [[1, 0, 1]],
        1.0,
        0.5,
        [[3, 0, 2]],
        [[4, 0, 5]],
        0,
    ),
    # google-deepmind/rlax, rlax/_src/multistep_test.py, TruncatedGeneralizedAdvantageEstimationTest. Row 1 bootstraps
    # from V = -1 after its last step: the same as 0.99 * -1 on its last reward. Row 2 has discount 0 after four steps:
    # an episode of its own, and the one step behind it another.
    **{
        f"rlax, row 1, lambda {lam}": (
            [[1, 4, -3, -2, -1]],
            [[0, 0, 1, 0, -0.5 - 0.99]],
            [[1] * 5],
            0.99,
            lam,
            [first],
            None,
            1e-3,
        )
        for lam, first, _ in RLAX
    },
    **{
        f"rlax, row 2, lambda {lam}": (
            [[-3, -2, -1, 0], [5, 0, 0, 0]],
            [[0, 0, 0, 0], [1 - 0.9, 0, 0, 0]],
            [[1] * 4, [1, 0, 0, 0]],
            0.9,
            lam,
            [second, [-4.9, 0, 0, 0]],
            None,
            1e-3,
        )
        for lam, _, second in RLAX
    },
    # thu-ml/tianshou, test/base/test_returns.py, test_episodic_returns, its critic case. Its array holds V of the next
    # state. V of the first state is in no step's target: 0 here, any number would do.
    "tianshou": (TIANSHOU_VALUES, TIANSHOU_REWARDS, [[1] * 4] * 3, 0.99, 0.95, None, ENDED, 1e-3),
}


@pytest.mark.parametrize(
    ("values", "rewards", "mask", "gamma", "lam", "advantages", "returns", "tolerance"), GAE.values(), ids=GAE
)
def test_gae_matches_published_and_hand_computed_values(
    values, rewards, mask, gamma, lam, advantages, returns, tolerance
):
    found = adv.gae(*map(f64, (values, rewards, mask)), gamma=gamma, lam=lam)
    for tensor, expected in zip(found, (advantages, returns), strict=True):
        if expected is not None:
            close(tensor, f64(expected), atol=tolerance or 1e-7, rtol=0 if tolerance else 1e-7)


@property_test
@given(**sizes, extra=st.integers(0, 5), junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_gae_and_masked_statistics_ignore_masked_values_row_order_and_padding(seed, batch, width, extra, junk):
    values, rewards, mask = rollout(seed, batch, width)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
    dirty = (values.masked_fill(mask == 0, junk), rewards.masked_fill(mask == 0, junk), mask)
    others = [torch.nn.functional.pad(x, (0, extra))[order] for x in dirty]
    found, expected = (adv.gae(*given, gamma=0.9, lam=0.8) for given in (others, (values, rewards, mask)))
    close([tensor[:, :width] for tensor in found], [tensor[order] for tensor in expected])
    close(adv.masked_whiten(others[0], others[2])[:, :width], adv.masked_whiten(values, mask)[order])
    for function in (adv.masked_sum, adv.masked_mean):
        close(function(others[0], others[2]), function(values, mask))


# ---- masked statistics ----


def test_masked_sum_mean_and_whiten_match_hand_computed_values():
    x = f64([[1.0, 3.0, 100.0], [5.0, 100.0, 100.0]])
    mask = f64([[1, 1, 0], [1, 0, 0]])
    assert (adv.masked_sum(x, mask), adv.masked_mean(x, mask)) == (9.0, 3.0)
    step = 2 / math.sqrt(8 / 3 + 1e-8)  # uncorrected: (4 + 0 + 4) / 3
    close(adv.masked_whiten(x, mask), f64([[-step, 0.0, 0.0], [step, 0.0, 0.0]]))
    x = f64([[1.0, math.nan, 3.0]])
    empty = f64([[0, 0, 0]])
    assert adv.masked_mean(x, empty) == 0
    assert adv.masked_whiten(x, empty).tolist() == [[0.0, 0.0, 0.0]]
    x = f64([[1.0, 3.0, 100.0]])
    weights = f64([[0.25, 0.5, 0.0]])
    assert (adv.masked_sum(x, weights), adv.masked_mean(x, weights > 0)) == (1.75, 2.0)
    close(adv.masked_mean(x, weights), f64(1.75 / 0.75))
    close(adv.masked_whiten(x, weights > 0), adv.masked_whiten(x, (weights > 0).double()))


@pytest.mark.parametrize("value", [0.1, 117.3, -1234.5])
def test_whitening_treats_rounding_noise_as_no_variance(value):
    x = torch.full((5, 7), value)
    for _ in range(2):
        assert (adv.masked_whiten(x, torch.ones(5, 7)) == 0).all()
        x[1, 2] = torch.nextafter(x[1, 2], torch.tensor(math.inf))


# ---- baselines of groups ----

BASELINES = [leave_one_out, group_standardise]


# Scores 1, 2, 6 of one prompt: the others' means are 4, 3.5, 1.5; mean 3, std sqrt(7) with n - 1.
STANDARDISED = [-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7), 0]
COMPARED = {
    "rloo": [-3.0, -1.5, 4.5, 0],
    "grpo": STANDARDISED,
    "gdpo": STANDARDISED,  # with a single reward, the same as grpo
    "dr_grpo": [-2, -1, 3, 0],
    "reinforce++-baseline": [-2, -1, 3, 0],
    "maxrl": [-2 / 3, -1 / 3, 1, 0],
    "flash_reinforce": [-2.25, -1.25, 2.75, 0.75],  # with all that count, whose mean is 3.25
}


@pytest.mark.parametrize("name", COMPARED)
def test_group_advantages_compare_only_counted_responses_of_the_same_prompt(name):
    """The fourth is the only one of its prompt that counts; the last one of either prompt does not."""
    rewards = torch.tensor([1.0, 2.0, 6.0, 4.0, 100.0, 100.0])
    groups = torch.tensor([0, 0, 0, 1, 1, 0])
    inputs = advantage_inputs(rewards, groups, torch.ones(6, 2), counted=rewards < 100)
    advantages, returns = import_function(ALGORITHMS[name].advantage)(inputs)
    assert advantages[:, 0].tolist() == advantages[:, 1].tolist() == pytest.approx([*COMPARED[name], 0, 0], abs=1e-5)
    assert returns[:, 1].tolist() == rewards.tolist()


@pytest.mark.parametrize("score", [0.1, 3.3, 117.3, -1234.5])
@pytest.mark.parametrize("count", [3, 5, 8, 11, 64])
def test_scores_equal_up_to_rounding_give_zero_advantage(score, count):
    """The float32 mean of equal numbers may differ from them; over a spread of 1e-6 that gave advantages of 0.63."""
    rewards = torch.full((2 * count,), score)
    groups = torch.arange(2).repeat_interleave(count)
    counted = torch.ones(2 * count).bool()
    nothing = [0.0] * 2 * count
    assert [baseline(rewards, groups, counted).tolist() for baseline in BASELINES] == [nothing, nothing]
    rewards[1] = torch.nextafter(rewards[1], torch.tensor(torch.inf))
    assert [baseline(rewards, groups, counted).tolist() for baseline in BASELINES] == [nothing, nothing]
    rewards[1] = score + 1e-2 * abs(score)
    found = float(group_standardise(rewards, groups, counted)[1])
    assert found == pytest.approx((count - 1) / math.sqrt(count), rel=1e-2), (
        "the advantages are not one standard deviation"
    )
