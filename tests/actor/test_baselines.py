"""`actor.algorithms.baselines` against slow loops, by hand, and what must never matter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actor.algorithms.baselines import group_standardise, leave_one_out

property_test = settings(max_examples=60)
sizes = {"seed": st.integers(0, 10_000), "count": st.integers(1, 12), "num_groups": st.integers(1, 4)}
BASELINES = [leave_one_out, group_standardise]


def sample(seed: int, count: int, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(count, generator=generator, dtype=torch.float64)
    groups = torch.randint(num_groups, (count,), generator=generator)
    return rewards, groups, torch.rand(count, generator=generator) > 0.3


@property_test
@given(**sizes)
def test_leave_one_out_equals_a_loop(seed: int, count: int, num_groups: int):
    rewards, groups, counted = sample(seed, count, num_groups)
    found = leave_one_out(rewards, groups, counted)
    for i in range(count):
        others = [float(rewards[j]) for j in range(count) if j != i and counted[j] and groups[j] == groups[i]]
        expected = float(rewards[i]) - sum(others) / len(others) if counted[i] and others else 0.0
        assert float(found[i]) == pytest.approx(expected, abs=1e-12)


@property_test
@given(**sizes)
def test_group_standardise_equals_a_loop(seed: int, count: int, num_groups: int):
    rewards, groups, counted = sample(seed, count, num_groups)
    found = group_standardise(rewards, groups, counted)
    for i in range(count):
        group = [float(rewards[j]) for j in range(count) if counted[j] and groups[j] == groups[i]]
        expected = 0.0
        if counted[i] and len(group) > 1:
            mean = sum(group) / len(group)
            std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
            expected = (float(rewards[i]) - mean) / (std + 1e-6)
        assert float(found[i]) == pytest.approx(expected, abs=1e-9)


def test_by_hand():
    """Scores 1, 2, 6 of one prompt: the others' means are 4, 3.5, 1.5; mean 3, std sqrt(7) with n - 1."""
    rewards, groups, counted = torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3).long(), torch.ones(3).bool()
    assert leave_one_out(rewards, groups, counted).tolist() == [-3.0, -1.5, 4.5]
    assert group_standardise(rewards, groups, counted).tolist() == pytest.approx(
        [-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7)], abs=1e-5
    )


@pytest.mark.parametrize("baseline", BASELINES)
@property_test
@given(**sizes, junk=st.sampled_from([math.nan, math.inf, -1e30]))
def test_a_baseline_compares_the_counted_rows_of_a_group(baseline, seed: int, count: int, num_groups: int, junk: float):
    """Advantages of a group add up to 0; other rows, their order and the names of groups never matter."""
    rewards, groups, counted = sample(seed, count, num_groups)
    found = baseline(rewards, groups, counted)
    for group in groups.unique():
        assert float(found[groups == group].sum()) == pytest.approx(0, abs=1e-9)
    torch.testing.assert_close(baseline(rewards.masked_fill(~counted, junk), groups, counted), found)
    assert (found[~counted] == 0).all()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(baseline(rewards[order], 100 - 7 * groups[order], counted[order]), found[order])


@pytest.mark.parametrize("score", [0.1, 0.7, 3.3, 117.3, -1234.5])
@pytest.mark.parametrize("count", [3, 5, 8, 11, 64])
def test_equal_scores_teach_nothing(score: float, count: int):
    """The float32 mean of equal numbers may be another one; over a spread of 1e-6 that made advantages of 0.63."""
    rewards, groups = torch.full((2 * count,), score), torch.arange(2).repeat_interleave(count)
    for baseline in BASELINES:
        assert baseline(rewards, groups, torch.ones(2 * count).bool()).tolist() == [0.0] * 2 * count


@pytest.mark.parametrize("score", [0.1, 5.0, 117.3, -1234.5])
def test_scores_that_differ_by_their_rounding_are_equal(score: float):
    rewards = torch.full((8,), score)
    rewards[3] = torch.nextafter(rewards[3], torch.tensor(torch.inf))
    found = group_standardise(rewards, torch.zeros(8).long(), torch.ones(8).bool())
    assert found.tolist() == [0.0] * 8
    rewards[3] = score + 1e-2 * abs(score)
    assert group_standardise(rewards, torch.zeros(8).long(), torch.ones(8).bool())[3] > 2, "a difference is one"
