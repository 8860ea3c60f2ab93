"""`actor.policy.checkpoint`: a policy of any family resumes; damage is found; what is written is on the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_system import make_tokenizer
from peft import PeftModel
from policy_training import load_checkpoint, states, train
from tiny_checkpoints import MIXTURES, save_tiny
from transformers import AutoModelForCausalLM

from actor.data.rollout import Prompt, Rollout
from actor.policy.checkpoint import check_checkpoint_of, critic_steps, save_checkpoint
from actor.policy.policy import Policy
from python_backend.checkpoints.inspection import CheckpointError
from python_backend.checkpoints.tokenization import load_tokenizer
from python_backend.models.loading import load_weights
from python_backend.models.modeling import quiet_transformers
from python_backend.store.sealed_folder import DamagedCheckpoint
from tests.support.settings import actor_section
from tools.export import main as export

PROMPTS = [Prompt("0", "", np.asarray([5, 6, 7])), Prompt("1", "", np.asarray([8, 9]))]
TEMPLATES = {"default": "{{ messages[0].content }}", "tool_use": "{{ messages[0].role }}"}
quiet_transformers()


def save_policy(folder: Path, family: str, **settings: Any) -> Path:
    """A tiny causal LM whose tokenizer has two chat templates."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = dict(TEMPLATES)
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": 2, "eos_token_id": 1, "max_position_embeddings": 64}
    save_tiny(folder, family, "language", **{**sizes, **settings})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("start") / "llama", "llama")


def make_policy(folder: Path, **settings: Any) -> Policy:
    limits = {"checkpoint": folder, "max_new_tokens": 6, "prompts_max_tokens": 8, "precision": "float32"}
    return Policy.of(actor_section(**{**limits, "lr": 1e-2, **settings}))


def trained(folder: Path, **settings: Any) -> tuple[Policy, Rollout]:
    torch.manual_seed(0)  # adapters begin with random weights
    policy = make_policy(folder, **settings)
    rollout = policy.generate(PROMPTS, seed=1)
    train(policy, rollout)
    return policy, rollout


def save(root: Path, policy: Policy, step: int = 1) -> Path:
    save_checkpoint(root, states(policy), {"step": step, "critic_step": step}, keep=5)
    return root / str(step)


