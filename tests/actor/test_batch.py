"""`actor.algorithms.batch`, `stages` and `rollout_metrics`: by hand, and what is masked reaches nothing."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_triton.actor.algorithms import grpo, stages
from rlhf_triton.actor.algorithms.batch import (
    check_failures,
    critic_payload,
    distinct_bigrams,
    process_metrics,
    rollout_metrics,
    score_returns,
)
from rlhf_triton.actor.algorithms.inputs import AdvantageInputs
from rlhf_triton.actor.algorithms.stages import RewardShaper, RunningMoments
from rlhf_triton.actor.data.rollout import PPOBatch, ProcessRewards, Prompt, Rollout, ScoredRollout, Scores
from rlhf_triton.actor.run.validation import explained
from rlhf_triton.config import RunConfig
from rlhf_triton.config.algorithms import ALGORITHMS, KL_ESTIMATORS
from rlhf_triton.errors import RlhfError
from rlhf_triton.wire.contract import MASK, PREV_VALUES, RETURNS, SEQUENCE_LENGTHS, TOKENS, Limits
from rlhf_triton.wire.training_payload import train_payload
from tests.support.scored_rollout import LENGTHS, PROMPT_LENGTHS, WIDTH, make_batch, method_of, scored_rollout
from tests.support.settings import actor_section

close = torch.testing.assert_close
SETTINGS: dict[str, Any] = {"kl_coef": 0.1, "kl_estimator": "k1"}
FIELDS = ("mask", "policy_weights", "advantages", "returns", "prev_values", "kl")


def with_scores(scored: ScoredRollout, **changes: Any) -> ScoredRollout:
    return replace(scored, scores=replace(scored.scores, **changes))


def fields(batch: PPOBatch) -> dict[str, Tensor]:
    return {name: getattr(batch, name) for name in FIELDS}


def metrics_of(scored: ScoredRollout, batch: PPOBatch, *, kl_coef: float = 0.1) -> dict[str, float]:
    found = rollout_metrics(scored, scored, batch, kl_coef=kl_coef)
    return {name.removeprefix("train_rollouts/"): value for name, value in found.items()}


def test_the_mask_holds_response_tokens():
    batch = make_batch(scored_rollout(), **SETTINGS)
    assert batch.mask.tolist() == [[0, 1, 1, 1, 0], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]
    assert batch.policy_weights.tolist() == [[0, 1, 1, 1, 0], [0] * 5, [0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]
    everyone = make_batch(scored_rollout(), **{**SETTINGS, "mask_unfinished": False})
    assert torch.equal(everyone.policy_weights, everyone.mask)
    by_sequence = make_batch(scored_rollout(), **SETTINGS, loss_mean="sequence", mask_unfinished=False)
    assert by_sequence.policy_weights.sum(-1).tolist() == pytest.approx([1, 1, 1, 1])
    assert float(by_sequence.policy_weights[0].max()) == pytest.approx(1 / 3)


def test_the_critic_receives_the_scored_rows_without_padding():
    """Row 2 was not scored because it is longer than the critic's positions, which refuses a payload that has it."""
    scored = scored_rollout(scored=[True, True, False, True])
    batch = make_batch(scored, **SETTINGS)
    payload = critic_payload(batch)
    assert payload[TOKENS].shape == (1, 5 + 4 + 3)
    sent = train_payload(payload, Limits(30, max_length=5))
    assert sent.lengths.tolist() == [5, 4, 3]
    rows = [0, 1, 3]
    padded = {
        TOKENS: batch.tokens[rows].numpy(),
        SEQUENCE_LENGTHS: batch.lengths[rows, None].numpy(),
        RETURNS: batch.returns[rows].numpy(),
        PREV_VALUES: batch.prev_values[rows].numpy(),
        MASK: batch.mask[rows].numpy(),
    }
    assert sent.digest() == train_payload(padded, Limits(30)).digest()  # which other trainers may send
    alone = make_batch(scored_rollout(scored=[True, False, False, False]), **SETTINGS)
    assert train_payload(critic_payload(alone), Limits(30)).lengths.tolist() == [5]
    none = replace(scored.scores, scored=torch.zeros(4, dtype=torch.bool))
    limited = make_batch(replace(scored, scores=none), **SETTINGS)
    nothing = train_payload(critic_payload(limited), Limits(30, max_length=5))
    assert (nothing.lengths.tolist(), nothing.mask.tolist(), nothing.returns.tolist()) == ([2], [0], [0])


