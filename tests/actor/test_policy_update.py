"""`actor.policy.update`: what must never change an update (micro-batches, padding, order of the samples, recomputed
activations), and what each setting does. Real models of a few thousand weights, in float64 where bits would hide it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from live_system import make_checkpoint, make_tokenizer
from policy_training import load_checkpoint, states
from torch import Tensor

from actor.algorithms import batch as batches
from actor.algorithms.stages import RewardShaper
from actor.data.rollout import PPOBatch, Rollout, ScoredRollout, Scores
from actor.policy.checkpoint import save_checkpoint
from actor.policy.policy import Policy
from python_backend.config import RewardsSection
from python_backend.config.algorithms import ALGORITHMS, KL_ESTIMATORS
from tests.support.policy_training import trainable_policy, update_of
from tests.support.tiny_checkpoints import save_tiny

LENGTHS, PROMPT = [9, 4, 12, 7, 5, 10], 3
NAMES = sorted(ALGORITHMS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("policy") / "policy", "policy", make_tokenizer(), seed=3)


def make_policy(checkpoint: Path, *, double: bool = True, **settings: Any) -> Policy:
    policy = trainable_policy(
        **{"checkpoint": checkpoint, "lr": 1e-2, "weight_decay": 0.0, "minibatch_size": 6, **settings}
    )
    if double:
        policy.model.double()
    return policy


def make_batch(policy: Policy, *, width: int = max(LENGTHS), seed: int = 0, kl_scale: float = 0.1) -> PPOBatch:
    """Random responses with random advantages; log-probs are the policy's own, the reference's differ a little."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS)
    tokens = torch.full((len(LENGTHS), width), policy.pad_id)
    tokens[:, : max(LENGTHS)] = torch.randint(5, 30, (len(LENGTHS), max(LENGTHS)), generator=generator)
    positions = torch.arange(width - 1)
    mask = ((positions >= PROMPT - 1) & (positions < lengths[:, None] - 1)).float()
    noise = torch.randn(2, len(LENGTHS), max(LENGTHS) - 1, generator=generator)
    advantages, ref = (torch.nn.functional.pad(x, (0, width - max(LENGTHS))) for x in noise)
    with torch.no_grad():
        logprobs = policy.token_logprobs(policy.model, tokens, lengths, mask)[0]
    logprobs, zeros = logprobs.cpu(), torch.zeros_like(mask)
    return PPOBatch(
        tokens, lengths, mask, mask, logprobs, logprobs + kl_scale * ref * mask, advantages * mask, zeros, zeros, zeros
    )


def select(batch: PPOBatch, rows: list[int]) -> PPOBatch:
    """These rows, in this order."""
    tensors = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return PPOBatch(**{name: tensor if tensor is None else tensor[rows] for name, tensor in tensors.items()})


def updated(policy: Policy, batch: PPOBatch, *, kl_coef: float = 0.1) -> tuple[dict[str, float], Tensor]:
    """Statistics, and all weights after the update."""
    found = update_of(policy).run(batch, seed=0, kl_coef=kl_coef)
    return found, torch.cat([p.detach().flatten() for p in policy.model.parameters()])


def assert_same(results: list[tuple[dict[str, float], Tensor]]) -> None:
    """Statistics and weights of all updates are those of the first."""
    for stats, weights in results[1:]:
        assert stats == pytest.approx(results[0][0], rel=1e-7, abs=1e-9)
        torch.testing.assert_close(weights, results[0][1], rtol=0, atol=1e-9)


def settings_of(name: str) -> Iterator[dict[str, Any]]:
    """Each algorithm as it is, and with everything that a loss can have."""
    groups = {"responses_per_prompt": 2} if name in ("rloo", "grpo") else {}
    yield {"algorithm_name": name, **groups}
    yield {
        "algorithm_name": name,
        **groups,
        "kl_penalty_in": "loss",
        "kl_estimator": "k3",
        "entropy_bonus": 0.01,
        "dual_clip": 3.0,
    }


