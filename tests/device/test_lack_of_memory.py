"""Updates and log-probs on simulated cards whose memory does not suffice for a micro-batch of the configured size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simcuda
import torch
from live_system import make_checkpoint, make_tokenizer
from simulated_cuda.device import memory_limit, set_limit
from tiny_checkpoints import VOCAB, save_tiny

from actor.data.rollout import PPOBatch, Rollout
from python_backend.models.card.memory import OutOfMemory, on_rank
from python_backend.models.modeling import load_critic, save_critic
from python_backend.training.ranks import Ranks
from python_backend.wire.training_payload import TrainPayload
from tests.support.policy_training import TrainablePolicy, random_batch, rollout_of, trainable_policy, update_of
from tests.support.ranks import on_ranks
from tests.support.settings import trainer_section
from tests.training.test_policy_ranks import batch_of, make, settings_of
from trainer.critic_update import CriticUpdate
from trainer.trained_critic import build_critic

CARD, DEVICE = 1, "cuda:1"
LENGTHS, PROMPT = [9, 40, 12, 61, 33, 50, 18, 57], 3
BUDGET = 130  # three micro-batches: the first ones fit, so that their gradients must not count twice


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("policy") / "policy", "policy", make_tokenizer(), seed=3)


def make_policy(checkpoint: Path, **settings: Any) -> TrainablePolicy:
    section = {"lr": 1e-2, "minibatch_size": 4, "token_budget": BUDGET, "algorithm_name": "grpo"}
    torch.manual_seed(0)
    return trainable_policy(
        **{**section, "checkpoint": checkpoint, "device": DEVICE, "precision": "float32", **settings}
    )


def make_batch(seed: int) -> PPOBatch:
    return random_batch(LENGTHS, prompt=PROMPT, seed=seed)


def rollout() -> Rollout:
    return rollout_of(make_batch(0), prompt=PROMPT)


def needed(work: Callable[[], Any]) -> int:
    """The bytes that `work` allocates beyond what there is."""
    before = simcuda.allocated(CARD)
    simcuda.reset_peak(CARD)
    work()
    return simcuda.peak(CARD) - before


def with_room_for(num_bytes: float, work: Callable[[], Any]) -> Any:
    with memory_limit(CARD, simcuda.allocated(CARD) + int(num_bytes)):
        return work()


def weights_of(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize(("settings", "share"), [({}, 0.75), ({"lora_rank": 2}, 0.6)], ids=str)
def test_a_policy_update_that_runs_out_of_memory_is_that_of_a_larger_card(
    checkpoint: Path, settings: dict[str, Any], share: float, caplog: pytest.LogCaptureFixture
):
    large, small = make_policy(checkpoint, **settings), make_policy(checkpoint, **settings)
    stats: list[dict[str, float]] = []

    def update(policy: TrainablePolicy, seed: int) -> None:
        stats.append(update_of(policy).run(make_batch(seed), seed=seed, kl_coef=0.1))

    for policy in (large, small):
        update(policy, 0)  # creates the optimizer's state
    most = needed(lambda: update(large, 1))
    with_room_for(share * most, lambda: update(small, 1))
    assert small.memory.count >= 1
    assert small.memory in small.halvings
    assert "(actor.policy.token_budget)" in caplog.text
    assert stats[3] == pytest.approx(stats[2], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(weights_of(small.model), weights_of(large.model), rtol=0, atol=1e-4)


def test_an_update_that_runs_out_of_memory_draws_its_dropout_anew(checkpoint: Path):
    """Bit for bit as with the smaller micro-batches from the start: the draws of the failed attempt do not count."""
    settings = {"lora_rank": 2, "lora_dropout": 0.5, "minibatch_size": 8}
    found = []
    for room in (None, 0.6):
        policy = make_policy(checkpoint, **settings)
        update = update_of(policy)
        update.run(make_batch(0), seed=0, kl_coef=0.1)
        if room is None:
            most = needed(lambda update=update: update.run(make_batch(1), seed=1, kl_coef=0.1))
            policy = make_policy(checkpoint, **settings)
            update = update_of(policy)
            update.run(make_batch(0), seed=0, kl_coef=0.1)
            policy.memory.size = BUDGET // 2
            update.run(make_batch(1), seed=1, kl_coef=0.1)
        else:
            with_room_for(room * most, lambda update=update: update.run(make_batch(1), seed=1, kl_coef=0.1))
            assert (policy.memory.count, policy.memory.size) == (1, BUDGET // 2)
        found.append(weights_of(policy.model))
    assert torch.equal(*found)


@pytest.mark.parametrize("is_set", [False, True])
def test_a_policy_that_does_not_fit_names_what_is_not_set(checkpoint: Path, is_set: bool):
    policy = make_policy(checkpoint, gradient_checkpointing=is_set)
    more = "" if is_set else r" or set actor\.policy\.gradient_checkpointing"
    with pytest.raises(OutOfMemory, match=rf"; lower actor\.generation\.max_new_tokens{more}$"):
        with_room_for(1, lambda: update_of(policy).run(make_batch(0), seed=0, kl_coef=0.1))


@pytest.mark.parametrize("reference", [False, True])
def test_log_probs_that_do_not_fit_are_computed_in_halves(checkpoint: Path, reference: bool):
    policy = make_policy(checkpoint, kl_reference="actor", token_budget=1000)
    expected = policy.logprobs(rollout(), reference=reference)
    most = needed(lambda: policy.logprobs(rollout(), reference=reference))
    halves = with_room_for(0.6 * most, lambda: policy.logprobs(rollout(), reference=reference))
    assert policy.memory.count >= 1
    torch.testing.assert_close(halves, expected, rtol=0, atol=1e-5)


def payload(seed: int) -> TrainPayload:
    rng, lengths = np.random.default_rng(seed), np.array(LENGTHS)
    n = (lengths - 1).sum()
    targets = [rng.normal(size=n).astype(np.float32) for _ in range(2)]
    return TrainPayload(rng.integers(1, VOCAB, lengths.sum()), lengths, *targets, np.ones(n, np.float32))


def test_a_critic_update_that_runs_out_of_memory_is_that_of_a_larger_card(tmp_path: Path):
    save_tiny(tmp_path / "critic", "llama", "critic")
    (tmp_path / "version").mkdir()
    save_critic(load_critic(tmp_path / "critic", device="cpu"), tmp_path / "version")
    section = trainer_section(device=DEVICE, warmup_steps=0, token_budget=BUDGET, global_batch_size=4)
    large, small = (CriticUpdate(build_critic(tmp_path / "version", section, seed=0), section) for _ in range(2))
    seen: list[int] = []
    for update in (large, small):
        update.train(payload(0), seen.append)
    reports = []
    most = needed(lambda: reports.append(large.train(payload(1), seen.append)))
    with_room_for(0.75 * most, lambda: reports.append(small.train(payload(1), seen.append)))
    assert reports[1].out_of_memory == small.memory.count >= 1
    assert (reports[1].optimizer_steps, reports[1].skipped_steps) == (2, 0)
    assert reports[1].loss_mean == pytest.approx(reports[0].loss_mean, rel=1e-5)
    assert reports[1].grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-4)
    torch.testing.assert_close(weights_of(small.critic.model), weights_of(large.critic.model), rtol=0, atol=1e-5)
    before = weights_of(small.critic.model)
    with pytest.raises(OutOfMemory, match=r"max_new_tokens or set trainer\.gradient_checkpointing$"):
        with_room_for(1, lambda: small.train(payload(2), seen.append))
    assert torch.equal(weights_of(small.critic.model), before)
    assert all(parameter.grad is None for parameter in small.critic.model.parameters())


# ---- several ranks: one that lacks memory cannot do with less alone ----


def update_with_a_full_card(ranks: Ranks, folder: Path) -> None:
    ranks.announce = lambda *_, **__: None  # type: ignore[method-assign]
    _, update = make(settings_of(folder, "ppo", device="cuda:4"), ranks)
    update.run(batch_of(0), seed=0, kl_coef=0.1)
    if ranks.rank == 1:
        set_limit(5, simcuda.allocated(5) + 1)
    with on_rank(ranks.rank, ranks.device, "actor.policy.token_budget"):
        update.run(batch_of(1), seed=1, kl_coef=0.1)


def test_a_rank_whose_card_is_full_ends_the_update(tmp_path: Path):
    save_tiny(tmp_path / "untied", "llama", "language", vocab_size=200)
    make_tokenizer().save_pretrained(tmp_path / "untied")
    expected = (
        r"rank 1: RankOutOfMemory: rank 1 has run out of the memory of cuda:5 \(CUDA out of memory\); lower "
        r"actor\.policy\.token_budget"
    )
    with pytest.raises(RuntimeError, match=expected):
        on_ranks(2, update_with_a_full_card, tmp_path, device="cuda:4")
