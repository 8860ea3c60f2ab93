"""Prompt files are checked before anything slow starts: that they have prompts, and that chats can be rendered."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from live_system import Checkpoints, make_run, make_tokenizer

import tools.run
from python_backend.config import ConfigError, RunConfig, load_config
from tools.prompt_checks import check_prompts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "{} has no prompts"),
        ("\n\n", "{} has no prompts"),
        ('{"text": "a"}\n{"text": ""}\n', "{}:2: text is empty"),
    ],
)
def test_prompts_that_are_empty_are_named(
    text: str, words: str, tmp_path: Path, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "empty.jsonl"
    prompts.write_text(text)
    config: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "run")}, "rewards": {"length": {"function": "reward_functions:token_sum"}},
        "actor": {
            "policy": {"checkpoint": str(checkpoints.policy)}, "prompts": {"path": str(prompts)},
            "algorithm": {"name": "grpo", "responses_per_prompt": 2},
        },
    }  # fmt: skip
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    assert tools.run.main(["--config", str(tmp_path / "my.yaml")]) == 2
    assert capsys.readouterr().err == f"error: actor.prompts.path: {words.format(prompts)}\n"
    assert not (tmp_path / "run").exists()


def test_conversations_need_chat_templates(tmp_path: Path) -> None:
    """The policy's, and the reward model's where it receives texts."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    for name in ("policy", "same"):
        tokenizer.save_pretrained(tmp_path / name)
    tokenizer.add_tokens(["unheard"])
    tokenizer.save_pretrained(tmp_path / "other")
    prompts = tmp_path / "prompts.jsonl"
    actor = {"policy": {"checkpoint": tmp_path / "policy"}, "prompts": {"path": prompts}}

    def check(reward: str, prompt: object, **settings: object) -> None:
        prompts.write_text(json.dumps({"text": "first"}) + "\n" + json.dumps({"prompt": prompt}) + "\n")
        config = {"actor": actor, "reward": {"checkpoint": str(tmp_path / reward), **settings}}
        check_prompts(RunConfig.model_validate(config))

    check("other", "a text")
    (tmp_path / "empty.jsonl").touch()
    actor["validation"] = {"prompts": tmp_path / "empty.jsonl", "size": 0}
    check("other", "a text")  # they would not be read
    conversation = [{"role": "user", "content": "Hello"}]
    with pytest.raises(ConfigError, match=r"actor\.policy\.checkpoint: .*policy has no chat template, but actor"):
        check("same", conversation)
    (tmp_path / "policy" / "chat_template.jinja").write_text("{{ messages }}")
    check("same", conversation)
    with pytest.raises(ConfigError, match=r"reward\.checkpoint: .*other has no chat template.*'content'"):
        check("other", conversation)
    for settings in ({"text": "pair"}, {"process": {"separator": ".", "mark": "!"}}):
        with pytest.raises(ConfigError, match=r"same has no chat template.* because it receives texts"):
            check("same", conversation, **settings)
    (tmp_path / "other" / "chat_template.jinja").write_text("{{ messages }}")
    check("other", conversation)


@pytest.mark.parametrize(
    ("settings", "refused"),  # 100 tokens of a prompt, and as many positions as the models of the tests have: 128
    [
        (["actor.generation.max_new_tokens=28"], ""),
        (["actor.generation.max_new_tokens=29"], "reward 128 critic 128"),
        (["actor.generation.max_new_tokens=9", "critic.max_length=108"], "critic 108"),
        (["actor.generation.max_new_tokens=29", "reward.checkpoint={other_reward}"], "critic 128"),  # receives texts
        (["actor.generation.max_new_tokens=29", "reward.text=pair"], "critic 128"),
        (["actor.generation.max_new_tokens=29", "actor.kl.reference=triton"], "reward 128 critic 128 reference 128"),
    ],
)
def test_rows_must_fit_every_model_that_receives_them(
    settings: list[str], refused: str, tmp_path: Path, checkpoints: Checkpoints
) -> None:
    """Or the reward model and critic would refuse, and the run would mask, the longest responses."""
    run = make_run(tmp_path, checkpoints, actor={"prompts_max_tokens": 100})
    config = load_config(run.path, [each.format(**vars(checkpoints)) for each in settings])
    found = ""
    try:
        check_prompts(config)
    except ConfigError as error:
        found = str(error)
    lines = re.findall(r"(\w+)\.checkpoint: takes rows of at most (\d+) tokens", found)
    assert " ".join(f"{role} {limit}" for role, limit in lines) == refused
    assert found.count("\n") == max(0, len(lines) - 1)
