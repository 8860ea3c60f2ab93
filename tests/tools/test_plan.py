"""The dry run: bytes that match real tensors, what each device of each node holds, and plans that are refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import POSITIONS, save_tiny

from actor.generation.cache import SlotCache, cache_layers
from python_backend.config import ActorSection, ConfigError, RunConfig, load_config
from tests.support.settings import nested
from tools import run
from tools.plan.command import PlanError, check, dry_run, needs_of, roles_of, shown, traffic_lines
from tools.plan.models import LiveBytes, causal_model, counting, logprobs_of, placed, token_model
from tools.plan.roles import (
    CONTEXT,
    FRAGMENTATION,
    GIB,
    NCCL_BUFFERS,
    Role,
    Sizes,
    _moments_8bit,
    generation_sizes,
    policy_role,
    policy_training,
    served_role,
    trainer_role,
)

pytestmark = pytest.mark.slow
ROWS, PROMPT, RESPONSE = 4, 4, 4
SERVERS = 'actor.client.servers=["host:8000"]'
ON_GPUS = [f"{key}.device=cuda" for key in ("reward", "critic", "actor.policy", "trainer")]


def config_of(tmp_path: Path, *overrides: str, family: str = "llama", **actor: Any) -> RunConfig:
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
        "policy_model": tmp_path / "language",
        "generation_batch_size": ROWS,
        **actor,
    }
    served = {"model": tmp_path / "reward", "workers": 1, "token_budget": 16}
    sections = {
        "run": {"dir": tmp_path / "run"},
        "reward": served,
        "critic": served,
        "trainer": {"token_budget": 16},
        "actor": nested(ActorSection, given),
    }
    (tmp_path / "run.yaml").write_text(json.dumps(sections, default=str))
    return load_config(tmp_path / "run.yaml", overrides)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
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
    parameters = sum(p.numel() for p in save_tiny(tmp_path / "x", "llama", "language").parameters())
    role = policy_training(config)
    assert (role.parameters, role.trained) == (parameters, parameters)
    assert role.sizes.gradients == 4 * parameters
    assert 4 * parameters <= role.sizes.weights <= 4 * parameters + 64  # and rotary frequencies
    assert 8 * parameters <= role.sizes.optimizer <= 8 * parameters + 4 * 64  # and a step count for each tensor
    one_pass = policy_training(config_of(tmp_path, minibatch_size=ROWS // 2))
    assert role.notes == one_pass.notes
    assert role.sizes.activations > one_pass.sizes.activations > 0  # two: the first one's gradients are there
    assert _moments_8bit(4095) == 8 * 4095  # small tensors keep moments of 32 bits
    assert _moments_8bit(4096) == 2 * (4096 + 16 * 4)  # and a scale for each block of 256


def test_the_cache_is_the_slot_decoders(tmp_path: Path):
    config = config_of(tmp_path, family="qwen2")
    model = save_tiny(tmp_path / "x", "qwen2", "language")
    span = PROMPT + RESPONSE
    cache = SlotCache(ROWS, span + span // 2, cache_layers(model))
    cache.look_at(0, 1, 0, 0)
    ids = torch.zeros(1, PROMPT, dtype=torch.int64)
    model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True)
    real = sum(tensor.nbytes for layer in cache.layers for tensor in layer.tensors())
    assert generation_sizes(config)[0].cache == real == 2 * 2 * 4 * ROWS * (span + span // 2) * 8


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
    sizes = policy_role(config_of(tmp_path, **settings)).sizes
    assert sizes.copies == pytest.approx(copies * sizes.weights, abs=64)


@pytest.mark.parametrize("of", ["policy", "critic"])
def test_settings_that_save_memory_do(tmp_path: Path, of: str):
    def sizes(**settings: Any) -> Sizes:
        if of == "policy":
            return policy_training(config_of(tmp_path, **settings)).sizes
        trainer = config.trainer.model_copy(update=settings)
        return trainer_role(config.model_copy(update={"trainer": trainer})).sizes

    config = config_of(tmp_path)
    key = "policy_gradient_checkpointing" if of == "policy" else "gradient_checkpointing"
    plain, lora = sizes(), sizes(lora_rank=1)
    assert lora.optimizer < plain.optimizer / 2
    assert lora.gradients < plain.gradients / 2
    assert sizes(lora_rank=1, precision="bfloat16").weights < lora.weights
    assert sizes(**{key: True}).activations < plain.activations
    if of == "policy":
        assert sizes(policy_token_budget=8).activations < plain.activations
        return
    ranks = sizes(lora_rank=1, ranks=2)
    parts = (lora.weights, lora.gradients, lora.optimizer)
    assert (ranks.weights, ranks.gradients, ranks.optimizer) == tuple(pytest.approx(part / 2, abs=1) for part in parts)
    assert ranks.activations > lora.activations  # the layers that are gathered at the same time


def test_served_models_and_their_ranks(tmp_path: Path):
    """Split layers, the next version of a live reward model, the longest rows, and what ranks exchange."""

    def served(**reward: Any) -> Sizes:
        section = config.reward.model_copy(update=reward)
        return served_role(config.model_copy(update={"reward": section}), "reward").sizes

    config = config_of(tmp_path, "trainer.lora_rank=1", "trainer.ranks=2", prompts_max_tokens=POSITIONS)
    layers = 4 * sum(p.numel() for name, p in token_model(tmp_path / "reward").named_parameters() if "_proj" in name)
    assert served().weights - served(tensor_parallel=2).weights == layers // 2 > 0
    assert served().copies == 0
    assert served(store=True).copies == served().weights > 0
    roles = roles_of(config)
    assert f"forward passes of 1 rows x {POSITIONS} tokens" in roles["critic"].notes[0]
    sizes = roles["trainer"].sizes
    each = shown(2 * sizes.weights + sizes.gradients)
    assert f"each micro-batch, trainer: {each} per rank" in traffic_lines(config, roles)[-1]


def test_conversations_with_an_environment_are_planned_at_their_longest(tmp_path: Path):
    environment = ("environment.class=game.py:Game", "environment.max_tokens=24", "environment.max_turns=3")
    long, plain = (
        config_of(tmp_path, "rewards={model: {}}", "reward.max_length=64", *more, kl_reference="triton")
        for more in (environment, ())
    )
    roles, short = roles_of(long), roles_of(plain)
    for key in ("actor", "trainer", "reward", "critic", "reference"):
        assert "rows x 24 tokens" in roles[key].notes[0]
        assert f"rows x {PROMPT + RESPONSE} tokens" in short[key].notes[0]
    assert roles["actor"].sizes.cache == 3 * short["actor"].sizes.cache
    assert long.environment is not None
    one_turn = long.environment.model_copy(update={"max_turns": 1})
    updates = [policy_training(each).sizes for each in (long, long.model_copy(update={"environment": one_turn}))]
    assert updates[0].activations > updates[1].activations  # log-probs of 12 tokens instead of 4
    assert f"each step, network: {shown(2 * ROWS * 24 * 8)} of requests" in traffic_lines(long, roles)[0]


@pytest.mark.parametrize(
    ("processes", "integrity", "words"),
    [
        (1, "xxh3", "3.0 s of hashing (xxh3)"),
        (1, "sha256", "60.8 s of"),
        (4, "sha256", "7.6 s of"),
        (4, "xxh3", "0.4 s"),
    ],
)
def test_the_time_of_hashing_a_version_is_that_in_docs_scaling(
    tmp_path: Path, processes: int, integrity: str, words: str
):
    config = config_of(tmp_path, f"run.integrity={integrity}")
    roles = roles_of(config)
    roles["trainer"] = dataclasses.replace(roles["trainer"], parameters=7_600_000_000, processes=processes)
    assert words in next(line for line in traffic_lines(config, roles) if line.startswith("each publish"))


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_every_role_of_every_family_is_planned(tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]):
    dry_run(config_of(tmp_path, family=family, kl_reference="triton"), device_gib=None, host_gib=64)
    out = capsys.readouterr().out
    for word in ("actor", "trainer", "reward", "critic", "reference", "KV cache", "each publish", "ports", "cpu: "):
        assert word in out


# ---- on GPUs ----


def test_contexts_buffers_and_fragmentation_are_counted_and_the_refusal_names_device_role_and_setting():
    roles = {
        "actor": Role("actor", Sizes(weights=100 * GIB), devices=("cuda:0", "cuda:1"), processes=2, has_group=True),
        "reward": Role("reward", Sizes(weights=GIB), devices=("cuda:1",), contexts=2),
    }
    needs = needs_of(roles.values(), interpreter=7)
    assert needs["cpu"] == {"processes": 3 * 7}
    fragments = int(100 * GIB * FRAGMENTATION)
    assert needs["cuda:0"] == {"actor": 100 * GIB, "contexts": CONTEXT + NCCL_BUFFERS, "fragmentation": fragments}
    assert needs["cuda:1"]["contexts"] == 3 * CONTEXT + NCCL_BUFFERS
    room = {"cpu": 4 * GIB, "cuda:0": 112 * GIB, "cuda:1": 112 * GIB}
    check(needs, room, roles)
    with pytest.raises(
        PlanError, match=r"cuda:1 needs \d+ GiB of 80 GiB: actor 100 GiB, .*reward 1 GiB.*; .*actor.ranks"
    ):
        check(needs, room | {"cuda:1": 80 * GIB}, roles)


def test_a_model_served_on_every_gpu_has_a_copy_on_each_and_tensor_parallel_ranks_have_buffers(tmp_path: Path):
    roles = roles_of(config_of(tmp_path, *ON_GPUS, "reward.device=cuda:1"), num_devices=4)
    assert roles["critic"].devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert (roles["critic"].processes, roles["reward"].devices) == (4, ("cuda:1",))
    assert not roles["critic"].has_group  # independent copies exchange nothing
    needs = needs_of(roles.values(), interpreter=0)
    copies = {device: parts["critic"] for device, parts in needs.items() if device != "cpu"}
    assert copies == dict.fromkeys(roles["critic"].devices, roles["critic"].sizes.total)
    assert needs["cuda:3"]["contexts"] == 2 * CONTEXT  # the critic's process and tritonserver
    assert needs["cuda:1"]["contexts"] == 3 * CONTEXT
    overrides = ("critic.device=cuda:1", "critic.tensor_parallel=2", "run.share_cards=true")
    role = roles_of(config_of(tmp_path, *ON_GPUS, *overrides), num_devices=4)["critic"]
    assert (role.devices, role.has_group) == (("cuda:1", "cuda:2"), True)


@pytest.mark.parametrize(
    ("overrides", "copies", "contexts"),
    [
        ((), 1, 1),  # reload_on_save: none, the default on a GPU
        (("trainer.reload_on_save=triton",), 2, 2),
        (("critic.reload=triton",), 1, 2),
    ],
)
def test_copies_of_the_critic_while_a_version_is_loaded(
    tmp_path: Path, overrides: tuple[str, ...], copies: int, contexts: int
):
    role = served_role(config_of(tmp_path, *ON_GPUS, *overrides), "critic")
    assert (role.sizes.copies, role.contexts) == (copies * role.sizes.weights, contexts)
    assert any("third copy" in note for note in role.notes) == (copies == 2)


def test_named_servers_and_ranks_are_on_nodes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = config_of(tmp_path, *ON_GPUS, "actor.ranks=16", "trainer.ranks=4", SERVERS, rollout_size=16)
    roles = roles_of(config, num_devices=8)
    assert (roles["actor"].nodes, len(roles["actor"].devices), roles["actor"].node) == (2, 8, "actor")
    assert (roles["trainer"].nodes, len(roles["trainer"].devices), roles["reward"].node) == (1, 4, "server")
    needs = needs_of(roles.values(), interpreter=1)
    assert set(needs["actor cuda:7"]) == {"actor", "contexts", "fragmentation"}
    assert (needs["actor cpu"]["processes"], needs["trainer cpu"]["processes"]) == (8, 4)
    dry_run(config, num_devices=8, device_gib=80, host_gib=64)
    out = capsys.readouterr().out
    assert "actor cuda:0-7: " in out
    assert out.count("of 80 GiB each") == 3
    together, apart = (
        needs_of(roles_of(config_of(tmp_path, *ON_GPUS, *overrides)).values(), interpreter=0)
        for overrides in ((), (SERVERS,))
    )
    assert set(together) == {"cpu", "cuda:0"}
    assert {device.partition(" ")[0] for device in apart} == {"server", "trainer", "actor"}


def test_vllm_names_its_gpus_and_is_planned(tmp_path: Path):
    engine = "actor.generation.engine=vllm"
    unset = r"actor\.generation\.vllm\.cuda_devices is not set, .* most of the first GPU"
    with pytest.raises(ConfigError, match=unset):
        config_of(tmp_path, *ON_GPUS, engine)
    config_of(tmp_path, *ON_GPUS, engine, 'actor.generation.vllm.servers=["host:8000"]')  # not ours to place
    own: dict[str, Any] = {"num_devices": 2, "device_gib": 10, "host_gib": 64, "say": lambda line: None}
    apart = ("reward.device=cuda:0", "critic.device=cuda:0", 'actor.generation.vllm.cuda_devices="1"')
    dry_run(config_of(tmp_path, *ON_GPUS, engine, *apart), **own)
    same = (*ON_GPUS, engine, 'actor.generation.vllm.cuda_devices="0"')
    refusal = r"cuda:0 needs .* of 10 GiB: vLLM 9 GiB, .*; .* of vLLM: change .*cuda_devices"
    with pytest.raises(PlanError, match=refusal):
        dry_run(config_of(tmp_path, *same), **own)
    half = 'actor.generation.vllm.arguments=[--gpu-memory-utilization, "0.5"]'
    dry_run(config_of(tmp_path, *same, half), **own)


def test_plans_that_cannot_be_made_or_do_not_fit_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for error, sentence, overrides, num_devices in (
        (ConfigError, r"actor: .*absent has no config.json", [f"actor.policy.model={tmp_path}/absent"], None),
        (PlanError, "cuda:77 is not on this machine; --device-gib", ["actor.policy.device=cuda:77"], None),
        (PlanError, "cuda:4 is not on a machine with 4 GPUs", ["reward.device=cuda:4"], 4),
    ):
        with pytest.raises(error, match=sentence):
            dry_run(config_of(tmp_path, *overrides), num_devices=num_devices, device_gib=num_devices, host_gib=64)
    dry_run(config_of(tmp_path, "actor.policy.device=cuda:77"), device_gib=80, host_gib=64)
    capsys.readouterr()
    assert run.main(["--config", str(tmp_path / "run.yaml"), "--dry-run", "--host-gib", "0.0001"]) == 1
    error = capsys.readouterr().err
    for part in ("cpu needs", "of 105 KiB", "change actor."):
        assert part in error
    assert not (tmp_path / "run").exists()
