"""Tests of `actor.policy.update`: what must not change an update, and the effect of each setting.

An update must not depend on micro-batches, padding, sample order or recomputed activations.

Real models of a few thousand weights, in float64 where rounding would hide a fault.
"""

import math
from dataclasses import replace

import pytest
import torch
from policy_training import random_batch, trainable_policy, update_of, weights_of
from run_checkpoints import save_policy

from rlhf_triton.actor.data.batch import PPOBatch
from rlhf_triton.config.algorithms import ALGORITHMS, KL_ESTIMATORS

LENGTHS = [9, 4, 12, 7, 5, 10]
LONGEST = 12
PROMPT = 3
# One algorithm for each loss that an update can have: the others differ in what comes before it, the advantages.
NAMES = sorted({(each.loss, each.loss_mean): name for name, each in reversed(ALGORITHMS.items())}.values())


def make_policy(checkpoint, *, double=True, **settings):
    usual = {"model": checkpoint, "lr": 1e-2, "weight_decay": 0.0, "minibatch_size": 6}
    policy = trainable_policy(**{**usual, **settings})
    if double:
        policy.model.double()
    return policy


def make_batch(policy, *, width=LONGEST, **changes):
    """Return random responses and advantages; log-probs are the policy's own, the reference's differ a little."""
    drawn = random_batch(LENGTHS, prompt=PROMPT, seed=0)
    wide = {name: x for name, x in vars(drawn).items() if x is not None and x.ndim == 2}
    padded = {name: torch.nn.functional.pad(x, (0, width - LONGEST)) for name, x in wide.items()}
    batch = replace(drawn, **padded, positive=torch.arange(len(LENGTHS)) % 2 == 0)
    with torch.no_grad():
        logprobs = policy.token_logprobs.compute(policy.model, batch.tokens, batch.lengths, batch.mask).cpu()
    return replace(batch, logprobs=logprobs, ref_logprobs=logprobs + 0.1 * (batch.ref_logprobs + 2), **changes)


def updated(policy, batch, *, kl_coef=0.1):
    """Return the statistics by the part of their name after the slash, and all weights after the update."""
    found = update_of(policy).run(batch, seed=0, kl_coef=kl_coef).metrics
    return {name.removeprefix("train_optim/"): value for name, value in found.items()}, weights_of(policy)


def assert_same(results):
    """Assert that statistics and weights of all updates equal the first one's."""
    for stats, weights in results[1:]:
        assert stats == pytest.approx(results[0][0], rel=1e-7, abs=1e-9)
        torch.testing.assert_close(weights, results[0][1], rtol=0, atol=1e-9)


def settings_of(name):
    """Yield each algorithm's settings, plain and with all loss terms."""
    algorithm = ALGORITHMS[name]
    groups = {"algorithm_name": name, **({"responses_per_prompt": 2} if algorithm.needs_groups else {})}
    yield groups
    yield {**groups, "kl_penalty_in": "loss", "kl_estimator": "k3", "entropy_bonus": 0.01}