@pytest.mark.parametrize("name", NAMES)
def test_neither_the_plan_of_micro_batches_nor_padding_matters(checkpoint: Path, name: str):
    for settings in settings_of(name):
        results = []
        for budget, width, junk in ((1000, 12, None), (8, 12, None), (25, 15, None), (25, 15, 7)):
            policy = make_policy(checkpoint, token_budget=budget, update_epochs=2, minibatch_size=4, **settings)
            batch = make_batch(policy, width=width)
            if junk is not None:
                behind = torch.arange(width)[None] >= batch.lengths[:, None]
                batch = dataclasses.replace(batch, tokens=batch.tokens.masked_fill(behind, junk))
            results.append(updated(policy, batch))
        assert_same(results)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_the_samples_never_matters(checkpoint: Path, name: str):
    for settings in settings_of(name):
        results = []
        for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
            policy = make_policy(checkpoint, **settings)
            results.append(updated(policy, select(make_batch(policy), order)))
        torch.testing.assert_close(results[1][1], results[0][1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_importance_weights_scale_the_policy_gradient_and_nothing_else(checkpoint: Path, name: str):
    """Neither the KL and entropy terms nor any statistic, among them the one that `max_kl` compares."""
    groups = {"responses_per_prompt": 2} if name in ("rloo", "grpo") else {}
    terms = {"kl_penalty_in": "loss", "kl_estimator": "k2", "entropy_bonus": 0.01}
    stats: dict[tuple[float, bool], dict[str, float]] = {}
    for weight, with_terms in itertools.product((1.0, 0.5, 0.1), (False, True)):
        policy = make_policy(checkpoint, algorithm_name=name, **groups, **(terms if with_terms else {}))
        rows, num = make_batch(policy), len(LENGTHS)
        rollout = Rollout([], rows.tokens, rows.lengths, torch.full((num,), PROMPT), torch.ones(num) > 0)
        scores = Scores(
            torch.arange(num) ** 2.0, torch.zeros(rows.tokens.shape), torch.full((num,), -1), torch.ones(num) > 0, []
        )
        scored = ScoredRollout(rollout, scores, rows.logprobs, rows.ref_logprobs, torch.full_like(rows.mask, weight))
        update = update_of(policy)
        batch = batches.make_batch(
            scored,
            update._method,
            RewardShaper(RewardsSection(), max_new_tokens=9),
            kl_coef=0.1,
            responses_per_prompt=2,
        )
        stats[weight, with_terms] = update.run(batch, seed=0, kl_coef=0.1 if with_terms else 0.0)
    for (weight, with_terms), found in stats.items():
        whole = dict(stats[1.0, with_terms])
        norm = whole.pop("train_optim/grad_norm")
        if not with_terms:
            assert found["train_optim/grad_norm"] == pytest.approx(weight * norm)
        whole.pop("train_optim/loss")
        assert {key: found[key] for key in whole} == pytest.approx(whole)


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OPT's layers drop out by their own training flag, which says too whether a layer computes again."""
    folder = tmp_path_factory.mktemp("policy")
    sizes = {"vocab_size": len(make_tokenizer()), "max_position_embeddings": 64, "pad_token_id": 2}
    save_tiny(folder, "opt", "language", **sizes, dropout=0.5, layerdrop=0.5, bos_token_id=0, eos_token_id=1)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model", ["checkpoint", "dropping"])
def test_recomputed_activations_change_nothing(request: pytest.FixtureRequest, model: str):
    results, sizes = [], []
    for recompute in (False, True):
        limits = {"prompts_max_tokens": 32, "max_new_tokens": 32, "gradient_checkpointing": recompute}
        policy = make_policy(request.getfixturevalue(model), double=False, **limits)
        kept: list[int] = []  # what forwards keep for their backward passes
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.numel()) or x, lambda x: x):
            results.append(updated(policy, make_batch(policy)))
        sizes.append(sum(kept))
        assert not any(module.training for module in policy.model.modules())  # generation keeps its cache
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert sizes[1] < sizes[0] * 0.7


def test_a_minibatch_that_moved_too_far_ends_the_update(checkpoint: Path):
    settings = {"update_epochs": 4, "minibatch_size": 3}
    policy = make_policy(checkpoint, **settings)
    stats, _ = updated(policy, make_batch(policy))
    assert (stats["train_optim/minibatches"], policy.optimizer_step) == (8, 8)
    policy = make_policy(checkpoint, **settings, update_max_kl=1e-4)
    stats, _ = updated(policy, make_batch(policy))
    assert 1 <= stats["train_optim/minibatches"] == policy.optimizer_step < 8
    assert all(p.grad is None for p in policy.model.parameters())


@pytest.mark.parametrize("kind", sorted({*KL_ESTIMATORS} - {"k1"}))  # k1 has no gradient in expectation
def test_a_penalty_in_the_loss_pulls_towards_the_reference(checkpoint: Path, kind: str):
    """Advantages of 0, and a reference that likes these tokens more: the penalty alone makes them likelier."""
    settings = {"kl_penalty_in": "loss", "kl_estimator": kind, "algorithm_name": "reinforce++"}
    policy = make_policy(checkpoint, **settings)
    batch = make_batch(policy)
    batch = dataclasses.replace(
        batch, advantages=torch.zeros_like(batch.advantages), ref_logprobs=batch.logprobs + batch.mask
    )
    stats, _ = updated(policy, batch, kl_coef=1.0)
    assert stats["train_optim/scaled_kl"] > 0
    with torch.no_grad():
        after = policy.token_logprobs(policy.model, batch.tokens, batch.lengths, batch.mask)[0].cpu()
    assert float(((after - batch.logprobs) * batch.mask).sum()) > 0.1


def test_an_entropy_bonus_makes_the_policy_less_certain(checkpoint: Path):
    """Advantages of 0: the bonus alone moves the policy."""
    policy = make_policy(checkpoint, entropy_bonus=1.0, algorithm_name="reinforce++")
    batch = make_batch(policy)
    batch = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    before, after = (updated(policy, batch, kl_coef=0.0)[0]["train_optim/scaled_entropy"] for _ in range(2))
    assert after > before


