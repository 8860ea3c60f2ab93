"""Tests of `actor.algorithms.batch`, `stages` and `rollout_metrics` by hand; masked values must have no effect."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from samples import (
    FAILED,
    LENGTHS,
    PROMPT_LENGTHS,
    a_sample,
    advantage_inputs,
    groups_of,
    make_batch,
    method_of,
    rewarded,
    scored_samples,
)
from settings import actor_section

from rlhf_triton.actor.algorithms import batch as batches
from rlhf_triton.actor.algorithms import grpo
from rlhf_triton.actor.algorithms.batch import (
    check_failures,
    critic_payload,
    describe_failures,
    positions,
    score_returns,
)
from rlhf_triton.actor.algorithms.sample_metrics import distinct_bigrams, process_metrics, rollout_metrics, text_metrics
from rlhf_triton.actor.algorithms.stages import RewardShaper, RunningMoments
from rlhf_triton.actor.data.recorded import SampledTurn
from rlhf_triton.actor.data.rollout_rows import Score, failure_of
from rlhf_triton.actor.run.validation import explained_by_values
from rlhf_triton.config.algorithms import ALGORITHMS, KL_ESTIMATORS
from rlhf_triton.errors import RlhfError
from rlhf_triton.wire.contract import MASK, PREV_VALUES, RETURNS, SEQUENCE_LENGTHS, TOKENS, Limits
from rlhf_triton.wire.training_payload import train_payload

close = torch.testing.assert_close
SETTINGS = {"kl_coef": 0.1, "kl_estimator": "k1"}
FIELDS = ("mask", "policy_weights", "advantages", "returns", "prev_values", "kl")


def kl_of(rows):
    """Return the k1 estimates `[B, S-1]`."""
    return positions(rows, lambda row: row.policy_logprobs - row.ref_logprobs)


def fields(batch):
    return {name: getattr(batch, name) for name in FIELDS}


def metrics_of(rows, batch):
    found = rollout_metrics(groups_of(rows), batch, kl_coef=0.1)
    return {name.removeprefix("train_rollouts/"): value for name, value in found.items()}


def test_mask_selects_response_tokens_and_policy_weights_skip_unfinished_rows():
    batch = make_batch(scored_samples(), **SETTINGS)
    assert batch.mask.tolist() == [[0, 1, 1, 1, 0], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]
    assert batch.policy_weights.tolist() == [[0, 1, 1, 1, 0], [0] * 5, [0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]
    everyone = make_batch(scored_samples(), **{**SETTINGS, "mask_unfinished": False})
    assert torch.equal(everyone.policy_weights, everyone.mask)
    by_sequence = make_batch(scored_samples(), **SETTINGS, loss_mean="sequence", mask_unfinished=False)
    assert by_sequence.policy_weights.sum(-1).tolist() == pytest.approx([1, 1, 1, 1])
    assert float(by_sequence.policy_weights[0].max()) == pytest.approx(1 / 3)


def test_critic_payload_has_only_scored_rows_without_padding():
    """Row 2 was not scored because it is longer than the critic's positions, which refuses a payload that has it."""
    scored = scored_samples(scored=[True, True, False, True])
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
    alone = make_batch(scored_samples(scored=[True, False, False, False]), **SETTINGS)
    assert train_payload(critic_payload(alone), Limits(30)).lengths.tolist() == [5]
    limited = make_batch(
        [replace(row, truncated="environment.max_turns") for row in scored], truncated="mask", **SETTINGS
    )
    nothing = train_payload(critic_payload(limited), Limits(30, max_length=5))
    assert (nothing.lengths.tolist(), nothing.mask.tolist(), nothing.returns.tolist()) == ([2], [0], [0])


def test_returns_are_the_score_minus_the_remaining_kl_penalty():
    """lam 1, gamma 1: the score, minus the KL penalty of this token and the later ones."""
    scored = scored_samples()
    batch = make_batch(scored, **SETTINGS, lam=1.0)
    later = (0.1 * kl_of(scored) * batch.mask).flip(1).cumsum(1).flip(1)
    rewards = torch.tensor([[row.score.reward] for row in scored])
    close(batch.returns, (rewards - later) * batch.mask)


