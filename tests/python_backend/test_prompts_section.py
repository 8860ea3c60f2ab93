"""`actor.prompts.files`: which combinations of files and steps a configuration may have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from python_backend.config import ConfigError, RunConfig, load_config
from python_backend.config.required_files import check_files


def load(tmp_path: Path, files: list[dict[str, Any]], *overrides: str) -> RunConfig:
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump({"actor": {"steps": 10, "prompts": {"files": files}}}))
    return load_config(path, overrides)


def test_one_path_is_one_file(tmp_path: Path):
    prompts = load(tmp_path, [], "actor.prompts.path=a.jsonl").actor.prompts
    assert [(source.path, source.is_active(1), source.is_active(10**6)) for source in prompts.sources] == [
        (Path("a.jsonl"), True, True)
    ]
    assert prompts.paths == {"actor.prompts.path": Path("a.jsonl")}


def test_files_are_active_in_their_steps(tmp_path: Path):
    files = [{"path": "a", "until_step": 4}, {"path": "b", "from_step": 5}, {"path": "a", "from_step": 6, "weight": 2}]
    config = load(tmp_path, files)
    active = {
        step: [file.path.name for file in config.actor.prompts.sources if file.is_active(step)] for step in (4, 5, 6)
    }
    assert active == {4: ["a"], 5: ["b"], 6: ["b", "a"]}
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude={"report"})))
    assert load_config(dumped) == config


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([{"path": "a", "from_step": 2}], "actor.prompts.files: no file is active in step 1, but actor.steps is 10"),
        ([{"path": "a", "until_step": 9}], "actor.prompts.files: no file is active in step 10, but actor.steps is 10"),
        (
            [{"path": "a", "until_step": 3}, {"path": "b", "from_step": 5}],
            "actor.prompts.files: no file is active in step 4, but actor.steps is 10; change from_step or until_step",
        ),
        ([], "my.yaml: actor.prompts.files is empty; list a file, or set actor.prompts.path"),
        (
            [{"path": "b"}, {"path": "a", "from_step": 3, "until_step": 2}],
            "actor.prompts.files.1.until_step (2) is before its from_step (3)",
        ),
        (
            [{"path": "a", "until_step": 5}, {"path": "a", "from_step": 5}],
            "actor.prompts.files: a occurs more than once in step 5; give disjoint steps",
        ),
        ([{"path": "a", "weight": 0}], "actor.prompts.files.0.weight: Input should be greater than 0"),
        ([{"weight": 1}], "actor.prompts.files.0.path is missing"),
        (
            [{"path": "x/a", "until_step": 5}, {"path": "x/../x/a"}],
            "actor.prompts.files: x/a occurs more than once in step 1; give disjoint steps",
        ),
        (
            ["a"],
            "actor.prompts.files.0 is a section, not a value (got 'a'); its keys are path, weight, from_step, until_st",
        ),
        ({"a": 1}, "actor.prompts.files must be a list (got {'a': 1})"),
        (
            [{"path": "a", "wieght": 1}],
            "unknown key actor.prompts.files.0.wieght; did you mean actor.prompts.files.wei",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, files: Any, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, files)


def test_a_short_run_may_end_before_a_file_is_used(tmp_path: Path):
    load(tmp_path, [{"path": "a"}, {"path": "b", "from_step": 500}], "actor.steps=3")


def test_a_gap_in_the_file_is_not_blamed_on_the_override_alone(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, [{"path": "a", "until_step": 5}], "actor.steps=40")
    assert str(caught.value).startswith(
        f"{tmp_path / 'my.yaml'} with override 'actor.steps=40': actor.prompts.files: no file is active in step 6"
    )


def test_a_path_beside_files_is_refused(tmp_path: Path):
    with pytest.raises(
        ConfigError,
        match=r"'actor\.prompts\.path=b': actor\.prompts\.path \(b\) and actor\.prompts\.files are both set",
    ):
        load(tmp_path, [{"path": "a"}], "actor.prompts.path=b")


def test_a_missing_file_is_named_by_its_place(tmp_path: Path):
    (tmp_path / "a.jsonl").touch()
    config = load(tmp_path, [{"path": str(tmp_path / "a.jsonl")}, {"path": str(tmp_path / "b.jsonl")}])
    with pytest.raises(ConfigError) as caught:
        check_files(config, actor=True)
    lines = [line for line in str(caught.value).splitlines() if "prompts" in line]
    assert [line.split(";")[0] for line in lines] == [
        f"actor.prompts.files.1.path: {tmp_path / 'b.jsonl'} does not exist"
    ]
