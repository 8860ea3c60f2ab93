"""Updates of policy and critic, and the reference, on simulated cards: how often the host waits, and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_system import make_checkpoint, make_tokenizer
from simulated_cuda.trace import Trace
from tiny_checkpoints import VOCAB, save_tiny
from torch import Tensor, nn

from actor.data.rollout import PPOBatch, Rollout
from actor.generation.shared_prompts import shared_passes
from actor.policy.policy import Policy
from python_backend.models.language_model import load_language_model
from python_backend.models.modeling import load_critic, save_critic
from python_backend.models.output_head import head_logprobs
from python_backend.wire.training_payload import TrainPayload
from tests.support.policy_training import TrainablePolicy, random_batch, rollout_of, trainable_policy, update_of
from tests.support.settings import trainer_section
from trainer.critic_update import CriticUpdate
from trainer.trained_critic import build_critic

LENGTHS, PROMPT = [9, 4, 12, 7, 5, 10], 3
WAITS_OF_A_STEP = 2  # statistics, and the norm of the gradient
WAITS_OF_AN_UPDATE = 1  # a micro-batch whose prompts are shared: transformers looks at their mask; otherwise none
WAITS_OF_A_REFERENCE = 1  # a micro-batch: its log-probs; one more if its prompts are shared
WAITS_OF_A_CRITIC = 1  # a micro-batch: its loss, so that the heartbeat tells how far the card is


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("policy") / "policy", "policy", make_tokenizer(), seed=3)


def make_policy(checkpoint: Path, device: str = "cuda:2", **settings: Any) -> TrainablePolicy:
    section = {"lr": 1e-2, "minibatch_size": len(LENGTHS), "token_budget": 30, "algorithm_name": "grpo"}
    torch.manual_seed(0)
    return trainable_policy(**{**section, "checkpoint": checkpoint, "device": device, **settings})


def make_batch(*, shared: bool = False) -> PPOBatch:
    return random_batch(LENGTHS, prompt=PROMPT, seed=0, shared=shared)


def rollout() -> Rollout:
    return rollout_of(make_batch(), prompt=PROMPT)


def traced(work: Callable[[], Any]) -> Trace:
    work()  # what is copied once, such as the banned tokens
    with Trace() as trace:
        work()
    return trace


def _shares(policy: TrainablePolicy, batch: PPOBatch, rows: list[int]) -> bool:
    lengths = batch.lengths[rows]
    inside = batch.mask[rows, : int(lengths.max()) - 1] != 0
    shares = policy._shares_prompts and shared_passes(batch.tokens[rows, : int(lengths.max())], lengths, inside)
    return bool(shares)


def weights_of(policy: Policy) -> Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in policy.model.parameters() if p.requires_grad])


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "float32", "entropy_bonus": 0.01},
        {"lora_rank": 2, "lora_dropout": 0.1},
        {"gradient_checkpointing": True, "kl_penalty_in": "loss", "entropy_bonus": 0.01},
    ],
)
def test_a_policy_update_waits_for_its_statistics_and_its_norm(checkpoint: Path, settings: dict[str, Any]):
    policy, batch = make_policy(checkpoint, **settings), make_batch()
    micro_batches = len(policy.plan(batch.lengths))
    assert micro_batches == 3
    trace = traced(lambda: update_of(policy).run(batch, seed=0, kl_coef=0.1))
    num_shared = sum(_shares(policy, batch, rows) for rows in policy.plan(batch.lengths))
    assert trace.num_waits <= num_shared * WAITS_OF_AN_UPDATE + WAITS_OF_A_STEP, trace.where
    assert {parameter.device for parameter in policy.model.parameters()} == {torch.device("cuda:2")}


def test_shared_prompts_wait_for_the_inspection_of_masks_alone(checkpoint: Path):
    policy, batch = make_policy(checkpoint, token_budget=1000), make_batch(shared=True)
    trace = traced(lambda: policy.token_logprobs(policy.model, batch.tokens, batch.lengths, batch.mask))
    assert all("transformers" in place or "body(" in place for _, place in trace.where), trace.where
    assert trace.num_waits == 1


def test_the_reference_waits_once_a_micro_batch(checkpoint: Path):
    policy, batch = make_policy(checkpoint, kl_reference="actor"), make_batch()
    plan = policy.plan(batch.lengths)
    num_shared = sum(_shares(policy, batch, rows) for rows in plan)
    trace = traced(lambda: policy.logprobs(rollout(), reference=True))
    assert trace.num_waits <= len(plan) * WAITS_OF_A_REFERENCE + num_shared, trace.where
    served = load_language_model(checkpoint, device="cuda:1", dtype="bfloat16", banned_token_ids=[3, 4])
    rows = [np.arange(5, 5 + n) for n in (4, 7, 1)]
    trace = traced(lambda: served.logprobs(rows))
    assert trace.num_waits <= WAITS_OF_A_REFERENCE, trace.where


def payload() -> TrainPayload:
    rng, lengths = np.random.default_rng(0), np.array([5, 9, 3, 12])
    n = (lengths - 1).sum()
    return TrainPayload(
        tokens=rng.integers(1, VOCAB, lengths.sum()),
        lengths=lengths,
        returns=rng.normal(size=n).astype(np.float32),
        prev_values=np.zeros(n, np.float32),
        mask=np.ones(n, np.float32),
    )


def make_critic(folder: Path, family: str, device: str = "cuda:3", **settings: Any) -> CriticUpdate:
    if not (folder / "version").exists():
        save_tiny(folder / "critic", family, "critic")
        (folder / "version").mkdir()
        save_critic(load_critic(folder / "critic"), folder / "version")
    section = trainer_section(device=device, warmup_steps=0, **settings)
    return CriticUpdate(build_critic(folder / "version", section, seed=0), section)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("qwen2", {"lora_rank": 2}),
        ("gpt2", {"lora_rank": 2, "precision": "float32"}),
        ("bert", {"attention": "eager"}),
        ("llama", {"gradient_checkpointing": True, "attention": "eager", "lora_rank": 2}),
    ],
)
def test_a_critic_update_waits_once_a_micro_batch(family: str, settings: dict[str, Any], tmp_path: Path):
    update = make_critic(tmp_path, family, token_budget=20, **settings)
    done: list[int] = []
    with Trace() as trace:
        report = update.train(payload(), done.append)
    assert np.isfinite(report.loss_mean)
    assert trace.num_waits <= len(done) * WAITS_OF_A_CRITIC + 1, trace.where
    assert {parameter.device for parameter in update.critic.model.parameters()} == {torch.device("cuda:3")}


# ---- results are those of the CPU ----


def test_log_probs_without_masks_are_those_with_masks(checkpoint: Path):
    batch = make_batch()
    found = []
    for device in ("cpu", "cuda:1"):
        policy = make_policy(checkpoint, device, precision="float32")
        assert policy._masks == (device == "cpu")
        seen: list[Any] = []
        body = policy.causal(policy.model).base_model
        body.register_forward_pre_hook(
            lambda _, __, kw, seen=seen: seen.append(kw.get("attention_mask")), with_kwargs=True
        )
        logprobs = policy.token_logprobs(policy.model, batch.tokens, batch.lengths, batch.mask)[0]
        assert all((mask is None) == (device != "cpu") for mask in seen)
        found.append(logprobs.detach().cpu())
        served = load_language_model(checkpoint, device=device)
        rows = [row[:length].numpy() for row, length in zip(batch.tokens, LENGTHS, strict=True)]
        found[-1] = torch.cat([found[-1].flatten(), *map(torch.from_numpy, served.logprobs(rows))])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_a_policy_update_on_a_card_is_that_on_the_cpu(checkpoint: Path, shared: bool):
    found = []
    for device in ("cpu", "cuda:1"):
        policy = make_policy(checkpoint, device, precision="float32", entropy_bonus=0.01, token_budget=40)
        stats = update_of(policy).run(make_batch(shared=shared), seed=0, kl_coef=0.1)
        found.append((stats, weights_of(policy)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-3, abs=1e-5)
    # Adam's first step has the size of the learning rate, 0.01, whatever the gradient: compare its sign, too.
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=2e-3)


@pytest.mark.parametrize("weight_is_rounded", [True, False])
def test_the_output_layer_multiplies_bfloat16_terms_to_a_millionth(weight_is_rounded: bool):
    """Log-probs and entropies to 2e-6 of the largest, gradients to 2e-5: a term more has 8 bits more."""
    torch.manual_seed(0)
    head, hidden, targets = nn.Linear(512, 1000, bias=False), torch.randn(64, 512), torch.randint(0, 1000, (64,))
    if weight_is_rounded:
        head.weight.data = head.weight.data.bfloat16().float()

    def results(device: str) -> list[Tensor]:
        there, on = nn.Linear(512, 1000, bias=False).to(device), hidden.clone().to(device).requires_grad_()
        there.weight = nn.Parameter(head.weight.data.clone().to(device))
        with Trace() as trace:
            found = head_logprobs(
                on, there, targets.to(device), temperature=0.9, banned_token_ids=[3], with_entropy=True
            )
            assert found[1] is not None
            (found[0].sum() + 0.1 * found[1].sum()).backward()
        if device != "cpu":
            assert trace.ops["mm"] == 12  # forward, again in the backward pass, and two gradients, three products each
        assert on.grad is not None
        assert there.weight.grad is not None
        return [each.detach().cpu() for each in (*found, on.grad, there.weight.grad)]

    for ours, exact, bound in zip(results("cuda"), results("cpu"), (2e-6, 2e-6, 2e-5, 2e-5), strict=True):
        assert float((ours - exact).abs().max()) <= bound * float(exact.abs().max())


def test_a_frozen_output_layer_in_bfloat16_takes_one_product_of_bfloat16_hidden_states():
    head = nn.Linear(16, 40, bias=False, dtype=torch.bfloat16, device="cuda")
    hidden, targets = torch.randn(3, 16, device="cuda").bfloat16(), torch.tensor([1, 2, 3], device="cuda")
    with torch.no_grad(), Trace() as trace:
        logprobs, _ = head_logprobs(hidden, head, targets, temperature=1.0)
    assert trace.ops["mm"] == 1
    exact = (hidden.cpu().float() @ head.weight.detach().cpu().float().T).log_softmax(-1)
    torch.testing.assert_close(logprobs.cpu(), exact[torch.arange(3), targets.cpu()], rtol=0, atol=2e-6)