@pytest.mark.parametrize("mask_unfinished", [False, True])
@pytest.mark.parametrize("algorithm", ["ppo", "reinforce++"])
def test_advantages_are_whitened_over_trained_tokens_only(algorithm, mask_unfinished):
    """Row 1 did not end: under `mask_unfinished` its advantage, far from the others, moves neither mean nor spread."""
    scored = scored_samples()
    scored[1] = scored[1].with_score(reward=-50.0, outcome=-50.0)
    batch = make_batch(scored, **SETTINGS, algorithm_name=algorithm, mask_unfinished=mask_unfinished)
    learned = batch.policy_weights > 0
    assert int(learned.sum()) == (7 if mask_unfinished else 10)
    assert float(batch.advantages[learned].mean()) == pytest.approx(0, abs=1e-6)
    assert float(batch.advantages[learned].std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert (batch.advantages[~learned] == 0).all()
    metrics = metrics_of(scored, batch)
    assert [metrics["advantages_mean"], metrics["advantages_std"]] == pytest.approx([0, 1], abs=1e-5)


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_infinite_logprobs_outside_the_mask_change_neither_batch_nor_metrics(kind):
    """A prompt or its padding may hold tokens that sampling forbids: their log-probs are -inf."""
    scored = scored_samples()
    settings = {**SETTINGS, "kl_estimator": kind}
    clean = make_batch(scored, **settings)
    for logprob, reference in ((-math.inf, 0), (0, -math.inf), (math.nan, 1e38)):
        dirty = [
            replace(
                row,
                policy_logprobs=np.where(row.sampled, row.policy_logprobs, np.float32(logprob)),
                ref_logprobs=np.where(row.sampled, row.ref_logprobs, np.float32(reference)),
            )
            for row in scored
        ]
        batch = make_batch(dirty, **settings)
        close(fields(batch), fields(clean))
        metrics = metrics_of(dirty, batch)
        assert metrics == pytest.approx(metrics_of(scored, clean))
        assert all(map(math.isfinite, metrics.values()))


def test_configured_lambda_overrides_the_length_adaptive_one():
    rows = scored_samples()
    by_length, ppo, given = (
        make_batch(rows, name=name, kl_coef=0.0, **settings).advantages
        for name, settings in (("sao", {}), ("ppo", {"lam": 0.5}), ("sao", {"lam": 0.5}))
    )
    assert torch.equal(given, ppo)
    assert not torch.allclose(by_length, ppo)


@pytest.mark.parametrize(("name", "length", "lam"), [("sao", 4, 1 - 1 / (1.5 * 4)), ("vapo", 40, 1 - 1 / (0.05 * 40))])
def test_length_adaptive_lambda_is_the_published_one(name, length, lam):
    """If all values are 0, the first token's advantage is the last token's reward times lambda^(length - 1)."""
    score = rewarded(1.0, values=np.zeros(1 + length, np.float32), version=0)
    batch = make_batch([a_sample([1, *[2] * length], score=score)], algorithm_name=name, kl_coef=0.0, whitens=False)
    assert float(batch.advantages[0, 0]) == pytest.approx(lam ** (length - 1))
    assert batch.advantages[0, -1] == batch.returns[0, 0] == 1.0


def test_failed_row_is_masked_and_does_not_affect_the_other_rows():
    scored = scored_samples(scored=[True, True, False, True])
    batch = make_batch(scored, **SETTINGS)
    assert {name: tensor[2].tolist() for name, tensor in fields(batch).items()} == dict.fromkeys(FIELDS, [0] * 5)
    metrics = metrics_of(scored, batch)
    for junk in (math.nan, math.inf, 1e30):  # whatever stands in such a row
        filled = np.full(LENGTHS[2], junk, np.float32)
        row = replace(scored[2], policy_logprobs=filled, ref_logprobs=-filled)
        dirty = [*scored[:2], row.with_score(reward=junk, outcome=junk, values=filled), scored[3]]
        close(fields(make_batch(dirty, **SETTINGS)), fields(batch))
        assert metrics_of(dirty, make_batch(dirty, **SETTINGS)) == pytest.approx(metrics)
    keep = [0, 1, 3]
    without = [scored[i] for i in keep]
    expected = make_batch(without, **SETTINGS)
    width = max(LENGTHS[i] for i in keep) - 1
    close({name: tensor[keep, :width] for name, tensor in fields(batch).items()}, fields(expected))
    others = metrics_of(without, expected)
    names = "rewards rewards_std init_policy_kl init_policy_kl_per_sequence"
    names += " rewards_with_kl explained_variance advantages_std returns_mean values_std weights_version_min"
    same = {name: others[name] for name in names.split()} | {"masked_samples": 1}
    assert {name: metrics[name] for name in same} == pytest.approx(same)


def test_rollout_metrics_match_hand_computed_values():
    """Every metric except consumed_samples, which the recorder adds because it counts the steps."""
    scored = scored_samples()
    metrics = metrics_of(scored, make_batch(scored, **SETTINGS))
    names = {"advantages_mean", "advantages_std", "returns_mean", "returns_std", "values_mean", "values_std"}
    assert names <= set(metrics)
    assert all(isinstance(value, float) for value in metrics.values())
    kl = kl_of(scored)
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
    drifting = [replace(row, logprobs=row.policy_logprobs + np.float32(0.5 * (i == 3))) for i, row in enumerate(scored)]
    metrics = metrics_of(drifting, make_batch(drifting, **SETTINGS))  # in one of ten tokens
    gaps = [metrics["generation_logprob_gap"], metrics["generation_logprob_gap_max"]]
    assert gaps == pytest.approx([0.05, 0.5], abs=1e-6)
    without = [row.with_score(values=None, version=-1) for row in scored]  # a critic
    metrics = metrics_of(without, make_batch(without, algorithm_name="reinforce++"))
    assert not {"values_mean", "explained_variance", "weights_version"} & set(metrics)
    assert math.isfinite(metrics["advantages_std"])


def test_distinct_bigrams_is_the_share_of_unique_bigrams():
    for rows, expected in (([[9, 1, 2, 1, 2], [9, 1, 2]], 2 / 4), ([[9], [9]], 0)):  # 12 21 12 | 12
        assert distinct_bigrams([a_sample(row) for row in rows]) == pytest.approx(expected)


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
def test_too_many_failures_stop_the_run(scored, allowed, stops):
    """The policy needs a score, and cannot learn from those of dropped groups."""
    found = [(row,) for row in scored_samples(scored=scored)]
    if not stops:
        return check_failures(found, allowed)
    first = scored.index(False)
    with pytest.raises(
        RlhfError,
        match=rf"{scored.count(False)} of 4 rewards .* \(prompts {first}(, [^ ,]+)*\): 503.*_fraction \({allowed:g}\)",
    ):
        check_failures(found, allowed)
    missing = [each for each in found if failure_of(each)]
    with pytest.raises(RlhfError, match="and the policy needs at least one"):
        check_failures(missing, 1.0, dropped=[each for each in found if not failure_of(each)])


# ---- algorithms ----


@pytest.mark.parametrize("algorithm", sorted({*ALGORITHMS} - {"maxrl"}))  # which takes no negative rewards
def test_kl_penalty_in_the_loss_does_not_change_the_advantages(algorithm):
    settings = {"algorithm_name": algorithm, "responses_per_prompt": 4, "mask_unfinished": False}
    one, other = (make_batch(scored_samples(), **settings, kl_penalty_in="loss", kl_coef=coef) for coef in (0.0, 5.0))
    close(fields(one), fields(other))
    charged = make_batch(scored_samples(), **settings, kl_penalty_in="reward", kl_coef=5.0)
    assert not torch.allclose(charged.advantages, one.advantages)


def received(rows, **settings):
    """Return what the algorithm receives of these rows."""
    found = []

    def advantage(inputs):
        found.append(inputs)
        return inputs.values, inputs.values

    method = replace(method_of(**settings), advantage=advantage)
    groups = groups_of(rows, method.settings.responses_per_prompt)
    batches.make_batch(groups, method, shaper_of(**settings), kl_coef=0.0)
    return found[0]


def test_components_of_weight_0_are_left_out_and_inapplicable_ones_are_nan():
    weights = {"right": 2.0, "short": 0.5, "charted": 0.0}
    terms = (0.0, 8.0, math.nan, 4.0)
    rows = [
        row.with_score(components={"right": 1.0, "short": term, "charted": math.nan}, weights=weights)
        for row, term in zip(scored_samples(), terms, strict=True)
    ]
    inputs = received(rows, name="gdpo", responses_per_prompt=4)
    assert inputs.component_weights.tolist() == [2.0, 0.5]
    assert inputs.components.nan_to_num(-1.0).tolist() == [[1, 0], [1, 8], [1, -1], [1, 4]]
    alone = [row.with_score(weights={**weights, "short": 0.0}) for row in rows]
    assert received(alone, name="gdpo", responses_per_prompt=4).components is None


@pytest.mark.parametrize("failed", [0, 3])
def test_reward_terms_are_logged_even_if_some_requests_failed(failed):
    rows = [row.with_score(components={"right": 1.0}) for row in scored_samples()]
    rows[failed] = replace(rows[failed], score=FAILED)
    metrics = text_metrics([(row,) for row in rows])
    assert (metrics.get("reward_right"), metrics.get("reward_right_missing")) == (1.0, 1.0)


# ---- stages between scoring and advantages ----

REWARDS = torch.tensor([1.0, 3.0, -2.0, 100.0])
SCORED = torch.tensor([True, True, True, False])
SPREAD = math.sqrt(((1 - 2 / 3) ** 2 + (3 - 2 / 3) ** 2 + (-2 - 2 / 3) ** 2) / 3)
BATCH = [(reward - 2 / 3) / SPREAD for reward in (1, 3, -2)]
CLIP = {"rewards_normalization": "batch", "rewards_clip": 1.0}


def shaper_of(**settings):
    actor = actor_section(max_new_tokens=10, **settings)
    return RewardShaper(actor.rewards, max_new_tokens=10)


def shaped(shaper, rewards, *responses, scored=None):
    """Return these scores after the stages; the first response ended, the others did not."""
    count = len(rewards)
    responses = responses or (1,) * count
    scored = torch.ones(count).bool() if scored is None else scored
    mask = (torch.arange(max(responses)) < torch.tensor(responses)[:, None]).float() * scored[:, None]
    ended = torch.arange(count) == 0
    known = {"scored": scored, "ended": ended, "counted": scored}
    return shaper.run(advantage_inputs(rewards, torch.arange(count) // 2, mask, **known)).rewards


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 3, -2, 0]),
        ({"rewards_normalization": "batch"}, [*BATCH, 0]),
        ({"rewards_normalization": "running"}, [*BATCH, 0]),
        (CLIP, [BATCH[0], 1, -1, 0]),
        ({**CLIP, "missing_eos_penalty": 4.0}, [BATCH[0], -3, -5, 0]),  # after the clip
    ],
    ids=["as they came", "batch", "running", "clipped", "penalised"],
)
def test_scores_are_normalised_then_clipped_then_penalised(settings, expected):
    for unscored in (100.0, math.nan):
        rewards = torch.where(SCORED, REWARDS, unscored)
        found = shaped(shaper_of(**settings), rewards, 1, 2, 3, 4, scored=SCORED)
        assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_overlong_penalty_grows_linearly_within_the_buffer():
    """DAPO (arXiv 2503.14476, equation 13): nothing up to the buffer, the whole penalty at the limit."""
    shaper = shaper_of(overlong_tokens=4, overlong_penalty=2.0)
    assert shaped(shaper, torch.zeros(5), 1, 6, 7, 9, 10).tolist() == pytest.approx([0, 0, -0.5, -1.5, -2])


