"""`tools.resume_changes`: a run does not resume silently with another reward, algorithm or policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from python_backend.config import ActorSection, ConfigError, RunConfig
from python_backend.store.jsonl import read_jsonl
from tests.support.settings import nested
from tools.resume_changes import check_changes, write_settings

CODE = "def verify(sample):\n    return 1.0\n"


def config_of(run: Path, weight: float = 1.0, timeout_s: float = 2.0, **actor: Any) -> RunConfig:
    (run.parent / "mine.py").touch()
    term = {"function": f"{run.parent / 'mine.py'}:verify", "weight": weight, "timeout_s": timeout_s}
    settings = nested(ActorSection, {"algorithm_name": "reinforce++", **actor})
    return RunConfig.model_validate({"run": {"dir": run}, "rewards": {"verdict": term}, "actor": settings})


def trained(run: Path) -> None:
    """Write what a run has after five steps."""
    (run / "checkpoints" / "actor" / "5").mkdir(parents=True)
    write_settings(config_of(run))


@pytest.mark.parametrize(
    ("changed", "line", "is_guarded"),
    [
        ({}, None, False),
        ({"steps": 900, "client_deadline_s": 70.0}, None, False),
        ({"timeout_s": 3.0}, "rewards.verdict.timeout_s: 2.0 -> 3.0", False),
        ({"lr": 0.5}, "actor.optimizer.lr: 9e-07 -> 0.5", False),
        ({"weight": 2.0}, "rewards.verdict.weight: 1.0 -> 2.0", True),
        ({"algorithm_clip_ratio": 0.5}, "actor.algorithm.clip_ratio: 0.2 -> 0.5", True),
        ({"checkpoint": "other"}, "actor.policy.checkpoint: checkpoints/policy -> other", True),
        ({"prompts_path": "other.jsonl"}, "actor.prompts.path: data/prompts.jsonl -> other.jsonl", False),
    ],
)
def test_what_changed_is_listed_and_recorded(
    tmp_path: Path, changed: dict[str, Any], line: str | None, is_guarded: bool
):
    run = tmp_path / "run"
    assert check_changes(config_of(run, **changed), accepted=False) == []  # it begins
    trained(run)
    config = config_of(run, **changed)
    if is_guarded:
        with pytest.raises(ConfigError, match=r"after step 5 with other settings (.|\n)*--accept-changes") as caught:
            check_changes(config, accepted=False)
        assert line in str(caught.value)
        assert not (run / "changes.jsonl").exists()
    lines = check_changes(config, accepted=is_guarded)
    assert lines == ([line] if line else [])
    recorded = read_jsonl(run / "changes.jsonl")
    assert [(row["step"], list(row["changed"])) for row in recorded] == (
        [(5, [line.partition(":")[0]])] if line else []
    )
    write_settings(config)
    assert check_changes(config, accepted=False) == []


def test_the_code_of_a_reward_function_may_not_change_silently(tmp_path: Path):
    run = tmp_path / "run"
    trained(run)
    (tmp_path / "mine.py").write_text(CODE)
    with pytest.raises(ConfigError, match=r"rewards.verdict.function: the file's content"):
        check_changes(config_of(run), accepted=False)
    assert check_changes(config_of(run), accepted=True) == ["rewards.verdict.function: the file's content"]
