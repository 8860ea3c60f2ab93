"""A whole run of mixtures of experts, policy and critic, with several chat templates: killed, and resumed."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path

import pytest
from live_system import Checkpoints, make_run, make_tokenizer, start_system, stop_process, wait_for
from tiny_checkpoints import save_tiny
from transformers import AutoModelForCausalLM

from actor.policy.checkpoint import saved_steps
from python_backend.checkpoints.tokenization import load_tokenizer
from python_backend.store.jsonl import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TEMPLATES = {"default": "{{ messages[0].content }}", "tool_use": "{{ messages[0].role }}"}
FAMILIES = ["granitemoe", "qwen2-moe"]  # tests/actor and tests/trainer write and read the files of all families
CRITICS = {"granitemoe": "qwen3-moe"}  # transformers has no classification class for it


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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path: Path, checkpoints: Checkpoints, family: str) -> None:
    ours = dataclasses.replace(
        checkpoints,
        policy=save(tmp_path / "policy", family, seed=1),
        critic=save(tmp_path / "critic", CRITICS.get(family, family), seed=2),
    )
    run = make_run(tmp_path / "run", ours, actor={"steps": 5, "checkpoint_every": 2, "prompts_max_tokens": 64})
    system = start_system(run)
    actor = run.start("actor")
    try:
        folder, metrics = run.config.run.dir, run.config.run.dir / "metrics.jsonl"
        wait_for(lambda: len(read_jsonl(metrics)) >= 3, actor)
        actor.process.send_signal(signal.SIGKILL)
        actor.process.wait()
        step = max(saved_steps(folder / "checkpoints" / "actor"))
        actor = run.start("actor-again", module="actor")
        assert actor.process.wait(180) == 0, actor.log_path.read_text()
        assert f"resuming from the checkpoint of step {step}" in actor.log_path.read_text()
        assert [line["step"] for line in read_jsonl(metrics)] == [1, 2, 3, 4, 5]
        assert json.loads((folder / "actor_summary.json").read_text())["critic_updates"] == 5
        AutoModelForCausalLM.from_pretrained(str(folder / "policy"))
        assert load_tokenizer(folder / "policy").chat_template == TEMPLATES
    finally:
        stop_process(actor)
        system.stop()