def test_running_normalization_continues_from_a_restored_state():
    shaper = shaper_of(rewards_normalization="running")
    history = torch.empty(0)
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
def test_scores_that_differ_only_by_rounding_are_normalised_to_0(kind, score):
    for other in (score, torch.nextafter(torch.tensor(score), torch.tensor(math.inf))):
        rewards = torch.tensor([score, score, other, *[score] * 4])
        assert shaped(shaper_of(rewards_normalization=kind), rewards).tolist() == [0.0] * 7


# ---- process rewards ----

# Two responses to one prompt of two tokens: tokens 2..5 and 2..4. Steps end at tokens 3 and 5, and at token 4.
STEPS = torch.tensor([[0, 0, 0, 1.0, 0, 0.5], [0, 0, 0, 0, 3.0, 0]])
ENDS = STEPS != 0
PLAIN = {"whitens": False, "mask_unfinished": False, "gamma": 1.0, "lam": 1.0, "kl_coef": 0.0}


def processed(outcome=(0.0, 0.0), ok=(True, True)):
    """Return two responses with process rewards, values that grow by 0.1 per token, and no KL."""
    rows = []
    for i, size in enumerate((6, 5)):
        score = Score(
            reward=[0.5, 3.0][i],
            outcome=outcome[i],
            steps=STEPS[i, :size].numpy(),
            ends=ENDS[i, :size].numpy(),
            values=np.arange(size, dtype=np.float32) * np.float32(0.1),
            version=1,
            failure="" if ok[i] else "503",
        )
        rows.append(a_sample([7, 8, *[1] * (size - 2)], 2, name=str(i), score=score))
    return rows


