"""`actor.algorithms.stages`: each by hand, running statistics against the whole history."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from actor.algorithms import stages
from actor.algorithms.stages import RewardShaper, RunningMoments, StageInputs
from actor.data.rollout import Rollout, Scores, ShapedRewards
from python_backend.config import RewardsSection
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


def shaped(shaper: RewardShaper, rewards: Tensor, responses: Rollout, scored: Tensor | None = None) -> Tensor:
    """The shaped outcomes of these scores."""
    scored = torch.ones(len(rewards)).bool() if scored is None else scored
    scores = Scores(rewards, torch.zeros(responses.tokens.shape), torch.zeros(len(rewards)), scored, [])
    return shaper.shape(scores, responses).outcome


def shape(rewards: Tensor = REWARDS, scored: Tensor = SCORED, **settings: Any) -> list[float]:
    return shaped(shaper_of(max_new_tokens=10, **settings), rewards, rollout(1, 2, 3, 4), scored).tolist()


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
        found = shaped(shaper, rewards, rollout(*[1] * count))
        expected = (rewards - seen.mean()) / (seen.std(correction=0) + 1e-8)
        torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["batch", "running"])
@pytest.mark.parametrize("score", [0.1, 117.3, -1234.5])
def test_scores_that_differ_by_their_rounding_are_normalised_to_0(kind: str, score: float):
    for steps in (0, 1):
        rewards = torch.full((7,), score)
        for _ in range(steps):
            rewards[2] = torch.nextafter(rewards[2], torch.tensor(math.inf))
        shaper = shaper_of(rewards_normalization=kind)
        assert shaped(shaper, rewards, rollout(*[1] * 7)).tolist() == [0.0] * 7


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
    assert shaped(shaper, REWARDS, ended, SCORED).tolist() == pytest.approx([0, -2.5, -5.5, 0])


def test_overlong_responses_lose_linearly():
    """DAPO (arXiv 2503.14476, equation 13): nothing up to the buffer, the whole penalty at the limit."""
    shaper = shaper_of(max_new_tokens=10, overlong_tokens=4, overlong_penalty=2.0)
    assert shaped(shaper, torch.zeros(5), rollout(1, 6, 7, 9, 10)).tolist() == pytest.approx([0, 0, -0.5, -1.5, -2])


def test_rows_that_are_not_scored_never_matter():
    dirty = REWARDS.clone()
    dirty[3] = math.nan
    for kind in ("none", "static", "running", "batch"):
        assert shape(dirty, rewards_normalization=kind) == shape(rewards_normalization=kind)


def test_a_stage_is_one_function_in_the_list(monkeypatch: pytest.MonkeyPatch):
    """It sees the groups and what the stages before it made; here it leaves out groups whose rewards are all equal."""

    def drop_equal_groups(rewards: ShapedRewards, inputs: StageInputs) -> ShapedRewards:
        same = inputs.groups[:, None] == inputs.groups
        differs = (same & (rewards.outcome[:, None] != rewards.outcome)).any(1)
        return dataclasses.replace(rewards, learned=differs)

    monkeypatch.setattr(stages, "STAGES", (*stages.STAGES, drop_equal_groups))
    shaper = RewardShaper(RewardsSection(clip=2.0), max_new_tokens=10, responses_per_prompt=2)
    scores = Scores(torch.tensor([2.0, 3.0, 1.0, 3.0]), torch.zeros(4, 6), torch.zeros(4), torch.ones(4).bool(), [])
    found = shaper.shape(scores, rollout(1, 2, 3, 4))
    assert found.outcome.tolist() == [2, 2, 1, 2]
    assert found.learned.tolist() == [False, False, True, True]
