"""Reward functions with the signatures of those for TRL's GRPOTrainer: lists in, a list out."""

import re
from collections.abc import Callable
from typing import Any

Chat = list[dict[str, str]]


def accuracy(
    completions: list[Chat], solution: list[str], log_extra: Callable[..., None] | None = None, **kwargs: Any
) -> list[float | None]:
    """Return 1 for the boxed solution, else 0; None where the solution is no number."""
    scores: list[float | None] = []
    for completion, expected in zip(completions, solution, strict=True):
        found = re.search(r"\\boxed\{([^{}]*)\}", completion[0]["content"])
        scores.append(float(found is not None and found[1] == expected) if expected.isdecimal() else None)
    return scores


def thinks_first(completions: list[Chat], **kwargs: Any) -> list[float]:
    """Return 1 for thoughts in tags before the answer."""
    return [float(bool(re.match(r"<think>.*</think>.", each[0]["content"], re.DOTALL))) for each in completions]


def echo(prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float]:
    """Return whether the arguments are those in the column `expected`, which is one list per argument."""
    given = {"prompts": prompts, "completions": completions, **columns}
    return [float(given | {"expected": None} == {**columns["expected"][0], "expected": None})] * len(prompts)


def contains(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    """A function without `**kwargs`."""
    return [float(one in text) for one, text in zip(answer, completions, strict=True)]


def shorter_than(completions: list[str], *, limit: int, **kwargs: Any) -> list[float]:
    """A function with an option."""
    return [float(len(text) < limit) for text in completions]


class Prefers:
    """A callable object with an option."""

    def __init__(self, word: str) -> None:
        self.word = word

    def __call__(self, prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return [float(self.word in text) for text in completions]


def needs_ids(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A function of the sampled token ids."""
    return [float(len(ids)) for ids in completion_ids]


def needs_ids_too(completions: list[str], completion_ids: list[list[int]]) -> list[float]:
    """A function of both."""
    return needs_ids(completion_ids)


def one_too_many(completions: list[str], **kwargs: Any) -> list[float]:
    """A function with a bug."""
    return [0.0] * (len(completions) + 1)