def batch_of(rows, name):
    return make_batch(rows, name=name, responses_per_prompt=2 if name == "grpo" else 1, **PLAIN)


def test_ppo_and_reinforce_returns_sum_the_later_process_rewards():
    """Position t scores token t + 1: a reward at token 3 is at position 2. Returns at gamma 1 are sums to the end."""
    returns = torch.tensor([[0, 1.5, 1.5, 0.5, 0.5], [0, 3, 3, 3, 0]])
    assert torch.equal(batch_of(processed(), "reinforce++").advantages, returns)
    ppo = batch_of(processed(), "ppo")
    values = torch.tensor([[0, 0.1, 0.2, 0.3, 0.4], [0, 0.1, 0.2, 0.3, 0]])
    close((ppo.returns, ppo.advantages), (returns, returns - values))
    rows = processed((10.0, 20.0))  # what is beyond the steps comes at the end
    beyond = torch.tensor([[0, 11.5, 11.5, 10.5, 10.5], [0, 23, 23, 23, 0]])
    close((batch_of(rows, "reinforce++").returns, score_returns([(row,) for row in rows])[1]), (beyond, beyond))


def test_grpo_standardises_process_rewards_within_the_group():
    """Steps 1, 0.5 and 3 have the mean 1.5 and the deviation sqrt(1.75): standardised -0.378, -0.756 and 1.134."""
    one, half, three = (value / 1.75**0.5 for value in (-0.5, -1.0, 1.5))
    expected = torch.tensor([[0, one + half, one + half, half, half], [0, three, three, three, 0]])
    close(batch_of(processed(), "grpo").advantages, expected, atol=1e-5, rtol=0)
    # A further outcome is a reward of the last step: 1, 0.5 + 1.5 and 3 have the mean 2 and the deviation 1.
    found = batch_of(processed((1.5, 0.0)), "grpo")
    close(found.advantages[0], torch.tensor([0, -1.0, -1.0, 0, 0]), atol=1e-5, rtol=0)
    assert found.returns[0].tolist() == [0, 3, 3, 2, 2]
    # A step may end with the first sampled token, whose position is 0 after a prompt of one token.
    steps = {"process_rewards": torch.zeros(2, 2), "process_ends": torch.tensor([[True, False]] * 2)}
    inputs = advantage_inputs(torch.tensor([1.0, 2.0]), torch.tensor([0, 0]), torch.ones(2, 2), **steps)
    assert grpo.advantage(inputs)[1].tolist() == [[1, 0], [2, 0]]


