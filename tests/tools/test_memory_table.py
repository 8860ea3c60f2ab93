"""The table of `--dry-run`: bytes of real models, adapters, ranks and caches, and what does not fit."""

import json
import re

import pytest
import torch
from settings import nested
from tiny_checkpoints import save_tiny

from rlhf_triton.actor.generation.cache import SlotCache, cache_layers
from rlhf_triton.config.actor import ActorSection
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.run_config import ConfigError
from rlhf_triton.models.modeling import load_reward
from rlhf_triton.tools import memory_table, run, serve
from rlhf_triton.tools.memory_table import COLUMNS, Held, _roles, memory_lines, model_bytes, token_model

ROWS = 4
PROMPT = 4
RESPONSE = 4
WITHOUT_EFFECT = "settings without effect in this run: actor.policy.lora_alpha (actor.policy.lora_rank is 0)"
ON_GPUS = [f"{key}.device=cuda" for key in ("reward", "critic", "actor.policy", "trainer")]


def config_of(tmp_path, *overrides, family="llama", **actor):
    """Return a run of tiny models; `actor`: its settings, named as in `settings`."""
    for kind in ("language", "reward"):
        if not (tmp_path / kind).exists():
            save_tiny(tmp_path / kind, family, kind)
    given = {
        "rollout_size": ROWS,
        "minibatch_size": ROWS,
        "prompts_max_tokens": PROMPT,
        "max_new_tokens": RESPONSE,
        "policy_model": tmp_path / "language",
        "generation_batch_size": ROWS,
        **actor,
    }
    sections = {
        "run": {"dir": tmp_path / "run"},
        "reward": {"model": tmp_path / "reward"},
        "critic": {"model": tmp_path / "reward"},
        "actor": nested(ActorSection, given),
    }
    (tmp_path / "run.yaml").write_text(json.dumps(sections, default=str))
    return load_config(tmp_path / "run.yaml", overrides)


def held(tmp_path, *overrides, **actor):
    return dict(_roles(config_of(tmp_path, *overrides, **actor), served_only=False))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_memory_table_matches_the_bytes_of_real_models(tmp_path, family):
    roles = held(tmp_path, family=family, kl_reference="triton")
    policy = save_tiny(tmp_path / "again", family, "language")
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    actor = roles["actor"]
    assert actor.weights == roles["reference"].weights == model_bytes(policy)
    assert actor.gradients == 4 * parameters
    assert actor.moments == 8 * parameters
    critic = roles["critic"]
    reward = load_reward(tmp_path / "reward").model
    assert critic.weights == critic.copies == roles["reward"].weights == model_bytes(reward)
    assert roles["reward"].copies == actor.copies == 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_memory_table_cache_matches_the_slot_decoders(tmp_path, precision):
    def real(span):
        model = save_tiny(tmp_path / "again", "qwen2", "language").to(getattr(torch, precision))
        cache = SlotCache(ROWS, span + span // 2, cache_layers(model))
        cache.set_window(0, 1, 0, 0)
        ids = torch.zeros(1, PROMPT, dtype=torch.int64)
        model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True)
        return sum(tensor.nbytes for layer in cache.layers for tensor in layer.tensors())

    settings = {"family": "qwen2", "policy_precision": precision}
    environment = ("environment.class=game.py:Game", "environment.max_tokens=24", "environment.max_turns=3")
    for more, span in (((), PROMPT + RESPONSE), (environment, 24)):
        assert held(tmp_path, "rewards={model: {}}", *more, **settings)["actor"].cache == real(span) > 0


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({}, 1),
        ({"max_off_policy_steps": 1, "old_logprobs": "sampler"}, 2),
        ({"lora_rank": 2}, 0),
        ({"kl_coef": 0.0}, 0),
        ({"kl_reference": "triton"}, 0),
    ],
)
def test_memory_table_counts_copies_of_the_policy(tmp_path, settings, copies):
    actor = held(tmp_path, **settings)["actor"]
    assert actor.copies == pytest.approx(copies * actor.weights, abs=64)


