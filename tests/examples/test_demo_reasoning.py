"""The tasks of configs/rlvr.yaml, held out and not, and the verifier that rewards their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.demo.reasoning import prepare, write_tasks
from python_backend.errors import RlhfError
from python_backend.rewards.function import Sample, checked, load_function

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: pip install '.[rlvr]'")

VERIFIER = f"{Path(__file__).parents[2] / 'configs' / 'rlvr_reward.py'}:is_correct"
NUM_TRAIN, NUM_HELD_OUT = 512, 128


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder, NUM_TRAIN, NUM_HELD_OUT)
    return {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("prompts", "validation")
    }


def test_held_out_questions_differ_from_each_other_and_from_all_others(tasks: dict[str, list[dict[str, Any]]]) -> None:
    train, held_out = ({line["text"] for line in tasks[name]} for name in ("prompts", "validation"))
    assert len(held_out) == NUM_HELD_OUT
    assert not train & held_out
    assert [len(tasks[name]) for name in ("prompts", "validation")] == [NUM_TRAIN, NUM_HELD_OUT]
    assert len({line["prompt_id"] for lines in tasks.values() for line in lines}) == NUM_TRAIN + NUM_HELD_OUT


def test_the_tasks_are_the_same_each_time(tasks: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    write_tasks(tmp_path, NUM_TRAIN, NUM_HELD_OUT)
    assert [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()] == tasks[
        "validation"
    ]


def test_the_verifier_accepts_each_task_s_own_answer_and_no_other(tasks: dict[str, list[dict[str, Any]]]) -> None:
    function = load_function(VERIFIER)
    for line in tasks["prompts"][:20]:
        right, wrong = line["task"]["answer"], str(int(line["task"]["answer"]) + 1)
        scores = [checked(function(_sample(line, response))) for response in (f" {right}\n", f" {wrong}\n")]
        assert scores == [1.0, 0.0]


def test_without_reasoning_gym_the_preparation_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RlhfError, match=r"pip install .*\[rlvr\]"):
        prepare(tmp_path / "out")


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (" 57", 1.0),
        ("57\nand more", 1.0),  # only the first line counts
        ("57.0", 1.0),  # chain_sum compares numbers
        ("The answer is 57", 0.0),  # partial credit in reasoning-gym, none here
        ("157", 0.0),
        ("", 0.0),
        ("\n", 0.0),
    ],
)
def test_only_the_answer_alone_is_right(response: str, expected: float) -> None:
    task = {"question": "43 + 14 =", "answer": "57", "metadata": {"source_dataset": "chain_sum"}}
    value = load_function(VERIFIER)(_sample({"text": "43 + 14 =", "task": task}, response))
    assert checked(value) == expected


def _sample(line: dict[str, Any], response: str) -> Sample:
    """As the actor sends it."""
    metadata = {"task": line["task"], "prompt": line["text"], "response": response}
    return Sample(text=line["text"] + response, metadata=metadata)
