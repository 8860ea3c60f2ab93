"""`actor.data.step_inputs` and `prompt_stream`: orders, weights, a curriculum, and resumption in the middle of them."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actor.data.prompts import PromptError
from actor.data.step_inputs import StepInputs
from python_backend.config import PromptFileSection
from tests.support.prompts import inputs_of, write_prompts


def drawn(inputs: StepInputs, *steps: int) -> list[str]:
    return [prompt.prompt_id for step in steps for prompt in inputs.prompts_of(step)]


def numbered(tmp_path: Path, name: str, count: int) -> Path:
    return write_prompts(tmp_path / f"{name}.jsonl", [f"{name}{i}" for i in range(count)])


def resumed(inputs: StepInputs, step: int, then: StepInputs) -> StepInputs:
    """Return `then`, continued from the checkpoint that `inputs` writes for `step`."""
    then.restore(step, json.loads(json.dumps(inputs.state(step))))
    return then


@pytest.mark.parametrize("seed", [0, 3, 2**32 - 1])
def test_a_single_file_has_the_order_of_whole_epochs(tmp_path: Path, seed: int):
    """The rule of the first version, which read the whole file: position -> (epoch, index) -> permutation."""
    inputs = inputs_of(numbered(tmp_path, "a", 7), per_step=3, seed=seed)
    expected = []
    for position in range(30):
        epoch, index = divmod(position, 7)
        expected.append(f"a{np.random.default_rng([seed, epoch]).permutation(7)[index]}")
    assert drawn(inputs, *range(1, 11)) == expected
    assert all(len(set(expected[start : start + 7])) == 7 for start in range(0, 28, 7))
    assert [inputs.epoch(step) for step in (8, 9, 10)] == [3, 3, 4]


def test_each_response_has_its_prompt_and_every_step_its_seed(tmp_path: Path):
    inputs = inputs_of(numbered(tmp_path, "a", 3), per_step=2)
    grouped = StepInputs(inputs.stream, 0, 2, responses_per_prompt=3)
    one, other = drawn(inputs, 1)
    assert drawn(grouped, 1) == [one] * 3 + [other] * 3
    assert grouped.seed_of(1) != grouped.seed_of(2)


def test_weights_decide_the_shares_of_every_stretch(tmp_path: Path):
    names, weights = "abc", (5.0, 3.0, 2.0)
    files = [
        PromptFileSection(path=numbered(tmp_path, name, 11), weight=weight)
        for name, weight in zip(names, weights, strict=True)
    ]
    prompts = drawn(inputs_of(*files, per_step=7), *range(1, 101))
    for end in (10, 70, 333, 700):
        counts = Counter(prompt[0] for prompt in prompts[:end])
        for name, weight in zip(names, weights, strict=True):
            assert abs(counts[name] - end * weight / 10) < 2
    for name in names:  # each file has its own epochs
        own = [prompt for prompt in prompts if prompt[0] == name]
        assert all(len(set(own[start : start + 11])) == 11 for start in range(0, len(own) - 11, 11))


def curriculum(tmp_path: Path) -> list[PromptFileSection]:
    paths = {name: numbered(tmp_path, name, 9) for name in "abc"}
    return [
        PromptFileSection(path=paths["a"], weight=3, until_step=6),
        PromptFileSection(path=paths["b"]),
        PromptFileSection(path=paths["c"], from_step=4, until_step=5),
        PromptFileSection(path=paths["a"], weight=0.5, from_step=9),
    ]


def test_a_curriculum_changes_the_files_by_step(tmp_path: Path):
    inputs = inputs_of(*curriculum(tmp_path))
    steps = {step: Counter(prompt[0] for prompt in drawn(inputs, step)) for step in range(1, 13)}
    assert all(steps[step] == {"a": 3, "b": 1} for step in (1, 2, 3, 6))
    assert steps[4] + steps[5] == {"a": 5, "b": 2, "c": 1} or steps[4] + steps[5] == {"a": 5, "b": 1, "c": 2}
    assert steps[7] == steps[8] == {"b": 4}
    assert sum((steps[step] for step in (9, 10, 11)), Counter()) == {"a": 4, "b": 8}
    whole = drawn(inputs_of(*curriculum(tmp_path)), *range(1, 13))
    own = [prompt for prompt in whole if prompt[0] == "a"]
    assert len(set(own[:9])) == 9  # the second entry of the path goes on where the first ended


@pytest.mark.parametrize("limits", [{}, {"too_long": "skip", "max_tokens": 2}])
def test_a_resumed_run_goes_on_where_its_checkpoint_was(tmp_path: Path, limits: dict[str, Any]):
    files = curriculum(tmp_path)
    write_prompts(files[1].path, [f"b{i}" for i in (1, 10, 2, 20, 3, 30, 4, 5)])  # some of 3 tokens
    whole = drawn(inputs_of(*files, **limits), *range(1, 13))
    for last in range(1, 12):
        first = inputs_of(*files, **limits)
        before = drawn(first, *range(1, last + 1))
        first.prompts_of(min(last + 1, 12))  # prefetched: the checkpoint is that of `last`
        second = resumed(first, last, inputs_of(*files, **limits))
        assert before + drawn(second, *range(last + 1, 13)) == whole
        assert second.state(12) == inputs_of(*files, **limits).state(12)


def test_prompts_go_on_where_they_were_under_another_rollout_size(tmp_path: Path):
    path = numbered(tmp_path, "a", 11)
    whole = drawn(inputs_of(path, per_step=41), 1)
    first = inputs_of(path, per_step=4)
    second = resumed(first, 2, inputs_of(path, per_step=32))
    third = resumed(second, 3, inputs_of(path, per_step=1))
    assert drawn(first, 1, 2) + drawn(second, 3) + drawn(third, 4) == whole
    assert [inputs.after(step).prompts for inputs, step in ((first, 2), (second, 3), (third, 4))] == [8, 40, 41]


def test_a_checkpoint_without_positions_goes_on_in_its_only_file(tmp_path: Path):
    path = numbered(tmp_path, "a", 7)
    inputs = inputs_of(path)
    inputs.restore(5, {"prompts_taken": 20})
    assert drawn(inputs, 6) == drawn(inputs_of(path), 6)


def test_a_file_that_has_changed_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path, other = numbered(tmp_path, "a", 7), numbered(tmp_path, "b", 7)
    first = inputs_of(path)
    moved = path.rename(tmp_path / "moved.jsonl")
    after = drawn(resumed(first, 2, inputs_of(moved)), 3)
    assert after == drawn(first, 3)
    assert not caplog.messages
    with moved.open("a") as file:
        file.write('{"text": "new"}\n')
    resumed(first, 2, inputs_of(moved))
    assert f"{moved} has changed since the checkpoint: after 8 rows taken" in caplog.messages[-1]
    numbered(tmp_path, "a", 7)
    resumed(first, 2, inputs_of(path, other))
    assert caplog.messages[1:] == [f"{other} is not in the checkpoint; its prompts are taken from the beginning"]


def test_other_special_tokens_than_at_the_checkpoint_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = numbered(tmp_path, "a", 7)
    resumed(inputs_of(path, add_special_tokens=False), 1, inputs_of(path))
    (message,) = caplog.messages
    assert message.startswith("actor.prompts.add_special_tokens was False up to the checkpoint and is True now")


def test_the_next_row_takes_the_place_of_a_skipped_one(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write_prompts(tmp_path / "a.jsonl", ["a", "long", "b", "longer", "c"])
    rows = [["a", "long", "b", "longer", "c"][i] for i in np.random.default_rng([0, 0]).permutation(5)]
    inputs = inputs_of(path, per_step=1, max_tokens=2, too_long="skip")
    assert drawn(inputs, 1, 2, 3) == [row for row in rows if len(row) == 1]
    assert [inputs.after(step).rows[str(path)] for step in (1, 2, 3)] == [
        i + 1 for i, row in enumerate(rows) if len(row) == 1
    ]
    assert len(caplog.messages) == 1  # the first one, not each
    assert "more than actor.prompts.max_tokens (2); 1 such prompts of this file were skipped" in caplog.messages[0]
    nothing = inputs_of(path, max_tokens=0, too_long="skip")
    with pytest.raises(PromptError, match=re.escape(f"{path} has no prompts of at most 0 tokens")):
        nothing.prompts_of(1)
    cut = inputs_of(path, per_step=5, max_tokens=2, too_long="truncate").prompts_of(1)
    assert sorted(bytes(prompt.tokens.tolist()) for prompt in cut) == [b"a", b"b", b"c", b"er", b"ng"]


def test_a_row_is_checked_when_a_step_reads_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    path = numbered(tmp_path, "a", 30)
    lines = path.read_text().splitlines()
    bad = int(np.random.default_rng([0, 0]).permutation(30)[9])
    path.write_text("\n".join([*lines[:bad], "{", *lines[bad + 1 :]]))
    inputs = inputs_of(path)
    first = drawn(inputs, 1, 2)
    with pytest.raises(PromptError, match=re.escape(f"{path}:{bad + 1}: not JSON")):
        inputs.prompts_of(3)
    path.write_text("\n".join(lines))
    mended = resumed(inputs, 2, inputs_of(path))
    assert first + drawn(mended, 3) == drawn(inputs_of(path), 1, 2, 3)