def test_returns_by_hand():
    """lam 1, gamma 1: the score, minus the KL penalty of this token and the later ones."""
    scored = scored_rollout()
    batch = make_batch(scored, **SETTINGS, lam=1.0)
    penalty = 0.1 * (scored.logprobs - scored.ref_logprobs) * batch.mask
    later = penalty.flip(1).cumsum(1).flip(1)
    close(batch.returns, (scored.scores.rewards[:, None] - later) * batch.mask)


@pytest.mark.parametrize("mask_unfinished", [False, True])
@pytest.mark.parametrize("algorithm", ["ppo", "reinforce++"])
def test_advantages_are_whitened_over_the_tokens_that_are_learned_from(algorithm: str, mask_unfinished: bool):
    """Row 1 did not end: under `mask_unfinished` its advantage, far from the others, moves neither mean nor spread."""
    scored = scored_rollout()
    scored = with_scores(scored, rewards=scored.scores.rewards.index_fill(0, torch.tensor([1]), -50.0))
    batch = make_batch(scored, **SETTINGS, algorithm_name=algorithm, mask_unfinished=mask_unfinished)
    learned = batch.policy_weights > 0
    assert int(learned.sum()) == (7 if mask_unfinished else 10)
    assert float(batch.advantages[learned].mean()) == pytest.approx(0, abs=1e-6)
    assert float(batch.advantages[learned].std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert (batch.advantages[~learned] == 0).all()
    metrics = metrics_of(scored, batch)
    assert [metrics["advantages_mean"], metrics["advantages_std"]] == pytest.approx([0, 1], abs=1e-5)


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_banned_tokens_outside_the_mask_never_leak(kind: str):
    """A prompt or its padding may hold tokens that sampling forbids: their log-probs are -inf."""
    scored, settings = scored_rollout(), {**SETTINGS, "kl_estimator": kind}
    clean = make_batch(scored, **settings)
    for logprob, reference in ((-math.inf, 0), (0, -math.inf), (math.nan, 1e38)):
        filled = zip((scored.logprobs, scored.ref_logprobs), (logprob, reference), strict=True)
        logprobs, ref_logprobs = (tensor.masked_fill(clean.mask == 0, value) for tensor, value in filled)
        dirty = replace(scored, logprobs=logprobs, ref_logprobs=ref_logprobs)
        batch = make_batch(dirty, **settings)
        close(fields(batch), fields(clean))
        metrics = metrics_of(dirty, batch)
        assert metrics == pytest.approx(metrics_of(scored, clean))
        assert all(map(math.isfinite, metrics.values()))


def test_a_failed_row_is_masked_and_the_others_are_as_if_it_had_not_been():
    scored = scored_rollout(scored=[True, True, False, True])
    batch = make_batch(scored, **SETTINGS)
    assert {name: tensor[2].tolist() for name, tensor in fields(batch).items()} == dict.fromkeys(FIELDS, [0] * 5)
    metrics = metrics_of(scored, batch)
    row = torch.tensor([2])
    for junk in (math.nan, math.inf, 1e30):  # whatever stands in such a row
        rewards, values = (tensor.index_fill(0, row, junk) for tensor in (scored.scores.rewards, scored.scores.values))
        dirty = with_scores(scored, rewards=rewards, values=values)
        dirty = replace(dirty, logprobs=scored.logprobs.index_fill(0, row, junk), ref_logprobs=scored.ref_logprobs + 0)
        dirty.ref_logprobs[2] = -1.0
        close(fields(make_batch(dirty, **SETTINGS)), fields(batch))
        assert metrics_of(dirty, make_batch(dirty, **SETTINGS)) == pytest.approx(metrics)
    keep = torch.tensor([0, 1, 3])
    rollout, scores = scored.rollout.select(keep), scored.scores.select(keep)
    without = ScoredRollout(rollout, scores, scored.logprobs[keep], scored.ref_logprobs[keep])
    expected = make_batch(without, **SETTINGS)
    close({name: tensor[keep] for name, tensor in fields(batch).items()}, fields(expected))
    others, names = metrics_of(without, expected), "rewards rewards_std init_policy_kl init_policy_kl_per_sequence"
    names += " rewards_with_kl explained_variance advantages_std returns_mean values_std weights_version_min"
    same = {name: others[name] for name in names.split()} | {"masked_samples": 1}
    assert {name: metrics[name] for name in same} == pytest.approx(same)


def test_metrics_by_hand():
    """Reference section 7; consumed_samples is added by the recorder, which counts steps."""
    scored = scored_rollout()
    metrics = metrics_of(scored, make_batch(scored, **SETTINGS))
    names = {"advantages_mean", "advantages_std", "returns_mean", "returns_std", "values_mean", "values_std"}
    assert names <= set(metrics)
    assert all(isinstance(value, float) for value in metrics.values())
    kl = scored.logprobs - scored.ref_logprobs
    sums = [float(kl[i, p - 1 : n - 1].sum()) for i, (p, n) in enumerate(zip(PROMPT_LENGTHS, LENGTHS, strict=True))]
    by_hand = {
        "rollout_size": 4,
        "response_lengths": np.mean(LENGTHS),
        "prompt_lengths": np.mean(PROMPT_LENGTHS),
        "generation_length": np.mean(LENGTHS) - np.mean(PROMPT_LENGTHS),
        "rewards": 0.625,
        "weights_version": 7,
        "fraction_of_samples_properly_ended": 0.75,
        "masked_samples": 0,
        "init_policy_kl_per_sequence": np.mean(sums),
        "init_policy_kl": sum(sums) / 10,
        "rewards_with_kl": 0.625 - 0.1 * np.mean(sums),
    }
    assert {name: metrics[name] for name in by_hand} == pytest.approx(by_hand, abs=1e-6)
    generated = scored.logprobs + 0.5 * (torch.arange(4)[:, None] == 3)  # one of ten tokens
    drifting = replace(scored, rollout=replace(scored.rollout, logprobs=generated))
    metrics = metrics_of(drifting, make_batch(drifting, **SETTINGS))
    gaps = [metrics["generation_logprob_gap"], metrics["generation_logprob_gap_max"]]
    assert gaps == pytest.approx([0.05, 0.5], abs=1e-6)
    without = with_scores(scored, versions=torch.full((4,), -1), values=torch.zeros(4, WIDTH))  # a critic
    metrics = metrics_of(without, make_batch(without, algorithm_name="reinforce++"))
    assert not {"values_mean", "explained_variance", "weights_version"} & set(metrics)
    assert math.isfinite(metrics["advantages_std"])


def test_distinct_bigrams_by_hand():
    tokens, prompts = torch.tensor([[9, 1, 2, 1, 2], [9, 9, 1, 2, 0]]), torch.tensor([1, 2])
    for lengths, expected in (([5, 4], 2 / 4), ([1, 2], 0)):  # 12 21 12 | 12
        found = distinct_bigrams(Rollout([], tokens, torch.tensor(lengths), prompts, torch.tensor([True, True])))
        assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("scored", "allowed", "stops"),
    [
        ([True, True, True, True], 0.0, False),
        ([True, True, True, False], 0.25, False),
        ([True, True, True, False], 0.2, True),
        ([True, True, True, False], 0.0, True),
        ([True, False, False, False], 1.0, False),
        ([False, False, False, False], 1.0, True),  # nothing to learn from
    ],
)
def test_too_many_failures_stop_the_run(scored: list[bool], allowed: float, stops: bool):
    found = scored_rollout(scored=scored)
    if not stops:
        return check_failures(found.rollout, found.scores, allowed)
    first = found.rollout.prompts[scored.index(False)].prompt_id
    with pytest.raises(
        RlhfError,
        match=rf"{scored.count(False)} of 4 rewards .* \(prompts {first}(, [^ ,]+)*\): 503.*_fraction \({allowed:g}\)",
    ):
        check_failures(found.rollout, found.scores, allowed)