def test_a_gradient_that_is_not_finite_changes_nothing(checkpoint: Path):
    policy = make_policy(checkpoint)
    batch = make_batch(policy)
    before = torch.cat([p.detach().flatten() for p in policy.model.parameters()])
    broken = batch.advantages.clone()
    broken[2, 5] = math.inf
    with pytest.raises(FloatingPointError, match=r"not finite at optimizer step 0; lower actor.optimizer.lr \(0.01\)"):
        updated(policy, dataclasses.replace(batch, advantages=broken))
    assert torch.equal(torch.cat([p.detach().flatten() for p in policy.model.parameters()]), before)
    assert all(p.grad is None for p in policy.model.parameters())


def test_a_minibatch_without_weight_is_left_out(checkpoint: Path):
    policy = make_policy(checkpoint, minibatch_size=3)
    batch = make_batch(policy)
    stats, weights = updated(policy, dataclasses.replace(batch, policy_weights=0 * batch.policy_weights))
    assert (stats["train_optim/minibatches"], policy.optimizer_step) == (0, 0)
    assert torch.equal(weights, torch.cat([p.detach().flatten() for p in make_policy(checkpoint).model.parameters()]))


@pytest.mark.parametrize("name", NAMES)
def test_one_update_needs_no_log_probs_of_sampling(checkpoint: Path, name: str):
    """The ratio is 1 where the minibatch is the rollout: the same update as with the policy's own log-probs."""
    results = []
    for known in (True, False):
        policy = make_policy(checkpoint, kl_coef=0.0, **next(settings_of(name)))
        batch = make_batch(policy)
        if not known:
            batch = dataclasses.replace(batch, logprobs=None, ref_logprobs=None, kl=None)
        results.append(updated(policy, batch, kl_coef=0.0))
    assert_same(results)
    assert results[1][0]["train_optim/ppo_ratio"] == 1.0


def test_rows_without_weight_cost_no_forward(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    policy = make_policy(checkpoint)
    batch = make_batch(policy)
    weights = batch.policy_weights.clone()
    weights[[1, 3]] = 0
    rows: list[int] = []
    forward = policy.logprobs_of
    monkeypatch.setattr(
        policy,
        "logprobs_of",
        lambda model, inputs, **k: (rows.append(len(inputs[0])), forward(model, inputs, **k))[1],
    )
    updated(policy, dataclasses.replace(batch, policy_weights=weights))
    assert sum(rows) == len(LENGTHS) - 2


def test_a_resumed_policy_goes_on_in_the_schedule(checkpoint: Path, tmp_path: Path):
    """Warm-up over five optimizer steps, two in each update, a checkpoint in the middle of it."""
    schedule = {"lr": 1e-2, "warmup_steps": 5, "minibatch_size": 3, "rollout_size": 6, "double": False}
    one, other = make_policy(checkpoint, **schedule), make_policy(checkpoint, **schedule)
    batch = make_batch(one)
    assert updated(one, batch)[0]["train_optim/lr"] == pytest.approx(1e-2 * 2 / 5)
    save_checkpoint(tmp_path, states(one), {"step": 1}, keep=1)
    load_checkpoint(tmp_path, 1, states(other))
    (stats, weights), (resumed_stats, resumed_weights) = updated(one, batch), updated(other, batch)
    assert stats == resumed_stats
    assert stats["train_optim/lr"] == one.optimizer.param_groups[1]["lr"] == pytest.approx(1e-2 * 4 / 5)
    assert torch.equal(weights, resumed_weights)


def test_all_of_a_resumed_optimizer_is_on_the_device_of_its_parameter(checkpoint: Path, tmp_path: Path):
    """The step too: fused AdamW refuses it elsewhere ("found at least two devices"). `meta` stands for CUDA."""
    policy = make_policy(checkpoint, double=False)
    updated(policy, make_batch(policy))
    save_checkpoint(tmp_path, states(policy), {"step": 1}, keep=1)
    policy.model.to("meta")
    load_checkpoint(tmp_path, 1, states(policy))
    state = [tensor for parameter in policy.optimizer.state.values() for tensor in parameter.values()]
    assert len(state) == 3 * len(list(policy.model.parameters()))
    assert {tensor.device.type for tensor in state} == {"meta"}


def test_a_kl_that_is_measured_does_not_change_an_update_of_one_minibatch(checkpoint: Path):
    """Measuring brings the log-probs of sampling, which dropout and other micro-batches give another value."""
    results = []
    for offset in (None, 0.3):
        policy = make_policy(checkpoint, rollout_size=6, minibatch_size=6)
        batch = make_batch(policy)
        logprobs = None if offset is None else batch.logprobs + offset * batch.mask
        results.append(updated(policy, dataclasses.replace(batch, logprobs=logprobs)))
    assert_same(results)
