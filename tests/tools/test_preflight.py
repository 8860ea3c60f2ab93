"""`tools.preflight`: what would end a run, or leave it without rewards, is found before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_system import Checkpoints, make_run

from python_backend.config import ConfigError, load_config
from tools.preflight import check_run

FUNCTIONS = """
import time


def good(sample):
    assert sample.metadata["text"] is not None if "text" in sample.metadata else sample.prompt
    return float(sample.response in sample.text and len(sample.tokens) > 0)


def raises(sample):
    return 1 / 0


def text(sample):
    return "very good"


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
        (["rewards.mine.function={file}:text"], "the function returned 'very good', but it must return a number"),
        (["rewards.mine.function={file}:nan"], "returned nan, must be finite"),
        (["rewards.mine.function={file}:slow", "rewards.mine.timeout_s=0.1"], "took longer than 0.1 s and was killed"),
        (["rewards.mine.function={file}:group"], "TypeError: object of type 'Sample' has no len()"),
        (["rewards.mine.options={{margin: 2}}"], "margin"),
        (["critic.checkpoint={other_policy}"], "critic.checkpoint: the tokenizer of {other_policy} differs"),
        (["actor.trackers=[mlflow]"], "actor.trackers: mlflow is not installed; pip install mlflow, or remove it"),
    ],
)  # fmt: skip
def test_a_run_is_refused_with_one_line_for_each_problem(
    settings: list[str], problem: str, tmp_path: Path, checkpoints: Checkpoints
) -> None:
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
