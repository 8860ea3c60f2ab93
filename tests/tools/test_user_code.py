"""Checks before a run that try a user's code: reward functions, environments and agents, on the first prompt."""

import pytest
from live_system import make_run

from rlhf_triton.config.loading import load_config
from rlhf_triton.config.run_config import ConfigError
from rlhf_triton.tools.checks import preflight
from rlhf_triton.tools.checks.findings import Level

FUNCTIONS = """
import time


def good(sample):
    assert sample.metadata["text"] is not None if "text" in sample.metadata else sample.prompt
    return float(sample.response in sample.text and len(sample.tokens) > 0)


def peeks(sample):
    import os
    raise OSError([name for name in ("TRAINING_KEY", "WANDB_API_KEY", "SOME_SETTING") if name in os.environ])


def slow(sample):
    time.sleep(60)


def group(samples):
    return [1.0] * len(samples)


def trl(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


async def needs(completions, answer):
    return [0.0] * len(completions)


class Game:
    def __init__(self, highest=9): ...
    def reset(self, row): ...
    def step(self, action): return "more", 0.0, False


class Untold(Game):
    def step(self, action): return "only an observation"


class Strict(Game):
    def reset(self, row): self.moves = {"left": -1}
    def step(self, action): return self.moves[action.strip()], 0.0, False


class Choosy(Game):
    def reset(self, row): raise ValueError("no such game")


class Sleepy(Game):
    def reset(self, row): time.sleep(60)


class Hasty(Game):
    def reset(self, row): self.row = row
    def step(self, action): return self.row["answr"], 0.0, True


def run(base_url, task): ...
"""
LONGEST = "environment.max_tokens=100"
PLAYED = (LONGEST, "environment.class={file}:Game")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ([], ""),
        (["rewards.mine.function={file}:trl"], ""),
        (
            ["rewards.mine.function={file}:needs"],
            "{file}:needs: answer is not a column of the prompts (columns: none); rena",
        ),
        (["rewards.mine.function={file}:peeks"], "OSError: ['SOME_SETTING']"),
        (
            ["rewards.mine.function={file}:slow", "rewards.mine.timeout_s=0.1"],
            "took longer than 0.1 s and was killed; raise rewards.mine.timeout_s, or ",
        ),
        (["rewards.mine.function={file}:group"], "TypeError: object of type 'Sample' has no len()"),
        (["rewards.mine.options={{margin: 2}}"], "margin"),
        ([*PLAYED, "environment.reward={file}:trl"], ""),
        ([LONGEST, "environment.agent={file}:run"], ""),
        ([LONGEST, "environment.class={file}:Untold"], "Untold: step: returned 'only an observation'; return a tuple"),
        ([LONGEST, "environment.class={file}:Strict"], ""),  # it may refuse a reply
        ([LONGEST, "environment.class={file}:Hasty"], "Hasty: step: KeyError: 'answr'"),
        (
            [LONGEST, "environment.class={file}:Gam"],
            "environment.class {file}:Gam: {file}:Gam cannot be imported: {file} has no",
        ),
        ([*PLAYED, "environment.options={{lowest: 1}}"], "Game.__init__() got an unexpected keyword argument 'lowest'"),
    ],
)
def test_user_code_is_tried_before_the_start(settings, problem, tmp_path, checkpoints, monkeypatch):
    for name in ("TRAINING_KEY", "WANDB_API_KEY", "SOME_SETTING"):
        monkeypatch.setenv(name, "1")
    file = tmp_path / "mine.py"
    file.write_text(FUNCTIONS)
    names = {**vars(checkpoints), "file": file}
    run = make_run(tmp_path, checkpoints)
    given = [
        "rewards.model={}",
        f"rewards.mine.function={file}:good",
        *(setting.format(**names) for setting in settings),
    ]
    config = load_config(run.path, given)
    if not problem:
        preflight.check(config, "run")
        return
    with pytest.raises(ConfigError) as caught:
        preflight.check(config, "run")
    (line,) = str(caught.value).splitlines()
    assert problem.format(**names) in line
    if "rewards.mine" in " ".join(settings):
        assert line.startswith("rewards.mine.function: ")


@pytest.mark.parametrize(
    ("name", "limit", "problem"),
    [
        ("Choosy", 60, "ValueError: no such game (mine.py:{line})"),
        ("Sleepy", 0.5, "took longer than 0.5 s and was killed; raise environment.timeout_s, or "),
    ],
)
def test_environment_that_refuses_the_first_prompt_gets_a_warning(name, limit, problem, tmp_path, checkpoints):
    file = tmp_path / "mine.py"
    file.write_text(FUNCTIONS)
    run = make_run(tmp_path, checkpoints)
    given = ["rewards.model={}", LONGEST, f"environment.class={file}:{name}", f"environment.timeout_s={limit}"]
    config = load_config(run.path, given)
    (found,) = preflight.environment(preflight.CheckedRun(config))
    assert found.level is Level.WARNING
    line = FUNCTIONS[: FUNCTIONS.index("no such game")].count("\n") + 1
    assert found.text.startswith("fails on the first prompt (")
    assert f"mine.py:{name}: reset: " in found.text
    assert problem.format(line=line) in found.text