# ---- for other programs ----


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize(
    "settings",
    [{}, {"lora_rank": 2}, {"lora_rank": 2, "lora_targets": ("q_proj",), "precision": "bfloat16"}],
    ids=["full", "lora", "bfloat16"],
)
def test_an_exported_checkpoint_loads_with_transformers_and_peft(
    llama: Path, tmp_path: Path, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    policy, rollout = trained(llama, **settings)
    expected = tmp_path / "expected"
    policy.save(expected)
    save(tmp_path / "checkpoints" / "actor", policy, step=3)
    models = [AutoModelForCausalLM.from_pretrained(expected)]
    names = {"AutoModelForCausalLM": AutoModelForCausalLM, "PeftModel": PeftModel}
    for kind in ("--merged", "--peft")[: 2 if policy.settings.lora_rank else 1]:
        assert export([str(tmp_path), kind]) == 0
        models.append(eval(capsys.readouterr().out, names))
    logits = [model(rollout.tokens).logits for model in models]
    assert all((other - logits[0]).abs().max() <= (1e-2 if "precision" in settings else 1e-5) for other in logits[1:])
    files = [tmp_path / "export" / "step-3" / name for name in ("tokenizer.json", "model.safetensors")]
    assert files[0].stat().st_mode == files[1].stat().st_mode  # as the umask says
    for wrong, text in {"--step=2": "no checkpoint of step 2; it has those of 3", "--merged": "already exists"}.items():
        assert export([str(tmp_path), wrong]) == 2
        assert text in capsys.readouterr().err
    if not policy.settings.lora_rank:
        assert export([str(tmp_path), "--peft"]) == 2


# ---- any family ----


@pytest.mark.parametrize(
    ("family", "settings"),
    [(family, {}) for family in MIXTURES] + [("mixtral", {"lora_rank": 2}), ("granitemoe", {"lora_rank": 2})],
    ids=str,
)
def test_a_mixture_of_experts_goes_on_where_it_was(tmp_path: Path, family: str, settings: dict[str, Any]):
    """Bit for bit; and its tokenizer has several chat templates, which lie in a folder of their own."""
    one, rollout = trained(save_policy(tmp_path / "start", family), **settings)
    save(tmp_path / "checkpoints", one)
    torch.manual_seed(1)
    other = make_policy(tmp_path / "start", **settings)
    load_checkpoint(tmp_path / "checkpoints", 1, states(other))
    for policy in (one, other):
        train(policy, rollout)
    assert torch.equal(one.logprobs(rollout), other.logprobs(rollout))
    for (name, mine), theirs in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_a_policy_in_shards_is_loaded(tmp_path: Path, llama: Path):
    one, rollout = trained(llama)
    one.model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert not (tmp_path / "model.safetensors").exists()
    other = make_policy(llama)
    other.load(tmp_path)
    assert torch.equal(one.logprobs(rollout), other.logprobs(rollout))


def test_weights_of_another_shape_are_refused(tmp_path: Path, llama: Path):
    policy = make_policy(llama)
    for name, sizes in {"wide": {"hidden_size": 32}, "deep": {"num_hidden_layers": 3}}.items():
        save_policy(tmp_path / name, "llama", **sizes)
        with pytest.raises(CheckpointError, match=str(tmp_path / name)):
            load_weights(policy.model, tmp_path / name)


def test_several_chat_templates_lie_in_a_checkpoint(tmp_path: Path, llama: Path):
    folder = save(tmp_path, make_policy(llama))
    assert load_tokenizer(folder).chat_template == TEMPLATES
    (template,) = (folder / "additional_chat_templates").iterdir()
    template.write_text("another")
    with pytest.raises(DamagedCheckpoint, match=r"additional_chat_templates/tool_use\.jinja is damaged"):
        check_checkpoint_of(make_policy(llama), folder)


# ---- damage ----


def zeroed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-64:] = bytes(64)
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("settings", "name", "damage"),
    [
        ({}, "model.safetensors", zeroed),
        ({}, "optimizer.safetensors", cut),
        ({}, "config.json", Path.unlink),
        ({"lora_rank": 2}, "adapters.safetensors", zeroed),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_damaged_file_is_named(
    tmp_path: Path, llama: Path, settings: dict[str, Any], name: str, damage: Callable[[Path], None]
):
    policy, _ = trained(llama, **settings)
    folder = save(tmp_path, policy)
    damage(folder / name)
    before = [p.detach().clone() for p in policy.model.parameters()]
    with pytest.raises(DamagedCheckpoint, match=f"{folder / name} (is damaged: sha256|cannot be read: No such file)"):
        load_checkpoint(tmp_path, 1, states(policy))
    assert all(torch.equal(a, b) for a, b in zip(policy.model.parameters(), before, strict=True))


@pytest.mark.parametrize("content", ["{}", '{"step": 1', "[]", '{"step": 1, "sha256": "0"}'])
def test_a_damaged_state_is_named(tmp_path: Path, llama: Path, content: str):
    policy = make_policy(llama)
    for step in (1, 2):
        save(tmp_path, policy, step)
    (tmp_path / "2" / "state.json").write_text(content)
    with pytest.raises(DamagedCheckpoint, match=r"2/state\.json (is damaged|cannot be read)"):
        load_checkpoint(tmp_path, 2, states(policy))
    assert critic_steps(tmp_path) == [1]


# ---- another start ----


def test_another_start_is_refused(tmp_path: Path, llama: Path):
    """The policy would be the checkpoint's, and the reference another model."""
    save(tmp_path, make_policy(llama))
    other = save_policy(tmp_path / "other", "llama", seed=1)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path, 1, states(make_policy(other)))
    message = str(caught.value)
    assert f"a run that started from {llama}, but actor.policy.checkpoint is now {other}" in message
    assert not isinstance(caught.value, DamagedCheckpoint)
    shutil.copytree(llama, tmp_path / "moved")  # the same model at another path
    load_checkpoint(tmp_path, 1, states(make_policy(tmp_path / "moved")))


# ---- on the disk ----


def test_every_file_and_folder_is_synced_before_it_gets_its_name(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
):
    synced: set[Path] = set()
    named: list[set[str]] = []  # what was in each folder that got its name
    fsync, rename = os.fsync, Path.rename

    def watched(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        inside = set(path.rglob("*"))
        assert not {path, *inside} - synced
        named.append({str(child.relative_to(path)) for child in inside})
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(Path, "rename", renamed)
    root = tmp_path / "run" / "checkpoints" / "actor"
    save(root, make_policy(llama))
    (names,) = named
    assert {"model.safetensors", "state.json", "additional_chat_templates/tool_use.jinja"} < names
    assert {root, root.parent, root.parent.parent, tmp_path} <= synced, "where the new names are"