# ---- algorithms ----


@pytest.mark.parametrize("algorithm", sorted({*ALGORITHMS} - {"maxrl"}))  # which takes no negative rewards
def test_a_penalty_in_the_loss_is_not_in_the_advantages(algorithm: str):
    settings = {"algorithm_name": algorithm, "responses_per_prompt": 4, "mask_unfinished": False}
    one, other = (make_batch(scored_rollout(), **settings, kl_penalty_in="loss", kl_coef=coef) for coef in (0.0, 5.0))
    close(fields(one), fields(other))
    charged = make_batch(scored_rollout(), **settings, kl_penalty_in="reward", kl_coef=5.0)
    assert not torch.allclose(charged.advantages, one.advantages)


def test_rloo_subtracts_the_whole_penalty_of_a_response():
    """Rows 0, 1 and rows 2, 3 answer one prompt each; row 1 did not end, so row 0 has no other to compare with."""
    scored = scored_rollout()
    batch = make_batch(scored, algorithm_name="rloo", responses_per_prompt=2, **SETTINGS)
    kl = ((scored.logprobs - scored.ref_logprobs) * batch.mask).sum(-1)
    difference = float((-1.0 - 0.1 * kl[2]) - (0.5 - 0.1 * kl[3]))
    assert batch.advantages.amax(-1).tolist() == pytest.approx([0, 0, max(difference, 0), max(-difference, 0)])


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "abs"),
        ({"kl_penalty_in": "loss"}, "k3"),
        ({"algorithm_name": "grpo"}, "k3"),
        ({"algorithm_name": "grpo", "kl_penalty_in": "reward"}, "abs"),
        ({"algorithm_name": "grpo", "kl_estimator": "k2"}, "k2"),
    ],
)
def test_the_kl_estimate_where_nothing_is_set_depends_on_where_the_penalty_is(settings: dict[str, Any], kind: str):
    assert method_of(responses_per_prompt=4, **settings).kl_estimator == kind