def test_row_that_failed_to_get_process_rewards_is_masked():
    """The row is excluded from summary.json's ev_last, too, although it has values."""
    sample = processed(ok=(True, False))
    expected = torch.tensor([0, 0, 0, -0.25, -0.25]) / (2 * 0.25**2) ** 0.5
    close(batch_of(sample, "grpo").advantages[0], expected, atol=1e-4, rtol=0)
    conversations = [(row,) for row in sample]
    assert process_metrics(conversations) == {"process_rewards": 0.75, "steps_per_response": 2.0}
    # only the first row counts
    returns = torch.tensor([1.5, 1.5, 0.5, 0.5])
    values = torch.tensor([0.1, 0.2, 0.3, 0.4])
    variance = 1 - float((returns - values).var(correction=0) / returns.var(correction=0))
    found = explained_by_values(conversations, [(row,) for row in processed()])
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
            {"rewards_normalization": "running"},
            [1.0, -1.0, 0.0],
            [0.0, 0.0],
        ),
    ],
)
def test_process_rewards_are_normalised_and_clipped_per_step_before_penalties(sample, settings, steps, rewards):
    ended = "rewards_missing_eos_penalty" not in settings
    found = received([sample[0], replace(sample[1], ended=ended)], **settings)
    assert found.process_rewards[~ENDS[:, 1:]].abs().sum() == 0
    close(found.process_rewards[ENDS[:, 1:]], torch.tensor(steps), atol=1e-4, rtol=0)
    assert found.rewards.tolist() == rewards


