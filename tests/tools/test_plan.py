"""The dry run: bytes that match real tensors, plans that are refused, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import CONFIGS, POSITIONS, save_tiny

from actor.generation.cache import SlotCache, cache_layers
from python_backend.config import ActorSection, ConfigError, RunConfig, load_config
from tests.support.settings import nested
from tools import run
from tools.plan.command import PlanError, check, dry_run, needs_of, roles_of
from tools.plan.live_bytes import LiveBytes, counting
from tools.plan.models import causal_model, logprobs_of, placed, token_model
from tools.plan.role import GIB, Role, Sizes
from tools.plan.serving import served_role
from tools.plan.traffic import shown, traffic_lines
from tools.plan.training import _moments_8bit, generation_sizes, policy_training, trainer_role

SERVED = {"workers": 1, "token_budget": 16}
ROWS, PROMPT, RESPONSE = 4, 4, 4


def config_of(tmp_path: Path, *, family: str = "llama", **actor: Any) -> RunConfig:
    """Return a run of tiny models; `actor`: its settings, named as in `tests.support.settings`."""
    for kind in ("language", "reward"):
        if not (tmp_path / kind).exists():
            save_tiny(tmp_path / kind, family, kind)
    given = {
        "rollout_size": ROWS,
        "minibatch_size": ROWS,
        "policy_token_budget": 16,
        "prompts_max_tokens": PROMPT,
        "max_new_tokens": RESPONSE,
        "policy_checkpoint": tmp_path / "language",
        "generation_batch_size": ROWS,
        **actor,
    }
    sections = {
        "run": {"dir": tmp_path / "run"},
        "reward": {"checkpoint": tmp_path / "reward", **SERVED},
        "critic": {"checkpoint": tmp_path / "reward", **SERVED},
        "trainer": {"token_budget": 16},
        "actor": nested(ActorSection, given),
    }
    (tmp_path / "run.yaml").write_text(json.dumps(sections, default=str))
    return load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_live_bytes_are_those_of_real_tensors(tmp_path: Path, family: str):
    save_tiny(tmp_path, family, "language")
    ids = torch.zeros(2, 8, dtype=torch.int64)

    def peak(live: LiveBytes) -> int:
        model = placed(causal_model(tmp_path))
        live.reset()
        before = live.live
        logprobs_of(model, torch.zeros_like(ids), 4, "float32").sum().backward()
        assert live.live - before >= sum(p.nbytes for p in model.parameters())  # the gradients
        return live.peak - before

    with LiveBytes() as live:
        real = peak(live)
    with counting() as live:
        planned = peak(live)
    # Without values, transformers builds the attention mask that it would leave out for rows without padding.
    assert real <= planned <= 1.1 * real


def test_training_needs_weights_gradients_and_moments(tmp_path: Path):
    config = config_of(tmp_path)
    role, parameters = (
        policy_training(config.actor),
        sum(p.numel() for p in save_tiny(tmp_path / "x", "llama", "language").parameters()),
    )
    assert (role.parameters, role.trained) == (parameters, parameters)
    assert role.sizes.gradients == 4 * parameters
    assert 4 * parameters <= role.sizes.weights <= 4 * parameters + 64  # and rotary frequencies
    assert 8 * parameters <= role.sizes.optimizer <= 8 * parameters + 4 * 64  # and a step count for each tensor
    assert role.sizes.activations > 0


def test_the_cache_is_the_slot_decoders(tmp_path: Path):
    config = config_of(tmp_path, family="qwen2")
    model = save_tiny(tmp_path / "x", "qwen2", "language")
    span = PROMPT + RESPONSE
    cache = SlotCache(ROWS, span + span // 2, cache_layers(model))
    cache.look_at(0, 1, 0, 0)
    ids = torch.zeros(1, PROMPT, dtype=torch.int64)
    model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True)
    real = sum(tensor.nbytes for layer in cache.layers for tensor in layer.tensors())
    assert generation_sizes(config.actor)[0].cache == real == 2 * 2 * 4 * ROWS * (span + span // 2) * 8


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({}, 1),
        ({"one_step_off_policy": True}, 2),
        ({"lora_rank": 2}, 0),
        ({"kl_coef": 0.0}, 0),
        ({"kl_reference": "triton"}, 0),
    ],
)
def test_copies_of_the_policy(tmp_path: Path, settings: dict[str, Any], copies: int):
    sizes = roles_of(config_of(tmp_path, **settings))["actor"].sizes
    assert sizes.copies == pytest.approx(copies * sizes.weights, abs=64)


def test_settings_that_save_memory_do(tmp_path: Path):
    def sizes(**settings: Any) -> Sizes:
        return policy_training(config_of(tmp_path, **settings).actor).sizes

    plain, lora = sizes(), sizes(lora_rank=1)
    assert lora.optimizer < plain.optimizer / 2
    assert lora.gradients < plain.gradients / 2
    assert sizes(lora_rank=1, precision="bfloat16").weights < lora.weights
    assert sizes(policy_gradient_checkpointing=True).activations < plain.activations
    assert sizes(policy_token_budget=8).activations < plain.activations


def test_a_live_reward_model_holds_the_next_version_beside_the_served_one(tmp_path: Path):
    config = config_of(tmp_path)
    live = config.model_copy(update={"reward": config.reward.model_copy(update={"store": True})})
    assert served_role(config, "reward").sizes.copies == 0
    sizes = served_role(live, "reward").sizes
    assert sizes.copies == sizes.weights > 0


def test_settings_that_save_memory_of_the_critic_do(tmp_path: Path):
    config = config_of(tmp_path)

    def sizes(**settings: Any) -> Sizes:
        trainer = config.trainer.model_copy(update=settings)
        return trainer_role(config.model_copy(update={"trainer": trainer})).sizes

    plain, lora = sizes(), sizes(lora_rank=1)
    assert lora.optimizer < plain.optimizer / 2
    assert lora.gradients < plain.gradients / 2
    assert sizes(lora_rank=1, precision="bfloat16").weights < lora.weights
    ranks = sizes(lora_rank=1, ranks=2)
    parts = (lora.weights, lora.gradients, lora.optimizer)
    assert (ranks.weights, ranks.gradients, ranks.optimizer) == tuple(pytest.approx(part / 2, abs=1) for part in parts)
    assert ranks.activations > lora.activations  # the layers that are gathered at the same time
    assert sizes(gradient_checkpointing=True).activations < plain.activations
    small = config.trainer.optimizer.model_copy(update={"kind": "adamw_8bit"})
    assert sizes(optimizer=small).optimizer <= plain.optimizer


def test_ranks_with_adapters_exchange_only_their_gradients(tmp_path: Path):
    config = config_of(tmp_path)
    trainer = config.trainer.model_copy(update={"lora_rank": 1, "ranks": 2})
    roles = roles_of(config := config.model_copy(update={"trainer": trainer}))
    sizes = roles["trainer"].sizes
    each = shown(2 * sizes.weights + sizes.gradients)
    assert f"each micro-batch, trainer: {each} per rank" in traffic_lines(config, roles)[-1]


def test_served_rows_end_at_the_positions_of_the_model(tmp_path: Path):
    roles = roles_of(config_of(tmp_path, prompts_max_tokens=POSITIONS))
    assert f"forward passes of 1 rows x {POSITIONS} tokens" in roles["critic"].notes[0]


def test_moments_of_8_bits():
    assert _moments_8bit(4095) == 8 * 4095  # small tensors keep moments of 32 bits
    assert _moments_8bit(4096) == 2 * (4096 + 16 * 4)  # and a scale for each block of 256


def test_tensor_parallelism_splits_layers_only(tmp_path: Path):
    config = config_of(tmp_path)
    model = token_model(tmp_path / "reward")
    layers = 4 * sum(p.numel() for name, p in model.named_parameters() if "_proj" in name)
    split = config.reward.model_copy(update={"tensor_parallel": 2})
    whole, half = (
        served_role(config.model_copy(update={"reward": section}), "reward").sizes.weights
        for section in (config.reward, split)
    )
    assert layers > 0
    assert whole - half == layers // 2


@pytest.mark.parametrize("family", sorted({*CONFIGS} - {"bert", "deberta-v3"}))
def test_every_role_is_planned(tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]):
    dry_run(config_of(tmp_path, family=family, kl_reference="triton"), device_gib=None, host_gib=64)
    out = capsys.readouterr().out
    for word in ("actor", "trainer", "reward", "critic", "reference", "KV cache", "each publish", "ports", "cpu: "):
        assert word in out


def test_a_missing_checkpoint_is_named(tmp_path: Path):
    config = config_of(tmp_path, policy_checkpoint=tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"actor: .*absent has no config.json"):
        roles_of(config)


def test_a_plan_that_does_not_fit_is_refused_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = config_of(tmp_path)
    assert run.main(["--config", str(tmp_path / "run.yaml"), "--dry-run", "--host-gib", "0.0001"]) == 1
    error = capsys.readouterr().err
    assert "cpu needs" in error
    assert "of 105 KiB" in error
    assert "change actor." in error
    assert not config.run.dir.exists()


def test_the_message_names_device_role_and_setting():
    roles = {
        "actor": Role("actor", Sizes(weights=30 * GIB, optimizer=60 * GIB), devices=("cuda:0",)),
        "reward": Role("reward", Sizes(weights=15 * GIB), devices=("cuda:0",)),
    }
    needs = needs_of(roles.values(), GIB)
    assert needs["cpu"] == {"processes": 2 * GIB}
    parts = "actor 90 GiB, reward 15 GiB, fragmentation 5.25 GiB, contexts 1.2 GiB"
    with pytest.raises(PlanError, match=rf"cuda:0 needs 111 GiB of 80 GiB: {parts}; .*actor.ranks"):
        check(needs, {"cpu": 4 * GIB, "cuda:0": 80 * GIB}, roles)
    check(needs, {"cpu": 4 * GIB, "cuda:0": 112 * GIB}, roles)


def test_a_gpu_that_is_not_here_needs_a_size(tmp_path: Path):
    config = config_of(tmp_path, policy_device="cuda:77")
    with pytest.raises(PlanError, match="cuda:77 is not on this machine; --device-gib"):
        dry_run(config, device_gib=None, host_gib=64, say=lambda line: None)
    dry_run(config, device_gib=80, host_gib=64, say=lambda line: None)
