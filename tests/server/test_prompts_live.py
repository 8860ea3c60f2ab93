"""A run on several prompt files: a bad row ends it with a checkpoint, and mended it continues with the same prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from live_system import System, run_actor

from python_backend.config import PromptFileSection
from python_backend.store.jsonl import read_jsonl
from tests.support.prompts import inputs_of, write_prompts


@pytest.mark.slow
@pytest.mark.parametrize("one_step_off_policy", [False, True])
def test_a_bad_row_in_the_middle_of_a_curriculum(live: System, tmp_path: Path, one_step_off_policy: bool) -> None:
    one, other, late = (
        write_prompts(tmp_path / f"{name}.jsonl", [f"{verb} the {noun}" for noun in ("file", "list", "number")])
        for name, verb in (("one", "Open"), ("other", "Read"), ("late", "Return"))
    )
    files = [
        PromptFileSection(path=one, weight=3),
        PromptFileSection(path=other, until_step=3),
        PromptFileSection(path=late, weight=5, from_step=4),
    ]
    expected = inputs_of(*files, per_step=4, max_tokens=512)
    whole = late.read_text()
    late.write_text("".join(whole.splitlines(keepends=True)[:2]) + "{broken\n")  # a step reads two or three of its rows
    settings = {
        "run.dir": tmp_path / "run",
        "actor.prompts.path": "data/prompts.jsonl",
        "actor.steps": 6,
        "actor.prompts.files": yaml.safe_dump(
            [file.model_dump(mode="json") for file in files], default_flow_style=True, width=10_000
        ).strip(),
        "actor.algorithm.name": "grpo",
        "actor.algorithm.responses_per_prompt": 2,
        "actor.logged_texts": 8,
        "actor.checkpoint_every": 50,
        "actor.validation.size": 0,
        "actor.one_step_off_policy": one_step_off_policy,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    code, log = run_actor(live.run, "actor-prompts", *overrides)
    assert code == 2
    (sentence,) = [line for line in log.splitlines() if line.startswith("error: ")]
    assert f"{late}:3: not JSON" in sentence
    done = max(step for step in range(1, 7) if f"stopped after step {step}, whose checkpoint is written" in sentence)
    assert done in (3, 4)
    late.write_text(whole)
    code, log = run_actor(live.run, "actor-prompts", *overrides)
    assert code == 0, log
    assert f"resuming from the checkpoint of step {done}" in log
    texts = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    assert [text["prompt"] for text in texts] == [
        prompt.text for step in range(1, 7) for prompt in expected.prompts_of(step) for _ in range(2)
    ]
    assert f"{late} has changed since the checkpoint" in log