# ---- conversations of several rows ----

BARE = {"whitens": False, "mask_unfinished": False}
K1 = {"kl_coef": 1.0, "kl_estimator": "k1"}


def row_of(*rewards, number=0, kl=0.0, **more):
    """Return a row with one-token turns after a prompt of two tokens, with an observed token between turns."""
    size = 2 * len(rewards) + 1
    inside = np.isin(np.arange(size), range(2, size, 2))
    steps = np.zeros(size, np.float32)
    steps[inside] = rewards
    turns = tuple(SampledTurn(2 * i + 2, 2 * i + 3, reward, number + i) for i, reward in enumerate(rewards))
    own, ref = (np.where(inside, logprob, 0.0).astype(np.float32) for logprob in (-1.0, -1.0 - kl))
    score = Score(steps=steps, ends=inside, values=np.zeros(size, np.float32), version=1)
    known = {"turns": turns, "policy_logprobs": own, "ref_logprobs": ref, "sampled": inside}
    return a_sample([1] * size, 2, score=score, **{**known, **more})


def conversation(*rows):
    """Return the rows with the total reward in the last one."""
    total = sum(float(row.score.steps.sum()) for row in rows)
    return (*rows[:-1], rows[-1].with_score(reward=total))


def sampled(tensor, batch):
    return tensor[batch.mask > 0].tolist()


