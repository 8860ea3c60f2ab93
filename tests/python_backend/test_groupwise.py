"""Groupwise functions and options, in real worker processes: what fails costs its own group or row."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import reward_functions

from python_backend.config import ConfigError, RunConfig, load_config
from python_backend.rewards import count
from python_backend.rewards.counts import take_counts
from python_backend.rewards.function import FunctionError, Sample, load_function
from python_backend.rewards.groups import BadGroup, group_key
from python_backend.rewards.pool import FairQueue, FunctionCall, ScoreOutcome, WorkerPool

FILE = Path(reward_functions.__file__)
LIMIT_S = 1.0


def samples(*responses: str, **metadata: object) -> list[Sample]:
    """One sample for each response, with as many tokens as it has letters."""
    return [Sample(each, [0] * len(each), {"response": each, "prompt": "p", **metadata}) for each in responses]


def scored(pool: WorkerPool, *groups: Sequence[Sample]) -> list[list[ScoreOutcome]]:
    """The outcomes of each group."""
    results: dict[int, list[ScoreOutcome]] = {}
    left = threading.Semaphore(0)

    def done(number: int, outcomes: list[ScoreOutcome]) -> None:
        results[number] = outcomes
        left.release()

    pool.submit(
        [(list(group), lambda found, number=number: done(number, found)) for number, group in enumerate(groups)]
    )
    for _ in groups:
        assert left.acquire(timeout=120)
    return [results[number] for number in range(len(groups))]


def numbers(outcomes: Sequence[ScoreOutcome]) -> list[float]:
    assert not any(outcome.error for outcome in outcomes), outcomes
    return [outcome.score for outcome in outcomes]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(FunctionCall(f"{FILE}:by_group", LIMIT_S, groupwise=True), num_workers=1)
    yield pool
    pool.close()


@pytest.mark.parametrize(("name", "expected"), [("rank", [0.5, 0, 1]), ("distinct", [1, 1, 1]), ("wins", [0, 0, 2])])
def test_ranking_diversity_and_pairs(name: str, expected: list[float]) -> None:
    group = samples("bb", "a", "ccc")
    for sample, score in zip(group, (1, 1, 2), strict=True):
        sample.metadata["score"] = score
    function = load_function(f"{FILE}:{name}")
    assert [float(each) for each in function(group)] == expected
    assert [float(each) for each in function(group[:1])] == [expected[1] if name != "rank" else 0]
    alike = [float(each) for each in function([group[0], group[0]])]
    assert alike == ([0.5, 0.5] if name == "distinct" else [0, 0])


def test_options_and_an_array() -> None:
    group = [Sample("", [], {"score": score}) for score in (3, 1, 2.5)]
    for margin, expected in ((0.0, [2, 0, 1]), (1.0, [1, 0, 1])):
        assert load_function(f"{FILE}:wins", {"margin": margin})(group).tolist() == expected


@pytest.mark.parametrize(
    ("action", "cause"),
    [
        ("raise", "RuntimeError: no verdict on None"),
        ("exit", "SystemExit: enough"),
        ("die", "the worker process ended with exit code 3"),
        ("loop", "took longer than 1 s and was killed"),
        ("few", "the function returned 2 scores for a group of 3"),
        ("many", "the function returned 4 scores for a group of 3"),
        ("number", "the function returned 1.0, but it must return 3 numbers, one per response"),
        ("text", "the function returned '1.0', but it must return 3 numbers, one per response"),
        ("dict", "the function returned {0: 1.0, 1: 1.0, 2: 1.0}, but it must return 3 numbers, one per response"),
    ],
)
def test_what_fails_costs_its_own_group(pool: WorkerPool, action: str, cause: str) -> None:
    failed, other = scored(pool, samples("a", "b", "c", do=action), samples("d", "e"))
    assert [re.sub(r" \(reward_functions.py:\d+\)$", "", outcome.error) for outcome in failed] == [cause] * 3
    assert all(math.isnan(outcome.score) for outcome in failed)
    assert numbers(other) == [2, 2]


def test_a_score_that_is_none_costs_its_own_row(pool: WorkerPool) -> None:
    (found,) = scored(pool, samples("a", "b", "c", "d", "e", do="gaps"))
    assert [(outcome.score, outcome.error) for outcome in (found[0], found[4])] == [(1.0, ""), (0.0, "")]
    assert [outcome.error for outcome in found[1:4]] == [
        "the function returned None, but it must return a number",
        "returned nan, must be finite",
        "the function returned 'x', but it must return a number",
    ]


def test_the_queue_counts_samples() -> None:
    queue = FairQueue()
    queue.put([(samples("a", "b"), print), (samples("c"), print)])
    assert queue.size == 3
    queue.get()
    assert queue.size == 1


def test_rows_with_the_same_id_or_prompt_are_a_group() -> None:
    chat = [{"role": "user", "content": "?"}]
    reply = {"role": "assistant", "content": ""}
    alike: list[list[dict[str, Any]]] = [
        [{"group": 1}, {"group": 1, "prompt": "x"}],
        [{"group": "1"}],
        [{"prompt": "1"}, {"prompt": "1", "group": None}],
        [{"messages": chat}, {"messages": [*chat, reply]}],
        [{"messages": [*chat, reply, *chat]}],
    ]
    for one, other in itertools.combinations(alike, 2):
        assert group_key(one[0]) != group_key(other[0])
    for group in alike:
        assert len({group_key(metadata) for metadata in group}) == 1


@pytest.mark.parametrize(
    ("metadata", "cause"),
    [
        ({}, "metadata has neither group nor prompt"),
        ({"messages": "x"}, "metadata has neither group nor prompt"),
        ({"messages": []}, "metadata has neither group nor prompt"),
        *[({"group": bad, "prompt": "p"}, f"metadata.group: {bad!r}, must be") for bad in (True, 1.5, [1], {})],
    ],
)
def test_a_row_without_a_group(metadata: dict[str, Any], cause: str) -> None:
    with pytest.raises(BadGroup, match=re.escape(cause)):
        group_key(metadata)


def test_a_prompt_of_any_depth_is_a_key_or_a_sentence() -> None:
    prompt: list[Any] = []
    for _ in range(10_000):
        prompt = [prompt]
    with pytest.raises(BadGroup, match="nested too deeply"):
        group_key({"prompt": prompt})


def test_any_metadata_has_a_group_or_a_cause() -> None:
    odd = [
        None,
        True,
        0,
        -1,
        1.5,
        "",
        "\ud800",
        [],
        [1],
        [None],
        {},
        {"role": "assistant"},
        [{"role": ["tool"]}],
        [[[]]],
    ]
    for name, value in itertools.product(("group", "prompt", "messages"), odd):
        with contextlib.suppress(BadGroup):
            assert group_key({name: value}) == group_key(json.loads(json.dumps({name: value})))


def test_a_class_gets_its_options_once_and_what_it_counts_reaches_the_server() -> None:
    counted: list[Any] = []
    call = FunctionCall(f"{FILE}:Scaled", 2.0, False, {"factor": 10})
    pool = WorkerPool(call, num_workers=1, counted=counted.append)
    found = scored(pool, *[[sample] for sample in samples("a", "bbb")], samples("c", do="raise"))
    pool.close()
    assert [outcomes[0].score for outcomes in found[:2]] == [12, 32]  # 2: the time limit
    assert "no verdict" in found[2][0].error
    assert counted == [{"calls": 1, "tokens": 1}, {"calls": 1, "tokens": 3}, {"calls": 1, "tokens": 1}]


@pytest.mark.parametrize(
    ("name", "options", "cause"),
    [
        ("Scaled", {"factr": 1}, "options.factr: unknown; did you mean factor?"),
        ("Scaled", {}, "options.factor: missing"),
        ("Scaled", {"factor": -1}, "options.factor: -1, must be above 0"),
        ("Scaled", {"factor": "x"}, "cannot be used with its options: TypeError: "),
        ("wins", {"margins": 1}, "options.margins: unknown; did you mean margin?"),
        ("num_tokens", {"x": 1}, "options.x: unknown; the options: none"),
    ],
)
def test_a_wrong_option_is_one_sentence(name: str, options: dict[str, Any], cause: str) -> None:
    with pytest.raises(FunctionError, match=re.escape(cause)) as caught:
        load_function(f"{FILE}:{name}", options, timeout_s=1.0)
    assert str(caught.value).startswith(f"{FILE}:{name}")


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"timeout_s": 3}, "'timeout_s': use the term's own timeout_s"),
        ({"a b": 3}, "'a b': not the name of an argument"),
        ({"x": float("nan")}, "not expressible in JSON"),
        ([1], "rewards.a.options"),
    ],
)
def test_options_that_no_function_can_get(options: Any, cause: str) -> None:
    with pytest.raises(ValueError, match=re.escape(cause)):
        RunConfig.model_validate({"rewards": {"a": {"function": "a.py:b", "options": options}}})


def test_options_can_be_overridden_and_model_takes_none(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rewards: {model: {}, a: {function: 'a.py:b', options: {x: 1, y: [2]}, groupwise: true}}")
    config = load_config(path, ["rewards.a.options.x=3"])
    assert config.functions["a"].options == {"x": 3, "y": [2]}
    with pytest.raises(ConfigError, match="'model' is the checkpoint of the reward section"):
        load_config(path, ["rewards.model.groupwise=true"])


@pytest.mark.parametrize(("name", "amount"), [("A", 1), ("a b", 1), ("", 1), ("a", -1), ("a", math.inf)])
def test_what_cannot_be_counted(name: str, amount: float) -> None:
    with pytest.raises(ValueError, match="counter"):
        count(name, amount)
    assert take_counts() == {}