# ---- stages between scoring and advantages ----

REWARDS = torch.tensor([1.0, 3.0, -2.0, 100.0])
SCORED = torch.tensor([True, True, True, False])
STATIC = {"rewards_normalization": "static", "rewards_mean": 1.0, "rewards_std": 2.0}
SPREAD = math.sqrt(((1 - 2 / 3) ** 2 + (3 - 2 / 3) ** 2 + (-2 - 2 / 3) ** 2) / 3)
BATCH = [(reward - 2 / 3) / SPREAD for reward in (1, 3, -2)]
CLIP = {**STATIC, "rewards_std": 0.5, "rewards_clip": 1.5}


def shaper_of(**settings: Any) -> RewardShaper:
    actor = actor_section(max_new_tokens=10, **settings)
    return RewardShaper(actor.rewards, max_new_tokens=10)


def shaped(shaper: RewardShaper, rewards: Tensor, *responses: int, scored: Tensor | None = None) -> Tensor:
    """These scores after the stages: the first response ended, the others did not."""
    count = len(rewards)
    responses, scored = responses or (1,) * count, torch.ones(count).bool() if scored is None else scored
    mask = (torch.arange(max(responses)) < torch.tensor(responses)[:, None]).float() * scored[:, None]
    lengths, groups, zeros = torch.tensor(responses) + 2, torch.arange(count) // 2, torch.zeros_like(mask)
    inputs = AdvantageInputs(rewards, zeros, zeros, mask, lengths, groups, scored, torch.arange(count) == 0, scored)
    return shaper.run(inputs).rewards


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 3, -2, 0]),
        (STATIC, [0, 1, -1.5, 0]),
        ({"rewards_normalization": "batch"}, [*BATCH, 0]),
        ({"rewards_normalization": "running"}, [*BATCH, 0]),
        (CLIP, [0, 1.5, -1.5, 0]),
        ({**CLIP, "missing_eos_penalty": 4.0}, [0, -2.5, -5.5, 0]),  # after the clip
    ],
    ids=["as they came", "static", "batch", "running", "clipped", "penalised"],
)
def test_scores_are_normalised_then_clipped_then_penalised(settings: dict[str, Any], expected: list[float]):
    for unscored in (100.0, math.nan):
        rewards = torch.where(SCORED, REWARDS, unscored)
        found = shaped(shaper_of(**settings), rewards, 1, 2, 3, 4, scored=SCORED)
        assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_overlong_responses_lose_linearly():
    """DAPO (arXiv 2503.14476, equation 13): nothing up to the buffer, the whole penalty at the limit."""
    shaper = shaper_of(overlong_tokens=4, overlong_penalty=2.0)
    assert shaped(shaper, torch.zeros(5), 1, 6, 7, 9, 10).tolist() == pytest.approx([0, 0, -0.5, -1.5, -2])


def test_running_statistics_are_those_of_everything_so_far_also_after_a_checkpoint():
    shaper, history = shaper_of(rewards_normalization="running"), torch.empty(0)
    generator = torch.Generator().manual_seed(0)
    for count in (4, 1, 7):
        rewards = torch.randn(count, generator=generator) * 3 + 5
        history = torch.cat([history, rewards])
        expected = (rewards - history.double().mean()) / (history.double().std(correction=0) + 1e-8)
        close(shaped(shaper, rewards), expected.float(), atol=1e-5, rtol=1e-5)
        state = shaper.moments.state()
        shaper.moments = RunningMoments(*state)
        assert shaper.moments.state() == state