@pytest.mark.parametrize("name", ["ppo", "reinforce++", "rloo"])
@pytest.mark.parametrize(
    "settings", [{}, {"rewards_clip": 1.0}, {"rewards_normalization": "batch"}, {"gamma": 0.5}, K1]
)
def test_one_row_per_turn_trains_like_one_long_row(name, settings):
    given = {"kl_coef": 0.0, **BARE, **settings, "algorithm_name": name, "responses_per_prompt": 2}
    rewards = (1.0, 1.0, 2.0, 1.0)
    another = conversation(row_of(0.0, 3.0))
    one = make_batch([conversation(row_of(*rewards)), another], **given)
    rows = [row_of(reward, number=i) for i, reward in enumerate(rewards)]
    several = make_batch([conversation(*rows), another], **given)
    for field in ("returns", "advantages", "policy_weights"):
        assert sampled(getattr(several, field), several) == pytest.approx(sampled(getattr(one, field), one))
    if name == "reinforce++" and not settings:
        assert sampled(one.returns, one) == [5, 4, 3, 1, 3, 3]


def test_turns_are_ordered_by_time_across_rows():
    """The agent's second row falls between two calls of its first one."""
    first = row_of(1.0, 8.0)
    second = row_of(2.0, 4.0, number=1)
    first = replace(first, turns=(first.turns[0], replace(first.turns[1], number=3)))
    batch = make_batch([conversation(second, first)], kl_coef=0.0, **BARE, algorithm_name="reinforce++")
    assert sampled(batch.returns, batch) == [14, 12, 15, 8]


@pytest.mark.parametrize("rewards", [{}, {"rewards_clip": 1.0}])
def test_reward_clipping_does_not_clip_the_kl_penalty(rewards):
    pair = [conversation(row_of(1.0)), conversation(row_of(0.0, kl=3.0), row_of(1.0, number=1))]
    settings = {**K1, "kl_penalty_in": "reward", **BARE, **rewards}
    batch = make_batch(pair, algorithm_name="rloo", responses_per_prompt=2, **settings)
    assert sampled(batch.advantages, batch) == pytest.approx([3, -3, -3])


@pytest.mark.parametrize("shaping", [{}, {"rewards_normalization": "batch"}, {"rewards_clip": 0.5}])
def test_bootstrap_value_is_not_normalised_or_clipped(shaping):
    stopped = row_of(0.0, truncated="environment.max_turns", ended=False)
    stopped = stopped.with_score(values=np.array([0, 0, 1], np.float32))
    batch = make_batch([conversation(stopped)], truncated="bootstrap", kl_coef=0.0, **BARE, **shaping)
    assert sampled(batch.returns, batch) == pytest.approx([1])


@pytest.mark.parametrize("name", ["grpo", "reinforce++", "ppo"])
def test_total_rewards_include_turn_rewards(name):
    rows = [conversation(row_of(reward)) for reward in (3.0, 4.0, 0.0, 1.0)]
    assert received(rows, name=name, responses_per_prompt=2).totals.tolist() == [3, 4, 0, 1]


def test_conversation_is_masked_whole_if_one_of_its_rows_failed():
    rows = conversation(row_of(1.0), row_of(1.0, number=1).with_score(failure="503"), row_of(1.0, number=2))
    batch = make_batch([rows, conversation(row_of(1.0))], kl_coef=0.0, **BARE, algorithm_name="reinforce++")
    assert batch.mask.any(-1).tolist() == [False, False, False, True]
    assert describe_failures([rows]).endswith("503")


def test_conversations_of_dropped_groups_train_only_the_critic():
    """A mean by sequence weighs conversations, not rows."""
    two_rows = conversation(row_of(1.0), row_of(0.0, 2.0, number=1))
    settings = {"kl_coef": 0.0, **BARE, "algorithm_name": "reinforce++", "loss_mean": "sequence"}
    batch = make_batch([two_rows, conversation(row_of(4.0))], num_dropped=1, **settings)
    assert batch.conversations.tolist() == batch.groups.tolist() == [0, 0, 1]
    assert batch.policy_weights.sum(-1).tolist() == pytest.approx([1 / 3, 2 / 3, 0])
    assert sampled(batch.returns, batch) == [3, 2, 2, 4]
    cut = batch.first(1, 3)
    assert (cut.tokens.shape, cut.mask.shape, cut.lengths.shape) == ((1, 3), (1, 2), (1,))
