"""`actor.algorithms.batch`: what is masked reaches nothing, and the metrics carry the names that people chart."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actor.algorithms.advantages import explained_variance
from actor.algorithms.batch import check_failures, critic_payload
from actor.algorithms.rollout_metrics import distinct_bigrams, rollout_metrics
from actor.data.rollout import PPOBatch, Rollout, ScoredRollout, Scores
from python_backend.config.algorithms import KL_ESTIMATORS
from python_backend.errors import RlhfError
from python_backend.wire.contract import MASK, PREV_VALUES, RETURNS, SEQUENCE_LENGTHS, TOKENS, Limits
from python_backend.wire.training_payload import train_payload
from tests.support.scored_rollout import LENGTHS, PROMPT_LENGTHS, WIDTH, make_batch, method_of, scored_rollout

SETTINGS: dict[str, Any] = {"kl_coef": 0.1, "kl_estimator": "k1"}


def poison(scored: ScoredRollout, where: Tensor, **changes: float) -> ScoredRollout:
    """`logprobs` and `ref_logprobs` replaced where `where` is true."""
    return dataclasses.replace(
        scored, **{name: getattr(scored, name).masked_fill(where, value) for name, value in changes.items()}
    )


def fields(batch: PPOBatch, *names: str) -> dict[str, Tensor]:
    names = names or ("mask", "policy_weights", "advantages", "returns", "prev_values", "kl")
    return {name: getattr(batch, name) for name in names}


def assert_same(one: PPOBatch, other: PPOBatch) -> None:
    torch.testing.assert_close(fields(one), fields(other))


def test_the_mask_holds_response_tokens():
    batch = make_batch(scored_rollout(), **SETTINGS)
    assert batch.mask.tolist() == [[0, 1, 1, 1, 0], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]
    assert batch.policy_weights.tolist() == [[0, 1, 1, 1, 0], [0] * 5, [0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]
    everyone = make_batch(scored_rollout(), **{**SETTINGS, "mask_unfinished": False})
    assert torch.equal(everyone.policy_weights, everyone.mask)


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


def test_returns_by_hand():
    """lam 1, gamma 1: the score, minus the KL penalty of this token and the later ones."""
    scored = scored_rollout()
    batch = make_batch(scored, **{**SETTINGS, "lam": 1.0})
    kl = scored.logprobs - scored.ref_logprobs
    for row, (prompt, length) in enumerate(zip(PROMPT_LENGTHS, LENGTHS, strict=True)):
        for t in range(WIDTH - 1):
            expected = 0.0
            if prompt - 1 <= t < length - 1:
                expected = float(scored.scores.rewards[row] - 0.1 * kl[row, t : length - 1].sum())
            assert float(batch.returns[row, t]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("mask_unfinished", [False, True])
@pytest.mark.parametrize("algorithm", ["ppo", "reinforce++"])
def test_advantages_are_whitened_over_the_tokens_that_are_learned_from(algorithm: str, mask_unfinished: bool):
    """Row 1 did not end: under `mask_unfinished` its advantage, far from the others, moves neither mean nor spread."""
    scored = scored_rollout()
    rewards = scored.scores.rewards.index_fill(0, torch.tensor([1]), -50.0)
    scored = dataclasses.replace(scored, scores=dataclasses.replace(scored.scores, rewards=rewards))
    batch = make_batch(scored, **SETTINGS, algorithm_name=algorithm, mask_unfinished=mask_unfinished)
    learned = batch.policy_weights > 0
    assert int(learned.sum()) == (7 if mask_unfinished else 10)
    assert float(batch.advantages[learned].mean()) == pytest.approx(0, abs=1e-6)
    assert float(batch.advantages[learned].std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert (batch.advantages[~learned] == 0).all()
    metrics = rollout_metrics(scored, batch, kl_coef=0.1)
    charted = [metrics[f"train_rollouts/advantages_{name}"] for name in ("mean", "std")]
    assert charted == pytest.approx([0, 1], abs=1e-5)


def test_a_critic_that_knows_nothing_explains_nothing():
    """With lam below 1 the returns contain the values: against those, a guess for each row explains 0.7 of itself."""
    generator, count, width = torch.Generator().manual_seed(1), 32, 65
    ones = torch.ones(count, dtype=torch.int64)
    rollout = Rollout([], torch.ones(count, width, dtype=torch.int64), width * ones, ones, ones.bool())
    rewards, guesses = torch.randn(2, count, generator=generator)
    scores = Scores(rewards, guesses[:, None].expand(-1, width), ones, ones.bool(), [])
    batch = make_batch(ScoredRollout(rollout, scores, None, None), kl_coef=0.0, lam=0.9)
    assert explained_variance(batch.prev_values, batch.returns, batch.mask) > 0.7, "the trap"
    metrics = rollout_metrics(ScoredRollout(rollout, scores, None, None), batch, kl_coef=0.0)
    assert metrics["train_rollouts/explained_variance"] < 0.1
    exact = make_batch(ScoredRollout(rollout, scores, None, None), kl_coef=0.0, lam=1.0)
    torch.testing.assert_close(batch.rewards_to_go, exact.returns)


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_banned_tokens_outside_the_mask_never_leak(kind: str):
    """A prompt or its padding may hold tokens that sampling forbids: their log-probs are -inf."""
    scored, settings = scored_rollout(), {**SETTINGS, "kl_estimator": kind}
    clean = make_batch(scored, **settings)
    for bad in ({"logprobs": -math.inf}, {"ref_logprobs": -math.inf}, {"logprobs": math.nan, "ref_logprobs": 1e38}):
        dirty = poison(scored, clean.mask == 0, **bad)
        batch = make_batch(dirty, **settings)
        assert_same(batch, clean)
        metrics = rollout_metrics(dirty, batch, kl_coef=0.1)
        assert metrics == pytest.approx(rollout_metrics(scored, clean, kl_coef=0.1))
        assert all(map(math.isfinite, metrics.values()))


def test_failed_rows_are_masked_and_never_used():
    scored = scored_rollout(scored=[True, True, False, True])
    batch = make_batch(scored, **SETTINGS)
    assert (batch.mask[2] == 0).all()
    assert (batch.policy_weights[2] == 0).all()
    for name, tensor in fields(batch).items():
        assert (tensor[2] == 0).all(), name
    for junk in (math.nan, math.inf, 1e30):  # whatever stands in such a row
        scores = dataclasses.replace(
            scored.scores,
            rewards=scored.scores.rewards.clone().index_fill(0, torch.tensor([2]), junk),
            values=scored.scores.values.clone().index_fill(0, torch.tensor([2]), junk),
        )
        dirty = dataclasses.replace(scored, scores=scores)
        dirty = poison(dirty, torch.tensor([False, False, True, False])[:, None], logprobs=junk, ref_logprobs=-1.0)
        assert_same(make_batch(dirty, **SETTINGS), batch)
        assert rollout_metrics(dirty, make_batch(dirty, **SETTINGS), kl_coef=0.1) == pytest.approx(
            rollout_metrics(scored, batch, kl_coef=0.1)
        )


def test_the_other_rows_are_as_if_the_failed_one_had_not_been():
    scored = scored_rollout(scored=[True, True, False, True])
    keep = torch.tensor([0, 1, 3])
    rollout, scores = scored.rollout.select(keep), scored.scores.select(keep)
    without = ScoredRollout(rollout, scores, scored.logprobs[keep], scored.ref_logprobs[keep])
    batch, expected = make_batch(scored, **SETTINGS), make_batch(without, **SETTINGS)
    torch.testing.assert_close({k: v[keep] for k, v in fields(batch).items()}, fields(expected))
    metrics, others = (rollout_metrics(s, b, kl_coef=0.1) for s, b in ((scored, batch), (without, expected)))
    names = "rewards rewards_std init_policy_kl init_policy_kl_per_sequence rewards_with_kl explained_variance"
    for name in [*names.split(), "advantages_std", "returns_mean", "values_std", "weights_version_min"]:
        assert metrics[f"train_rollouts/{name}"] == pytest.approx(others[f"train_rollouts/{name}"]), name
    assert metrics["train_rollouts/masked_samples"] == 1


def test_metrics_by_hand():
    """Reference section 7; consumed_samples is added by the recorder, which counts steps."""
    scored = scored_rollout()
    metrics = rollout_metrics(scored, make_batch(scored, **SETTINGS), kl_coef=0.1)
    names = ["advantages_mean", "advantages_std", "returns_mean", "returns_std", "values_mean", "values_std"]
    assert {f"train_rollouts/{name}" for name in names} <= set(metrics)
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
    assert {name: metrics[f"train_rollouts/{name}"] for name in by_hand} == pytest.approx(by_hand, abs=1e-6)


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
    scores = scored_rollout(scored=scored).scores
    if not stops:
        check_failures(scores, allowed)
        return
    failed = scored.count(False)
    with pytest.raises(RlhfError, match=rf"{failed} of 4 rewards .*max_failed_fraction is {allowed:g}\): 503"):
        check_failures(scores, allowed)


def test_distinct_bigrams_by_hand():
    tokens = torch.tensor([[9, 1, 2, 1, 2], [9, 9, 1, 2, 0]])
    rollout = Rollout([], tokens, torch.tensor([5, 4]), torch.tensor([1, 2]), torch.tensor([True, True]))
    assert distinct_bigrams(rollout) == pytest.approx(2 / 4)  # 12 21 12 | 12
    short = Rollout([], tokens, torch.tensor([1, 2]), torch.tensor([1, 2]), torch.tensor([True, True]))
    assert distinct_bigrams(short) == 0


# algorithms, through the batch


def test_a_sequence_mean_weighs_each_response_the_same():
    batch = make_batch(scored_rollout(), **SETTINGS, loss_mean="sequence", mask_unfinished=False)
    assert batch.policy_weights.sum(-1).tolist() == pytest.approx([1, 1, 1, 1])
    assert float(batch.policy_weights[0].max()) == pytest.approx(1 / 3)


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce++", "rloo", "grpo"])
def test_a_penalty_in_the_loss_is_not_in_the_advantages(algorithm: str):
    settings = {
        "algorithm_name": algorithm,
        "responses_per_prompt": 4,
        "kl_penalty_in": "loss",
        "mask_unfinished": False,
    }
    one, other = (make_batch(scored_rollout(), **settings, kl_coef=coef) for coef in (0.0, 5.0))
    assert_same(one, other)
    charged = make_batch(scored_rollout(), **{**settings, "kl_penalty_in": "reward"}, kl_coef=5.0)
    assert not torch.allclose(charged.advantages, one.advantages)


def test_rloo_by_hand():
    """Rows 0, 1 and rows 2, 3 answer one prompt each; row 1 did not end, so row 0 has no other to compare with."""
    scored = scored_rollout()
    batch = make_batch(scored, algorithm_name="rloo", responses_per_prompt=2, kl_coef=0.0)
    assert batch.advantages.tolist() == [[0] * 5, [0] * 5, [0, 0, -1.5, -1.5, -1.5], [0, 1.5, 0, 0, 0]]
    everyone = make_batch(scored, algorithm_name="rloo", responses_per_prompt=2, kl_coef=0.0, mask_unfinished=False)
    assert everyone.advantages[0].tolist() == [0, -1, -1, -1, 0]
    assert everyone.advantages[1].tolist() == [1, 1, 1, 0, 0]


def test_rloo_charges_a_response_its_whole_penalty():
    scored = scored_rollout()
    batch = make_batch(scored, algorithm_name="rloo", responses_per_prompt=2, kl_coef=0.1, kl_estimator="k1")
    kl = ((scored.logprobs - scored.ref_logprobs) * batch.mask).sum(-1)
    expected = (-1.0 - 0.1 * kl[2]) - (0.5 - 0.1 * kl[3])
    assert float(batch.advantages[2, 2]) == pytest.approx(float(expected), abs=1e-6)


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


def test_k1_in_the_loss_is_warned_of(caplog: pytest.LogCaptureFixture):
    method_of(kl_penalty_in="loss", kl_estimator="k1")
    assert "k1 in the loss has an expected gradient of 0" in caplog.text
    caplog.clear()
    method_of(kl_estimator="k1")
    assert not caplog.text


def test_without_a_critic_there_are_no_values_in_the_metrics():
    scored = scored_rollout()
    scored = dataclasses.replace(
        scored, scores=dataclasses.replace(scored.scores, versions=torch.full((4,), -1), values=torch.zeros(4, WIDTH))
    )
    metrics = rollout_metrics(scored, make_batch(scored, algorithm_name="reinforce++"), kl_coef=0.1)
    assert not {f"train_rollouts/{n}" for n in ("values_mean", "explained_variance", "weights_version")} & set(metrics)
    assert math.isfinite(metrics["train_rollouts/advantages_std"])
