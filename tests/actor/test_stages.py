"""`actor.algorithms.stages` and `kl_control`: each step by hand, running statistics against the whole history."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from actor.algorithms.kl import KLControl
from actor.algorithms.stages import RewardShaper, RunningMoments
from actor.data.rollout import Rollout
from tests.support.settings import actor_section

REWARDS = torch.tensor([1.0, 3.0, -2.0, 100.0])
SCORED = torch.tensor([True, True, True, False])


def shaper_of(**settings: Any) -> RewardShaper:
    actor = actor_section(**settings)
    return RewardShaper(actor.rewards, max_new_tokens=actor.generation.max_new_tokens)


def rollout(*responses: int, ended: list[bool] | None = None) -> Rollout:
    """Rows with a prompt of two tokens and responses of these lengths."""
    lengths = torch.tensor(responses) + 2
    tokens = torch.zeros(len(responses), int(lengths.max()), dtype=torch.int64)
    is_end = torch.tensor(ended or [True] * len(responses))
    return Rollout([], tokens, lengths, torch.full_like(lengths, 2), is_end)


def shape(rewards: Tensor = REWARDS, scored: Tensor = SCORED, **settings: Any) -> list[float]:
    return shaper_of(max_new_tokens=10, **settings).shape(rewards, scored, rollout(1, 2, 3, 4)).tolist()


def test_by_default_scores_are_as_they_came():
    assert shape() == [1, 3, -2, 0]


def test_static():
    assert shape(rewards_normalization="static", rewards_mean=1.0, rewards_std=2.0) == pytest.approx([0, 1, -1.5, 0])


def test_batch_whitens_the_scored_rows():
    mean, std = 2 / 3, math.sqrt(((1 - 2 / 3) ** 2 + (3 - 2 / 3) ** 2 + (-2 - 2 / 3) ** 2) / 3)
    expected = [(r - mean) / std for r in (1, 3, -2)]
    assert shape(rewards_normalization="batch") == pytest.approx([*expected, 0], abs=1e-5)


def test_running_statistics_are_those_of_everything_so_far():
    shaper = shaper_of(rewards_normalization="running")
    generator = torch.Generator().manual_seed(0)
    history = []
    for count in (4, 1, 7):
        rewards = torch.randn(count, generator=generator) * 3 + 5
        history.append(rewards)
        seen = torch.cat(history).double()
        shaped = shaper.shape(rewards, torch.ones(count).bool(), rollout(*[1] * count))
        expected = (rewards - seen.mean()) / (seen.std(correction=0) + 1e-8)
        torch.testing.assert_close(shaped, expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["batch", "running"])
@pytest.mark.parametrize("score", [0.1, 117.3, -1234.5])
def test_scores_that_differ_by_their_rounding_are_normalised_to_0(kind: str, score: float):
    for steps in (0, 1):
        rewards = torch.full((7,), score)
        for _ in range(steps):
            rewards[2] = torch.nextafter(rewards[2], torch.tensor(math.inf))
        shaper = shaper_of(rewards_normalization=kind)
        assert shaper.shape(rewards, torch.ones(7).bool(), rollout(*[1] * 7)).tolist() == [0.0] * 7


def test_running_statistics_survive_a_checkpoint():
    one = RunningMoments()
    one.update(torch.tensor([1.0, 2.0, 4.0]))
    other = RunningMoments(*one.state())
    for moments in (one, other):
        moments.update(torch.tensor([8.0]))
    assert (one.mean, one.std, one.state()) == (other.mean, other.std, other.state())
    assert one.mean == pytest.approx(3.75)


def test_one_value_has_no_spread():
    moments = RunningMoments()
    moments.update(torch.tensor([5.0]))
    assert (moments.mean, moments.std) == (5.0, 1.0)
    moments.update(torch.tensor([]))
    assert moments.count == 1


def test_the_clip_comes_after_normalisation_and_before_the_penalties():
    settings = {"rewards_normalization": "static", "rewards_mean": 1.0, "rewards_std": 0.5, "rewards_clip": 1.5}
    assert shape(**settings) == pytest.approx([0, 1.5, -1.5, 0])
    shaper = shaper_of(**settings, missing_eos_penalty=4.0)
    ended = rollout(1, 1, 1, 1, ended=[True, False, False, False])
    assert shaper.shape(REWARDS, SCORED, ended).tolist() == pytest.approx([0, -2.5, -5.5, 0])


def test_overlong_responses_lose_linearly():
    """DAPO (arXiv 2503.14476, equation 13): nothing up to the buffer, the whole penalty at the limit."""
    shaper = shaper_of(max_new_tokens=10, overlong_tokens=4, overlong_penalty=2.0)
    shaped = shaper.shape(torch.zeros(5), torch.ones(5).bool(), rollout(1, 6, 7, 9, 10))
    assert shaped.tolist() == pytest.approx([0, 0, -0.5, -1.5, -2])


def test_rows_that_are_not_scored_never_matter():
    dirty = REWARDS.clone()
    dirty[3] = math.nan
    for kind in ("none", "static", "running", "batch"):
        assert shape(dirty, rewards_normalization=kind) == shape(rewards_normalization=kind)


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
