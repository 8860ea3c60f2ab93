"""`actor.algorithms.stages`: each by hand, running statistics against the whole history."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from actor.algorithms import stages
from actor.algorithms.inputs import AdvantageInputs
from actor.algorithms.stages import RewardShaper, RunningMoments
from tests.support.scored_rollout import make_batch, scored_rollout
from tests.support.settings import actor_section

REWARDS = torch.tensor([1.0, 3.0, -2.0, 100.0])
SCORED = torch.tensor([True, True, True, False])


def shaper_of(**settings: Any) -> RewardShaper:
    actor = actor_section(**settings)
    return RewardShaper(actor.rewards, max_new_tokens=actor.generation.max_new_tokens)


def inputs_of(rewards: Tensor, responses: tuple[int, ...], scored: Tensor, ended: list[bool]) -> AdvantageInputs:
    """Rows with these scores and responses of these lengths, the first two and the next two to one prompt each."""
    mask = (torch.arange(max(responses)) < torch.tensor(responses)[:, None]).float() * scored[:, None]
    lengths, groups = torch.tensor(responses) + 2, torch.arange(len(rewards)) // 2
    zeros = torch.zeros_like(mask)
    return AdvantageInputs(rewards, zeros, zeros, mask, lengths, groups, scored, torch.tensor(ended), scored)


def shaped(
    shaper: RewardShaper,
    rewards: Tensor,
    *responses: int,
    scored: Tensor | None = None,
    ended: list[bool] | None = None,
) -> Tensor:
    """These scores after the stages."""
    count = len(rewards)
    scored = torch.ones(count).bool() if scored is None else scored
    return shaper.run(inputs_of(rewards, responses or (1,) * count, scored, ended or [True] * count)).rewards


def shape(rewards: Tensor = REWARDS, scored: Tensor = SCORED, **settings: Any) -> list[float]:
    return shaped(shaper_of(max_new_tokens=10, **settings), rewards, 1, 2, 3, 4, scored=scored).tolist()


STATIC = {"rewards_normalization": "static", "rewards_mean": 1.0, "rewards_std": 2.0}
SPREAD = math.sqrt(((1 - 2 / 3) ** 2 + (3 - 2 / 3) ** 2 + (-2 - 2 / 3) ** 2) / 3)
WHITENED = [(reward - 2 / 3) / SPREAD for reward in (1, 3, -2)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, [1, 3, -2, 0]), (STATIC, [0, 1, -1.5, 0]), ({"rewards_normalization": "batch"}, [*WHITENED, 0])],
    ids=["as they came", "static", "batch"],
)
def test_normalisation_by_hand(settings: dict[str, Any], expected: list[float]):
    assert shape(**settings) == pytest.approx(expected, abs=1e-5)


def test_running_statistics_are_those_of_everything_so_far():
    shaper = shaper_of(rewards_normalization="running")
    generator = torch.Generator().manual_seed(0)
    history = []
    for count in (4, 1, 7):
        rewards = torch.randn(count, generator=generator) * 3 + 5
        history.append(rewards)
        seen = torch.cat(history).double()
        found = shaped(shaper, rewards)
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
        assert shaped(shaper, rewards).tolist() == [0.0] * 7


def test_running_statistics_survive_a_checkpoint():
    one = RunningMoments()
    one.update(torch.tensor([1.0, 2.0, 4.0]))
    other = RunningMoments(*one.state())
    for moments in (one, other):
        moments.update(torch.tensor([8.0]))
    assert (one.mean, one.std, one.state()) == (other.mean, other.std, other.state())
    assert one.mean == pytest.approx(3.75)


def test_the_clip_comes_after_normalisation_and_before_the_penalties():
    settings = {"rewards_normalization": "static", "rewards_mean": 1.0, "rewards_std": 0.5, "rewards_clip": 1.5}
    assert shape(**settings) == pytest.approx([0, 1.5, -1.5, 0])
    shaper = shaper_of(**settings, missing_eos_penalty=4.0)
    ended = [True, False, False, False]
    assert shaped(shaper, REWARDS, scored=SCORED, ended=ended).tolist() == pytest.approx([0, -2.5, -5.5, 0])


def test_overlong_responses_lose_linearly():
    """DAPO (arXiv 2503.14476, equation 13): nothing up to the buffer, the whole penalty at the limit."""
    shaper = shaper_of(max_new_tokens=10, overlong_tokens=4, overlong_penalty=2.0)
    assert shaped(shaper, torch.zeros(5), 1, 6, 7, 9, 10).tolist() == pytest.approx([0, 0, -0.5, -1.5, -2])


def test_rows_that_are_not_scored_never_matter():
    dirty = REWARDS.clone()
    dirty[3] = math.nan
    for kind in ("none", "static", "running", "batch"):
        assert shape(dirty, rewards_normalization=kind) == shape(rewards_normalization=kind)


def test_a_stage_is_one_function_in_the_list(monkeypatch: pytest.MonkeyPatch):
    """It sees the groups and what the stages before it made; here it leaves out groups whose rewards are all equal."""

    def drop_equal_groups(inputs: AdvantageInputs, shaper: RewardShaper) -> AdvantageInputs:
        same = inputs.groups[:, None] == inputs.groups
        differs = (same & (inputs.rewards[:, None] != inputs.rewards)).any(1)
        return dataclasses.replace(inputs, counted=inputs.counted & differs)

    monkeypatch.setattr(stages, "STAGES", (*stages.STAGES, drop_equal_groups))
    scored = scored_rollout()  # rewards 1, 2, -1, 0.5; row 1 did not end
    settings = {"algorithm_name": "grpo", "responses_per_prompt": 2, "kl_coef": 0.0}
    batch = make_batch(scored, **settings, rewards_clip=1.0)
    assert batch.policy_weights.any(-1).tolist() == [False, False, True, True]
    assert batch.mask.any(-1).all(), "a critic learns from all rows"