@pytest.mark.device
@pytest.mark.parametrize("name", NAMES)
def test_update_is_independent_of_micro_batches_padding_and_sample_order(checkpoint, name):
    for settings in settings_of(name):
        results = []
        for budget, width, junk in ((1000, 12, None), (8, 12, None), (25, 15, None), (25, 15, 7)):
            policy = make_policy(checkpoint, token_budget=budget, update_epochs=2, minibatch_size=4, **settings)
            batch = make_batch(policy, width=width)
            if junk is not None:
                behind = torch.arange(width)[None] >= batch.lengths[:, None]
                batch = replace(batch, tokens=batch.tokens.masked_fill(behind, junk))
            results.append(updated(policy, batch))
        assert_same(results)
        results = []
        for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
            policy = make_policy(checkpoint, **settings)
            given = vars(make_batch(policy)).items()
            batch = PPOBatch(**{field: tensor if tensor is None else tensor[order] for field, tensor in given})
            results.append(updated(policy, batch))
        torch.testing.assert_close(results[1][1], results[0][1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_importance_weights_scale_the_policy_gradient_and_nothing_else(checkpoint, name):
    """Neither the KL and entropy terms nor any statistic changes, including the one that `max_kl` compares."""
    plain = next(settings_of(name))
    terms = {"kl_penalty_in": "loss", "kl_estimator": "k2", "entropy_bonus": 0.01}
    for settings, kl_coef in ((plain, 0.0), ({**plain, **terms}, 0.1)):
        stats = {}
        for weight in (1.0, 0.5, 0.1):
            policy = make_policy(checkpoint, **settings)
            batch = make_batch(policy)
            batch = replace(batch, importance=torch.full_like(batch.mask, weight))
            stats[weight], _ = updated(policy, batch, kl_coef=kl_coef)
        for weight, found in stats.items():
            changed = ("grad_norm", "loss", "importance")
            same = {key: value for key, value in stats[1.0].items() if key not in changed}
            if not kl_coef:
                same["grad_norm"] = weight * stats[1.0]["grad_norm"]
            assert {key: found[key] for key in same} == pytest.approx(same)


@pytest.mark.device
def test_importance_correction_compares_the_policy_before_the_update_with_the_sampler(checkpoint):
    """One step off policy, the policy in training recomputes the old log-probs of the policy that sampled."""
    correction = {"level": "token", "mode": "clip", "low": 0.5, "high": 1.5}
    policy = make_policy(checkpoint, max_off_policy_steps=1, algorithm_correction=correction)
    batch = make_batch(policy)
    older = batch.logprobs + batch.mask * torch.linspace(-1, 1, batch.mask.shape[1])
    batch = replace(batch, logprobs=older, sampled_logprobs=older)
    expected = (make_batch(policy).logprobs - older).exp().clamp(0.5, 1.5)
    found, _ = updated(policy, batch)
    assert found["importance"] == pytest.approx(float((expected * batch.mask).sum() / batch.mask.sum()))
    assert found["ppo_ratio"] == pytest.approx(1)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gate_masks_tokens_or_responses_that_moved_too_far(checkpoint, level):
    """The first two tokens of three of the six responses were almost certain when they were sampled."""
    correction = {"mode": "binary_kl", "level": level, "high": 0.1}
    policy = make_policy(checkpoint, max_off_policy_steps=1, algorithm_correction=correction)
    batch = make_batch(policy)
    sampled = batch.logprobs.clone()
    sampled[:3, PROMPT - 1 : PROMPT + 1] = -0.01
    batch = replace(batch, logprobs=sampled, sampled_logprobs=sampled)
    found, _ = updated(policy, batch)
    masked = batch.mask.clone()
    masked[3:] = 0
    if level == "token":
        masked[:, PROMPT + 1 :] = 0
    assert found["importance_masked"] == pytest.approx(float(masked.sum() / batch.mask.sum()))


def test_correction_mode_none_trains_on_the_plain_ratio(checkpoint):
    """One step off policy, the old log-probs are those of the policy before the update, and there is no factor."""
    policy = make_policy(checkpoint, max_off_policy_steps=1, algorithm_correction={"mode": "none"})
    batch = make_batch(policy)
    older = batch.logprobs - batch.mask
    found, _ = updated(policy, replace(batch, logprobs=older, sampled_logprobs=older))
    assert (found["ppo_ratio"], found["lr"]) == pytest.approx((1, 1e-2))
    assert "importance" not in found


def test_unbiased_kl_has_the_policys_ratio_to_the_sampler(checkpoint):
    """On policy its value is k3's; where the sampler's log-probs are lower by 1, it is e times as large."""
    found = {}
    for kind, shift in (("k3", 0.0), ("unbiased", 0.0), ("unbiased", -1.0)):
        policy = make_policy(checkpoint, kl_penalty_in="loss", kl_estimator=kind, algorithm_name="reinforce++")
        batch = make_batch(policy)
        batch = replace(batch, logprobs=batch.logprobs + shift * batch.mask)
        found[kind, shift] = updated(policy, batch)[0]["scaled_kl"]
    assert found["unbiased", 0.0] == pytest.approx(found["k3", 0.0])
    assert found["unbiased", -1.0] == pytest.approx(math.e * found["k3", 0.0], rel=1e-6)


def test_constant_loss_mean_divides_by_conversations_times_the_longest_response(checkpoint):
    """Dr. GRPO: all terms of the loss alike. One of three conversations is masked, which has four of the six rows."""
    losses = {}
    for mean in ("token", "constant"):
        settings = {"loss_mean": mean, "max_new_tokens": 20, "algorithm_name": "reinforce++", "rollout_size": 3}
        policy = make_policy(checkpoint, minibatch_size=3, **settings)
        batch = make_batch(policy)
        taught = batch.mask * torch.tensor([[1.0], [1.0], [0.0], [0.0], [0.0], [0.0]])
        losses[mean] = updated(policy, replace(batch, policy_weights=taught))[0]
    for name in ("loss", "grad_norm"):
        assert losses["constant"][name] == pytest.approx(losses["token"][name] * float(taught.sum()) / 40)
    assert losses["constant"]["entropy"] == pytest.approx(losses["token"]["entropy"]) != 0


def test_nll_term_raises_the_likelihood_of_positive_responses(checkpoint):
    """Advantages of 0: the term alone moves the policy, by the mean over the tokens of these responses."""
    policy = make_policy(checkpoint, algorithm_name="vapo")
    batch = make_batch(policy, advantages=torch.zeros(6, 11))
    of_positive = batch.mask * batch.positive[:, None]
    nll = -float((batch.logprobs * of_positive).sum() / of_positive.sum())
    before, after = (updated(policy, batch, kl_coef=0.0)[0]["scaled_nll"] for _ in range(2))
    assert before == pytest.approx(0.1 * nll, rel=1e-4)
    assert after < before


@pytest.fixture(scope="module")
def dropping(tmp_path_factory):
    """OPT's layers drop out by their own training flag, which says too whether a layer computes again."""
    sizes = {"max_position_embeddings": 64, "bos_token_id": 0}
    return save_policy(tmp_path_factory.mktemp("policy"), "opt", **sizes, dropout=0.5, layerdrop=0.5)


@pytest.mark.device
@pytest.mark.parametrize("model", ["checkpoint", "dropping"])
def test_gradient_checkpointing_gives_the_same_update_with_less_memory(request, model):
    results = []
    sizes = []
    for recompute in (False, True):
        limits = {"prompts_max_tokens": 32, "max_new_tokens": 32, "gradient_checkpointing": recompute}
        policy = make_policy(request.getfixturevalue(model), double=False, **limits)
        kept = []  # what forwards keep for their backward passes
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.numel()) or x, lambda x: x):
            results.append(updated(policy, make_batch(policy)))
        sizes.append(sum(kept))
        assert not any(module.training for module in policy.model.modules())  # generation keeps its cache
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert sizes[1] < sizes[0] * 0.7