@pytest.mark.parametrize("kind", ["batch", "running"])
@pytest.mark.parametrize("score", [0.1, 117.3, -1234.5])
def test_scores_that_differ_by_their_rounding_are_normalised_to_0(kind: str, score: float):
    for other in (score, torch.nextafter(torch.tensor(score), torch.tensor(math.inf))):
        rewards = torch.tensor([score, score, other, *[score] * 4])
        assert shaped(shaper_of(rewards_normalization=kind), rewards).tolist() == [0.0] * 7


def test_a_stage_is_one_function_in_the_list(monkeypatch: pytest.MonkeyPatch):
    """It sees the groups and what the stages before it made; here it leaves out groups whose rewards are all equal."""

    def drop_equal_groups(inputs: AdvantageInputs, shaper: RewardShaper) -> AdvantageInputs:
        same = inputs.groups[:, None] == inputs.groups
        differs = (same & (inputs.rewards[:, None] != inputs.rewards)).any(1)
        return replace(inputs, counted=inputs.counted & differs)

    monkeypatch.setattr(stages, "STAGES", (*stages.STAGES, drop_equal_groups))
    settings = {"algorithm_name": "grpo", "responses_per_prompt": 2, "kl_coef": 0.0, "rewards_clip": 1.0}
    batch = make_batch(scored_rollout(), **settings)  # rewards 1, 2, -1, 0.5; row 1 did not end
    assert batch.policy_weights.any(-1).tolist() == [False, False, True, True]
    assert batch.mask.any(-1).all(), "a critic learns from all rows"


# ---- process rewards ----

# Two responses to one prompt of two tokens: tokens 2..5 and 2..4. Steps end at tokens 3 and 5, and at token 4.
STEPS = torch.tensor([[0, 0, 0, 1.0, 0, 0.5], [0, 0, 0, 0, 3.0, 0]])
ENDS = STEPS != 0
PLAIN = {"whiten_advantages": False, "mask_unfinished": False, "gamma": 1.0, "lam": 1.0, "kl_coef": 0.0}


def processed(outcome: tuple[float, ...] = (0.0, 0.0), ok: tuple[bool, ...] = (True, True)) -> ScoredRollout:
    """The two responses, with values that grow by 0.1 from token to token, and no KL."""
    prompts = [Prompt(str(i), "", np.asarray([7, 8])) for i in range(2)]
    lengths = torch.tensor([6, 5]), torch.tensor([2, 2])
    rollout = Rollout(prompts, torch.ones(2, 6).long(), *lengths, torch.tensor([True, True]))
    process, values = ProcessRewards(STEPS, ENDS, torch.tensor(outcome)), torch.arange(6).expand(2, 6) * 0.1
    scores = Scores(torch.tensor([0.5, 3.0]), values, torch.ones(2).long(), torch.tensor(ok), [], process=process)
    return ScoredRollout(rollout, scores, None, None)


def batch_of(sample: ScoredRollout, name: str) -> PPOBatch:
    return make_batch(sample, name=name, responses_per_prompt=2 if name == "grpo" else 1, **PLAIN)


def test_ppo_and_reinforce_sum_the_steps_that_follow():
    """Position t scores token t + 1: a reward at token 3 is at position 2. Returns at gamma 1 are sums to the end."""
    returns = torch.tensor([[0, 1.5, 1.5, 0.5, 0.5], [0, 3, 3, 3, 0]])
    assert torch.equal(batch_of(processed(), "reinforce++").advantages, returns)
    ppo = batch_of(processed(), "ppo")
    values = torch.tensor([[0, 0.1, 0.2, 0.3, 0.4], [0, 0.1, 0.2, 0.3, 0]])
    close((ppo.returns, ppo.advantages), (returns, returns - values))
    sample = processed((10.0, 20.0))  # what is beyond the steps comes at the end
    beyond = torch.tensor([[0, 11.5, 11.5, 10.5, 10.5], [0, 23, 23, 23, 0]])
    close((batch_of(sample, "reinforce++").returns, score_returns(sample.scores, sample.rollout)[0]), (beyond, beyond))


