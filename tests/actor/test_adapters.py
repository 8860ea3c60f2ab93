"""LoRA: adapters alone are trained, the reference is the policy without them, what is saved is an ordinary model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_system import make_checkpoint, make_tokenizer
from policy_training import load_checkpoint, states, train

from actor.algorithms.advantages import response_mask
from actor.data.rollout import PPOBatch, Prompt, Rollout
from actor.policy.checkpoint import save_checkpoint
from actor.policy.policy import Policy
from python_backend.checkpoints.inspection import CheckpointError
from python_backend.config import RunConfig
from python_backend.models.adapters import Lora, MergedWeights, trained_tensors, with_adapters, with_merged_layers
from tests.support.policy_training import trainable_policy, update_of
from tests.support.tiny_checkpoints import save_tiny

PROMPTS = [Prompt("0", "", np.asarray([5, 6, 7])), Prompt("1", "", np.asarray([8, 9]))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("policy") / "policy", "policy", make_tokenizer(), seed=3)


def make_policy(checkpoint: Path, **settings: Any) -> Policy:
    return trainable_policy(**{"checkpoint": checkpoint, "max_new_tokens": 8, "lr": 1e-2, "lora_rank": 4, **settings})


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


@pytest.mark.parametrize(
    ("saved", "settings", "message"),
    [
        ({}, {"lora_rank": 2}, "do not match actor.policy.lora_rank and actor.policy.lora_targets"),
        ({}, {"lora_targets": ("q_proj",)}, "do not match actor.policy.lora_rank and actor.policy.lora_targets"),
        ({}, {"lora_alpha": 8}, "was saved with actor.policy.lora_alpha 16, not 8; restore it"),
        ({}, {"lora_rank": 0}, "was saved by a run that trained adapters, but actor.policy.lora_rank is 0; restore it"),
        ({"lora_rank": 0}, {}, "a full policy without adapters, but actor.policy.lora_rank is 4"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(
    checkpoint: Path, tmp_path: Path, saved: dict[str, Any], settings: dict[str, Any], message: str
):
    save_checkpoint(tmp_path, states(make_policy(checkpoint, **saved)), {"step": 1}, keep=1)
    policy = make_policy(checkpoint, **settings)
    before = [p.detach().clone() for p in policy.model.parameters()]
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path, 1, states(policy))
    assert all(torch.equal(a, b) for a, b in zip(policy.model.parameters(), before, strict=True))


# ---- which layers ----


def adapted(policy: Policy) -> set[str]:
    """Paths of the layers with adapters."""
    return {name.split(".lora_")[0].removeprefix("base_model.model.") for name in trained_tensors(policy.model)}


def test_named_layers_alone_get_adapters(checkpoint: Path):
    both = {f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in ("q_proj", "v_proj")}
    assert adapted(make_policy(checkpoint, lora_targets=("q_proj", "v_proj"))) == both
    assert adapted(make_policy(checkpoint, lora_targets=("layers.1.self_attn.q_proj",))) == {
        "model.layers.1.self_attn.q_proj"
    }
    assert len(adapted(make_policy(checkpoint))) == 14  # all-linear: seven in each of two layers, not the output


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("q_porj", " (did you mean q_proj?); choose from"),
        ("lm_head", "adapters; choose from"),
        ("proj", "; "),
        ("input_layernorm", "; "),
    ],
)
def test_a_name_that_no_linear_layer_has(checkpoint: Path, target: str, hint: str):
    """Also of a layer that exists but takes none, and of one beside a name that is right."""
    with pytest.raises(CheckpointError) as caught:
        make_policy(checkpoint, lora_targets=("v_proj", target))
    message = str(caught.value)
    assert message.startswith(f"actor.policy.lora_targets: '{target}' matches no linear layer of {checkpoint}")
    assert hint in message
    assert message.endswith("choose from down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj")


def test_lora_settings_without_lora_are_refused():
    with pytest.raises(ValueError, match=r"actor.policy.lora_dropout \(0.1\) need actor.policy.lora_rank above 0"):
        RunConfig.model_validate({"actor": {"policy": {"lora_dropout": 0.1}}})


# ---- dropout ----


def test_dropout_is_active_in_updates_alone(checkpoint: Path):
    """Generation and log-probs have the bits of a policy without it; the same seed drops the same, another one not."""
    plain = trained_policy(checkpoint)
    rollout = plain.generate(PROMPTS, seed=1)
    dropping = [trained_policy(checkpoint, lora_dropout=0.5) for _ in range(3)]
    for policy in dropping:
        assert torch.equal(policy.generate(PROMPTS, seed=1).tokens, rollout.tokens)
        assert torch.equal(policy.logprobs(rollout), plain.logprobs(rollout))
    norms = [update(policy, rollout, seed=seed) for policy, seed in zip(dropping, (1, 1, 2), strict=True)]
    assert norms[0] == norms[1] != norms[2]
    assert update(plain, rollout, seed=1) not in norms
    assert torch.equal(dropping[0].logprobs(rollout), dropping[1].logprobs(rollout))
    again = trained_policy(checkpoint, lora_dropout=0.5, gradient_checkpointing=True)  # recomputed with the same draws
    assert update(again, rollout, seed=1) == pytest.approx(norms[0], rel=1e-5)


def trained_policy(checkpoint: Path, **settings: Any) -> Policy:
    """With adapters that add something: new ones add 0 whatever is dropped."""
    torch.manual_seed(0)
    policy = make_policy(checkpoint, **settings)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return policy


def update(policy: Policy, rollout: Rollout, *, seed: int) -> float:
    """One update in which every response is as good as the other; its gradient's norm."""
    mask = response_mask(rollout.prompt_lengths, rollout.lengths, rollout.tokens.shape[1])
    logprobs, zeros = policy.logprobs(rollout), torch.zeros_like(mask)
    batch = PPOBatch(rollout.tokens, rollout.lengths, mask, mask, logprobs, logprobs, mask, zeros, zeros, zeros)
    stats = update_of(policy).run(batch, seed=seed, kl_coef=0.0)
    return stats["train_optim/grad_norm"]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layers_are_merged_within_a_block_only(family: str, tmp_path: Path):
    """GPT-2's layers hold their weights transposed."""
    model = save_tiny(tmp_path / "model", family, "language").eval()
    wrapper = with_adapters(model, Lora("actor.policy", 4, 8, "all-linear"), model.get_output_embeddings())
    with torch.no_grad():
        for name, parameter in wrapper.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    ids, adapted = torch.arange(12)[None], MergedWeights(model).adapted
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in wrapper.state_dict().items()}
    with torch.no_grad():
        apart = model(ids).logits
        with wrapper.disable_adapter():
            assert not torch.allclose(model(ids).logits, apart, atol=0.1)
        with contextlib.suppress(KeyError), with_merged_layers(model):
            torch.testing.assert_close(model(ids).logits, apart, atol=1e-4, rtol=1e-4)
            assert all(layer.merged for layer in adapted.values())
            raise KeyError
        assert torch.equal(model(ids).logits, apart)
    for name, tensor in wrapper.state_dict().items():
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1])
