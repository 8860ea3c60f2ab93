"""`tools.preflight`: what would end a run, or leave it without rewards, is found before anything starts."""

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
from tools.preflight import check_prompts, check_run

FUNCTIONS = """
import time


def good(sample):
    assert sample.metadata["text"] is not None if "text" in sample.metadata else sample.prompt
    return float(sample.response in sample.text and len(sample.tokens) > 0)


def raises(sample):
    return 1 / 0


def text(sample):
    return "very good"


def peeks(sample):
    import os
    raise OSError([name for name in ("TRAINING_KEY", "WANDB_API_KEY", "SOME_SETTING") if name in os.environ])


def nan(sample):
    return float("nan")


def slow(sample):
    time.sleep(60)


def group(samples):
    return [1.0] * len(samples)


def trl(prompts, completions, **columns):
    return [float(len(text)) for text in completions]
"""


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ([], ""),
        (["rewards.mine.groupwise=true", "rewards.mine.function={file}:group"], ""),
        (["rewards.mine.function={file}:trl"], ""),
        (["rewards.mine.function={file}:raises"], "ZeroDivisionError: division by zero"),
        (["rewards.mine.function={file}:peeks"], "OSError: ['SOME_SETTING']"),
        (["rewards.mine.function={file}:text"], "the function returned 'very good', but it must return a number"),
        (["rewards.mine.function={file}:nan"], "returned nan, must be finite"),
        (["rewards.mine.function={file}:slow", "rewards.mine.timeout_s=0.1"], "took longer than 0.1 s and was killed"),
        (["rewards.mine.function={file}:group"], "TypeError: object of type 'Sample' has no len()"),
        (["rewards.mine.options={{margin: 2}}"], "margin"),
        (["critic.checkpoint={other_policy}"], "critic.checkpoint: the tokenizer of {other_policy} differs"),
        (["actor.trackers=[mlflow]"], "actor.trackers: mlflow is not installed; pip install mlflow, or remove it"),
    ],
)
def test_a_run_is_refused_with_one_line_for_each_problem(
    settings: list[str], problem: str, tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRAINING_KEY", "WANDB_API_KEY", "SOME_SETTING"):
        monkeypatch.setenv(name, "1")
    file = tmp_path / "mine.py"
    file.write_text(FUNCTIONS)
    names = {**vars(checkpoints), "file": file}
    run = make_run(tmp_path, checkpoints)
    given = [f"rewards.mine.function={file}:good", *(setting.format(**names) for setting in settings)]
    config = load_config(run.path, given)
    if not problem:
        check_run(config)
        return
    with pytest.raises(ConfigError) as caught:
        check_run(config)
    (line,) = str(caught.value).splitlines()
    assert problem.format(**names) in line
    if "rewards.mine" in " ".join(settings):
        assert line.startswith("rewards.mine.function: ")


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
        "run": {"dir": str(tmp_path / "run")},
        "rewards": {"length": {"function": "reward_functions:token_sum"}},
        "actor": {
            "policy": {"checkpoint": str(checkpoints.policy)},
            "prompts": {"path": str(prompts)},
            "algorithm": {"name": "grpo", "responses_per_prompt": 2},
        },
    }
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
        (["actor.generation.max_new_tokens=29", "reward.template='{{{{ response }}}}'"], "reward 128 critic 128"),
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
