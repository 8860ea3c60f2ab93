"""TRL's reward functions run unchanged: known by their parameters, called with lists; None is no score and no error."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import trl_functions
from test_groupwise import scored

from python_backend.rewards.function import FunctionError, Sample, load_function
from python_backend.rewards.pool import FunctionCall, WorkerPool

FILE = Path(trl_functions.__file__)
QUESTION = [{"role": "user", "content": "6 times 7?"}]


def chat(reply: str, **columns: object) -> Sample:
    """As the actor sends a chat: the rendered prompt as text, and its messages."""
    return Sample(reply, [1], {"prompt": "rendered", "response": reply, "messages": QUESTION, **columns})


def plain(response: str, **columns: object) -> Sample:
    return Sample(f"p{response}", [1], {"prompt": "p", "response": response, **columns})


def message(content: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": content}]


@pytest.mark.parametrize("groupwise", [False, True])
def test_accuracy_and_format_of_chats_in_a_worker(groupwise: bool) -> None:
    """Alone or as a group, in one process: the same scores, and None is neither a score nor an error."""
    group = [
        chat(r"<think>6 * 7</think>\boxed{42}", solution="42"),
        chat(r"\boxed{41}", solution="42"),
        chat(r"<think></think>\boxed{42}", solution="many"),
    ]
    found = {}
    for name in ("accuracy", "thinks_first"):
        pool = WorkerPool(FunctionCall(f"{FILE}:{name}", 60.0, groupwise), num_workers=1)
        results = scored(pool, group) if groupwise else scored(pool, *([sample] for sample in group))
        pool.close()
        found[name] = [outcome for outcomes in results for outcome in outcomes]
        assert [outcome.error for outcome in found[name]] == ["", "", ""]
    assert [outcome.score for outcome in found["thinks_first"]] == [1, 0, 1]
    assert [outcome.score for outcome in found["accuracy"]][:2] == [1, 0]
    assert math.isnan(found["accuracy"][2].score)


@pytest.mark.parametrize(
    ("sample", "prompts", "completions"),
    [
        (plain(" r"), ["p"], [" r"]),
        (chat("r"), [QUESTION], [message("r")]),
        (Sample("whole text"), [None], ["whole text"]),  # a client that sends nothing else
        (Sample("", [], {"messages": [*QUESTION, *message("")]}), [QUESTION], [message("")]),  # the gateway
        (Sample("", [], {"messages": QUESTION}), [QUESTION], [message("")]),
    ],
)
def test_what_it_receives(sample: Sample, prompts: list[Any], completions: list[Any]) -> None:
    columns = {"answer": ["a"], "level": [3]}
    expected = {"prompts": prompts, "completions": completions, **columns}
    sample.metadata.update({"answer": "a", "level": 3, "expected": expected})
    assert load_function(f"{FILE}:echo")(sample) == 1


def test_signatures() -> None:
    for name, options, scores in (
        ("contains", {}, [1, 0]),
        ("shorter_than", {"limit": 2}, [1, 0]),
        ("Prefers", {"word": "b"}, [0, 1]),
    ):
        function = load_function(f"{FILE}:{name}", options)
        assert function([plain("a", answer="a"), plain("bb", answer="a", more=1)]) == scores
        assert function(plain("a", answer="a")) == scores[0]


@pytest.mark.parametrize(
    ("name", "options", "cause"),
    [
        ("needs_ids", {}, "completion_ids: not available"),
        ("needs_ids_too", {}, "completion_ids: not available"),
        ("contains", {"limit": 1}, "options.limit: unknown"),
    ],
)
def test_what_is_refused_at_load(name: str, options: dict[str, Any], cause: str) -> None:
    with pytest.raises(FunctionError, match=re.escape(cause)):
        load_function(f"{FILE}:{name}", options)


def test_a_missing_column_and_a_wrong_number_of_scores_are_errors() -> None:
    with pytest.raises(TypeError, match="solution"):
        load_function(f"{FILE}:accuracy")(chat("r"))
    with pytest.raises(ValueError, match="returned 2 scores for a group of 1"):
        load_function(f"{FILE}:one_too_many")(plain("r"))
