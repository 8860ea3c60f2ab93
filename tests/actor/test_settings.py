"""`actor.run.settings`: a run does not resume silently with another reward, algorithm or policy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from live_system import Checkpoints, make_run

from actor.run.settings import describe_changes, find_changes, write_settings
from python_backend.config import ActorSection, ConfigError, RunConfig, load_config
from python_backend.store.jsonl import read_jsonl
from tests.support.settings import nested

CODE = "def verify(sample):\n    return 1.0\n"


def config_of(run: Path, weight: float = 1.0, timeout_s: float = 2.0, **actor: Any) -> RunConfig:
    (run.parent / "mine.py").touch()
    options = {name: actor.pop(name) for name in ("workers",) if name in actor}
    function = f"{run.parent / 'mine.py'}:verify"
    term = {"function": function, "weight": weight, "timeout_s": timeout_s, "options": options}
    settings = nested(ActorSection, {"algorithm_name": "reinforce++", **actor})
    return RunConfig.model_validate({"run": {"dir": run}, "rewards": {"verdict": term}, "actor": settings})


def trained(run: Path, **settings: Any) -> None:
    """Write what a run has after five steps."""
    (run / "checkpoints" / "actor" / "5").mkdir(parents=True)
    write_settings(config_of(run, **settings), {})


@pytest.mark.parametrize(
    ("before", "now", "line", "is_guarded"),
    [
        ({}, {}, None, False),
        ({}, {"steps": 900, "client_deadline_s": 70.0}, None, False),
        ({}, {"timeout_s": 3.0}, "rewards.verdict.timeout_s: 2.0 -> 3.0", False),
        ({}, {"lr": 0.5}, "actor.optimizer.lr: 9e-07 -> 0.5", False),
        ({}, {"weight": 2.0}, "rewards.verdict.weight: 1.0 -> 2.0", True),
        ({"workers": 1}, {"workers": 2}, "rewards.verdict.options.workers: 1 -> 2", True),
        ({}, {"algorithm_clip_ratio": 0.5}, "actor.algorithm.clip_ratio: 0.2 -> 0.5", True),
        ({"algorithm_loss_mean": "token"}, {}, "actor.algorithm.loss_mean: token -> auto", True),
        ({}, {"checkpoint": "other"}, "actor.policy.checkpoint: checkpoints/policy -> other", True),
        ({}, {"prompts_path": "other.jsonl"}, "actor.prompts.path: data/prompts.jsonl -> other.jsonl", False),
    ],
)
def test_what_changed_is_listed_and_recorded(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any], line: str | None, is_guarded: bool
):
    run = tmp_path / "run"
    config = config_of(run, **now)
    assert find_changes(config, accepted=False) == {}  # it begins
    trained(run, **before)
    if is_guarded:
        with pytest.raises(ConfigError, match=r"after step 5 with other settings (.|\n)*--accept-changes") as caught:
            find_changes(config, accepted=False)
        assert line in str(caught.value)
    changed = find_changes(config, accepted=is_guarded)
    assert describe_changes(changed) == ([line] if line else [])
    assert not (run / "changes.jsonl").exists()
    write_settings(config, changed)
    recorded = read_jsonl(run / "changes.jsonl")
    assert [(row["step"], row["changed"]) for row in recorded] == ([(5, changed)] if line else [])
    assert find_changes(config, accepted=False) == {}


def test_what_was_measured_is_no_change(tmp_path: Path):
    trained(tmp_path / "run")
    run = {"run": {"dir": tmp_path / "run"}, "critic": {}}
    written, measured = ({**run, "reward": reward} for reward in ({}, {"workers": 2}))
    write_settings(RunConfig.model_validate(measured), {})
    assert find_changes(RunConfig.model_validate(written), accepted=False) == {}


def test_the_code_of_a_reward_function_may_not_change_silently(tmp_path: Path):
    run = tmp_path / "run"
    trained(run)
    (tmp_path / "mine.py").write_text(CODE)
    with pytest.raises(ConfigError, match=r"rewards.verdict.function: the file's content"):
        find_changes(config_of(run), accepted=False)
    changed = find_changes(config_of(run), accepted=True)
    assert describe_changes(changed) == ["rewards.verdict.function: the file's content"]
    (tmp_path / "mine.py").unlink()  # this machine does not score
    config = config_of(run)
    (tmp_path / "mine.py").unlink()
    assert find_changes(config, accepted=False) == {}


def test_a_changed_reward_is_refused_before_anything_starts(tmp_path: Path, checkpoints: Checkpoints):
    (tmp_path / "mine.py").write_text(CODE)
    run = make_run(
        tmp_path / "run",
        checkpoints,
        rewards={"length": {"function": f"{tmp_path / 'mine.py'}:verify"}},
        actor={"algorithm_name": "grpo", "responses_per_prompt": 2},
    )
    (run.config.run.dir / "checkpoints" / "actor" / "3").mkdir(parents=True)
    write_settings(load_config(run.path, []), {})
    arguments = ["tools", "run", "--config", str(run.path), "rewards.length.weight=2"]
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert "rewards.length.weight: 1.0 -> 2.0" in done.stderr
    assert not (run.config.run.dir / "changes.jsonl").exists()


def test_settings_that_cannot_be_read_are_named(tmp_path: Path):
    trained(tmp_path / "run")
    (tmp_path / "run" / "settings.json").write_text("{")
    with pytest.raises(ConfigError, match=r"settings.json is not JSON: .*; delete the file to resume"):
        find_changes(config_of(tmp_path / "run"), accepted=False)