def test_max_kl_ends_the_update(checkpoint):
    minibatches = []
    for limits in ({}, {"update_max_kl": 1e-4}):
        policy = make_policy(checkpoint, update_epochs=4, minibatch_size=3, **limits)
        minibatches.append(updated(policy, make_batch(policy))[0]["minibatches"])
        assert policy.trained.optimizer_step == minibatches[-1]
        assert all(p.grad is None for p in policy.model.parameters())
    assert 1 <= minibatches[1] < minibatches[0] == 8


@pytest.mark.parametrize("kind", sorted({*KL_ESTIMATORS} - {"k1"}))  # k1 has no gradient in expectation
def test_kl_penalty_in_the_loss_pulls_towards_the_reference(checkpoint, kind):
    """Advantages of 0, and a reference that likes these tokens more: the penalty alone makes them likelier."""
    policy = make_policy(checkpoint, kl_penalty_in="loss", kl_estimator=kind, algorithm_name="reinforce++")
    batch = make_batch(policy)
    nothing = torch.zeros_like(batch.mask)
    ref_logprobs = batch.logprobs + batch.mask
    batch = replace(batch, advantages=nothing, ref_logprobs=ref_logprobs)
    assert updated(policy, batch, kl_coef=1.0)[0]["scaled_kl"] > 0
    assert float(((make_batch(policy).logprobs - batch.logprobs) * batch.mask).sum()) > 0.1


def test_entropy_bonus_raises_the_policys_entropy(checkpoint):
    """Advantages of 0: the bonus alone moves the policy."""
    policy = make_policy(checkpoint, entropy_bonus=1.0, algorithm_name="reinforce++")
    batch = make_batch(policy, advantages=torch.zeros(6, 11))
    before, after = (updated(policy, batch, kl_coef=0.0)[0]["scaled_entropy"] for _ in range(2))
    assert after > before


def test_non_finite_gradient_raises_and_changes_no_weights(checkpoint):
    policy = make_policy(checkpoint)
    batch = make_batch(policy)
    before = weights_of(policy)
    batch.advantages[2, 5] = math.inf
    with pytest.raises(FloatingPointError, match=r"not finite at optimizer step 0; lower actor.optimizer.lr \(0.01\)"):
        updated(policy, batch)
    assert torch.equal(weights_of(policy), before)
    assert all(p.grad is None for p in policy.model.parameters())


def test_update_skips_rows_and_minibatches_without_weight(checkpoint, monkeypatch):
    policy = make_policy(checkpoint)
    before = weights_of(policy)
    forward = policy.token_logprobs.of_placed
    rows = []

    def watched(model, placed, **entropy):
        rows.append(len(placed.tokens))
        return forward(model, placed, **entropy)

    monkeypatch.setattr(policy.token_logprobs, "of_placed", watched)
    weights = make_batch(policy).mask
    rows.clear()
    stats, found = updated(policy, make_batch(policy, policy_weights=0 * weights))
    assert (stats["minibatches"], policy.trained.optimizer_step) == (0, 0)
    assert torch.equal(found, before)
    weights[[1, 3]] = 0
    batch = make_batch(policy, policy_weights=weights)
    rows.clear()
    updated(policy, batch)
    assert sum(rows) == len(LENGTHS) - 2


@pytest.mark.parametrize("name", NAMES)
def test_single_minibatch_update_needs_no_sampling_logprobs(checkpoint, name):
    """The ratio is 1 where the minibatch is the rollout: the same update as with the policy's own log-probs. A KL that
    is measured brings others, from other micro-batches, which do not change it either."""
    results = []
    for change in ("none", "unknown", "measured"):
        policy = make_policy(checkpoint, kl_coef=0.0, rollout_size=6, **next(settings_of(name)))
        batch = make_batch(policy)
        if change == "unknown":
            batch = replace(batch, logprobs=None, ref_logprobs=None, kl=None)
        elif change == "measured":
            batch = replace(batch, logprobs=batch.logprobs + 0.3 * batch.mask)
        results.append(updated(policy, batch, kl_coef=0.0))
        assert results[-1][0]["ppo_ratio"] == 1.0
    assert_same(results)