def test_memory_table_shrinks_with_adapters_freezing_precision_and_ranks(tmp_path):
    whole = held(tmp_path)
    frozen = held(tmp_path, "trainer.freeze=[layers]", "actor.policy.freeze=[layers]")
    lora = held(tmp_path, "trainer.lora_rank=1", "actor.policy.lora_rank=1")
    half = held(tmp_path, "trainer.lora_rank=1", "trainer.precision=bfloat16", "reward.dtype=bfloat16")
    ranks = held(tmp_path, "trainer.ranks=2", "actor.ranks=2")
    for role in ("trainer", "actor"):
        assert lora[role].gradients < whole[role].gradients / 2
        assert lora[role].moments < whole[role].moments / 2
        assert lora[role].weights > whole[role].weights == frozen[role].weights
        assert frozen[role].gradients < whole[role].gradients
        for name in ("weights", "gradients", "moments"):
            assert getattr(ranks[role], name) == pytest.approx(getattr(whole[role], name) / 2, abs=1)
    assert half["trainer"].weights < lora["trainer"].weights
    assert half["reward"].weights < whole["reward"].weights


def test_memory_table_counts_instances_shards_and_next_versions(tmp_path):
    one = held(tmp_path)["reward"]
    layers = 4 * sum(p.numel() for name, p in token_model(tmp_path / "reward").named_parameters() if "_proj" in name)
    assert one.weights - held(tmp_path, "reward.tensor_parallel=2")["reward"].weights == layers // 2 > 0
    assert held(tmp_path, "reward.instances=2", "reward.store=true")["reward"] == Held(2 * one.weights, 2 * one.weights)


def test_dry_run_prints_memory_per_device_and_fails_if_it_does_not_fit(config, tmp_path, monkeypatch, capsys):
    arguments = ["--config", str(config), "--dry-run", f"run.dir={tmp_path}/new", "actor.policy.lora_alpha=2"]
    assert run.main(arguments) == 0
    out = capsys.readouterr().out
    for word in (
        "actor",
        "trainer",
        "reward",
        "critic",
        *COLUMNS,
        "GiB free",
        "Activations are not counted",
        WITHOUT_EFFECT,
    ):
        assert word in out
    assert serve.main(arguments) == 0
    out = capsys.readouterr().out.replace(WITHOUT_EFFECT, "")
    assert "critic" in out
    assert "actor" not in out
    monkeypatch.setattr(memory_table, "_free", lambda device: 1024)
    for command in (run, serve):
        assert command.main(arguments) == 1
        assert re.search(
            r"error: cpu has 1 KiB free and the models need .* \(reward [\d.]+ KiB, ", capsys.readouterr().err
        )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("overrides", "problem", "concerns_server"),
    [
        (["critic.model={absent}"], "critic.model: {absent} does not exist", True),
        (["actor.policy.model={reward}"], "actor.policy.model: {reward} ", False),
        (["actor.prompts.path={bad}"], "actor.prompts.path: {bad}:1: ", False),
    ],
)
def test_dry_run_names_unusable_files(overrides, problem, concerns_server, config, checkpoints, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"txt": "Hi"}\n')
    names = {"absent": tmp_path / "absent", "reward": checkpoints.reward, "bad": bad}
    given = ["--config", str(config), "--dry-run", *(override.format(**names) for override in overrides)]
    for command, is_concerned in ((run, True), (serve, concerns_server)):
        assert command.main(given) == is_concerned
        found = capsys.readouterr()
        assert (f"error: {problem.format(**names)}" in found.err) == is_concerned
        assert "GiB free" in found.out


def test_memory_table_sums_per_machine_and_gpu(tmp_path, monkeypatch):
    config = config_of(tmp_path, *ON_GPUS, "critic.device=cuda:1")
    monkeypatch.setattr(memory_table.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(memory_table.torch.cuda, "mem_get_info", lambda index: (5 << 30, 80 << 30))
    lines, problems = memory_lines(config)
    assert not problems
    assert re.match(r"reward +cuda:0 to cuda:1, each +10 KiB", lines[1])
    assert re.match(r"critic +cuda:1 +10 KiB", lines[2])
    assert [line.endswith("5 GiB free") for line in lines if line.startswith("all")] == [True, False]  # one GPU here
    apart, _ = memory_lines(config_of(tmp_path, *ON_GPUS, "actor.ranks=2", 'actor.client.servers=["host:8000"]'))
    assert {line.split()[1] for line in apart if line.startswith("all")} == {"server", "trainer", "actor"}
    assert any(re.match("actor +actor cuda:0 to cuda:1, each ", line) for line in apart)


def test_memory_table_names_a_folder_with_an_unknown_model(tmp_path):
    assert "actor" not in held(tmp_path, f"actor.policy.model={tmp_path}/absent")  # which the checks report
    save_tiny(tmp_path / "broken", "llama", "reward")
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(ConfigError, match=r"reward: the model in .*broken cannot be built: "):
        held(tmp_path, f"reward.model={tmp_path}/broken")
