"""LoRA: adapters alone are trained, the reference is the policy without them, what is saved is an ordinary model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_system import make_checkpoint, make_tokenizer
from transformers import AutoModelForCausalLM

from actor.checkpoint import RunState, load_checkpoint, save_checkpoint
from actor.kl_control import KLControl
from actor.policy import Policy
from actor.reward_shaping import RewardShaper
from actor.rollout import Prompt, Rollout
from python_backend.config import ActorSection

PROMPTS = [Prompt("0", "", np.asarray([5, 6, 7])), Prompt("1", "", np.asarray([8, 9]))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("policy") / "policy", "policy", make_tokenizer(), seed=3)


def make_policy(checkpoint: Path, **settings: Any) -> Policy:
    return Policy(checkpoint, ActorSection(**{"max_new_tokens": 8, "lr": 1e-2, "lora_rank": 4, **settings}))


def train(policy: Policy, rollout: Rollout) -> None:
    """A step towards what the rollout holds."""
    everywhere = torch.ones_like(rollout.tokens[:, 1:])
    logprobs, _ = policy.token_logprobs(policy.model, rollout.tokens, rollout.lengths, everywhere)
    (-logprobs.clamp(min=-50).mean()).backward()
    policy.optimizer.step()
    policy.optimizer.zero_grad()
    policy.optimizer_step += 1


def states(policy: Policy) -> RunState:
    return RunState(policy, RewardShaper(policy.settings), KLControl(0.1, target=None, horizon=1))


def test_a_new_policy_is_its_reference(checkpoint: Path):
    policy, full = make_policy(checkpoint), make_policy(checkpoint, lora_rank=0)
    rollout = policy.generate(PROMPTS, seed=1)
    assert policy.reference is None
    assert torch.equal(rollout.tokens, full.generate(PROMPTS, seed=1).tokens)
    torch.testing.assert_close(policy.logprobs(rollout), full.logprobs(rollout))
    torch.testing.assert_close(policy.logprobs(rollout, reference=True), full.logprobs(rollout))


def test_adapters_alone_are_trained(checkpoint: Path):
    policy = make_policy(checkpoint)
    names = [name for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
    assert names
    assert all("lora_" in name for name in names)
    assert sum(len(group["params"]) for group in policy.optimizer.param_groups) == len(names)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    rollout = policy.generate(PROMPTS, seed=1)
    reference = policy.logprobs(rollout, reference=True)
    for _ in range(3):
        train(policy, rollout)
    changed = [name for name, p in policy.model.named_parameters() if not torch.equal(p, before[name])]
    assert set(changed) <= set(names)
    assert changed
    assert torch.equal(policy.logprobs(rollout, reference=True), reference)  # it stays where it was
    assert not torch.allclose(policy.logprobs(rollout), reference)


def test_what_is_saved_is_an_ordinary_model(checkpoint: Path, tmp_path: Path):
    policy = make_policy(checkpoint)
    rollout = policy.generate(PROMPTS, seed=1)
    for _ in range(3):
        train(policy, rollout)
    policy.save(tmp_path / "policy")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    row = rollout.rows()[0][None]
    with torch.no_grad():
        expected = policy.model(torch.from_numpy(row)).logits
        torch.testing.assert_close(saved(torch.from_numpy(row)).logits, expected, atol=1e-5, rtol=1e-5)
    assert any("lora_" in name for name, _ in policy.model.named_parameters())  # the policy itself keeps its adapters


def test_a_resumed_policy_goes_on_where_it_was(checkpoint: Path, tmp_path: Path):
    one, other = make_policy(checkpoint), make_policy(checkpoint)
    rollout = one.generate(PROMPTS, seed=1)
    train(one, rollout)
    save_checkpoint(tmp_path, states(one), {"step": 1}, keep=1)
    load_checkpoint(tmp_path, 1, states(other))
    for policy in (one, other):
        train(policy, rollout)
    assert torch.equal(one.logprobs(rollout), other.logprobs(rollout))
    wrong = make_policy(checkpoint, lora_rank=4)
    wrong.model.base_model.model.lm_head.requires_grad_(True)
    with pytest.raises(ValueError, match="the adapters differ from the policy's"):
        load_checkpoint(tmp_path, 1, states(wrong))
