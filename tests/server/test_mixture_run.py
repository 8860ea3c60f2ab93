"""A whole run of mixtures of experts, policy and critic, with several chat templates."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from live_system import Checkpoints, make_run, make_tokenizer, run_actor, start_system
from tiny_checkpoints import save_tiny
from transformers import AutoModelForCausalLM

from python_backend.checkpoints.tokenization import load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TEMPLATES = {"default": "{{ messages[0].content }}", "tool_use": "{{ messages[0].role }}"}


def save(folder: Path, family: str, *, seed: int) -> Path:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = dict(TEMPLATES)
    save_tiny(
        folder,
        family,
        "language",
        seed=seed,
        vocab_size=len(tokenizer),
        pad_token_id=2,
        eos_token_id=1,
        max_position_embeddings=128,
    )
    tokenizer.save_pretrained(folder)
    return folder


def test_mixtures_are_trained_and_keep_their_templates(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """tests/actor and tests/trainer write and read the files of all families."""
    ours = dataclasses.replace(
        checkpoints,
        policy=save(tmp_path / "policy", "granitemoe", seed=1),
        critic=save(tmp_path / "critic", "qwen3-moe", seed=2),
    )
    system = start_system(make_run(tmp_path / "run", ours, actor={"steps": 2, "prompts_max_tokens": 64}))
    try:
        code, log = run_actor(system.run, "actor")
        assert code == 0, log
        folder = system.run.config.run.dir
        assert json.loads((folder / "actor_summary.json").read_text())["critic_updates"] == 2
        AutoModelForCausalLM.from_pretrained(str(folder / "policy"))
        assert load_tokenizer(folder / "policy").chat_template == TEMPLATES
    finally:
        system.stop()