def test_grpo_with_process_supervision_by_hand():
    """Steps 1, 0.5 and 3 have the mean 1.5 and the deviation sqrt(1.75): standardised -0.378, -0.756 and 1.134."""
    one, half, three = (value / 1.75**0.5 for value in (-0.5, -1.0, 1.5))
    expected = torch.tensor([[0, one + half, one + half, half, half], [0, three, three, three, 0]])
    close(batch_of(processed(), "grpo").advantages, expected, atol=1e-5, rtol=0)
    # A further outcome is a reward of the last step: 1, 0.5 + 1.5 and 3 have the mean 2 and the deviation 1.
    found = batch_of(processed((1.5, 0.0)), "grpo")
    close(found.advantages[0], torch.tensor([0, -1.0, -1.0, 0, 0]), atol=1e-5, rtol=0)
    assert found.returns[0].tolist() == [0, 3, 3, 2, 2]
    # A step may end with the first sampled token, whose position is 0 after a prompt of one token.
    zeros, ones, yes = torch.zeros(2, 2), torch.ones(2, 2), torch.ones(2).bool()
    given = torch.tensor([1.0, 2.0]), zeros, zeros, ones, 3 * yes, 0 * yes, yes, yes, yes
    inputs = AdvantageInputs(*given, steps=zeros, ends=torch.tensor([[True, False]] * 2))
    assert grpo.advantage(inputs)[1].tolist() == [[1, 0], [2, 0]]


def test_a_row_without_process_rewards_is_masked():
    """As in summary.json's ev_last: its rewards may be anything, and its values are there."""
    sample = processed(ok=(True, False))
    for name in ("ppo", "reinforce++", "grpo"):
        found = batch_of(sample, name)
        assert found.mask[1].sum() == found.advantages[1].abs().sum() == found.policy_weights[1].sum() == 0
    expected = torch.tensor([0, 0, 0, -0.25, -0.25]) / (2 * 0.25**2) ** 0.5
    close(batch_of(sample, "grpo").advantages[0], expected, atol=1e-4, rtol=0)
    assert process_metrics(sample.scores) == {"process_rewards": 0.75, "steps_per_response": 2.0}
    process = replace(sample.scores.process, rewards=torch.where(SCORED[2:, None], STEPS, math.nan))
    returns, values = torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([0.1, 0.2, 0.3, 0.4])  # of the first row alone
    variance = 1 - float((returns - values).var(correction=0) / returns.var(correction=0))
    found = explained(sample.rollout, replace(sample.scores, process=process), processed().scores)
    assert found == pytest.approx(variance, abs=1e-6)


@pytest.mark.parametrize(
    ("sample", "settings", "steps", "rewards"),
    [
        (
            processed((4.0, 0.0)),
            {"rewards_normalization": "batch", "rewards_clip": 1.0},
            [-0.4629, -0.9258, 1.0],
            [4.0, 0.0],
        ),
        (processed(), {"rewards_missing_eos_penalty": 0.5, "mask_unfinished": False}, [1.0, 0.5, 3.0], [0.0, -0.5]),
        (
            processed(ok=(True, False)),
            {"rewards_normalization": "static", "rewards_mean": 1.0},
            [0.0, -0.5, 0.0],
            [0.0, 0.0],
        ),
    ],
)
def test_each_step_is_normalised_and_clipped_and_penalties_come_at_the_end(
    monkeypatch: pytest.MonkeyPatch, sample: ScoredRollout, settings: dict[str, Any], steps: list, rewards: list
):
    received: list[AdvantageInputs] = []
    monkeypatch.setattr(stages, "STAGES", (*stages.STAGES, lambda inputs, _: (received.append(inputs), inputs)[1]))
    sample.rollout.is_end[1] = "rewards_missing_eos_penalty" not in settings
    make_batch(sample, **settings, kl_coef=0.0)
    (found,) = received
    assert found.steps[~ENDS[:, 1:]].abs().sum() == 0
    close(found.steps[ENDS[:, 1:]], torch.tensor(steps), atol=1e-4, rtol=0)
    assert found.rewards.tolist() == rewards


def test_rloo_is_refused_with_process_rewards():
    algorithm = {"name": "rloo", "responses_per_prompt": 2}
    with pytest.raises(ValueError, match="rloo, which has no published form for process rewards"):
        RunConfig.model_validate({"reward": {"process": {"separator": "."}}, "actor": {"algorithm": algorithm}})
